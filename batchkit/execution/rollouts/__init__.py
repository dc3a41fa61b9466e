"""Rows with several generations: each row is a coroutine that requests them (``rollouts``).

``steps`` implements ``[[steps]]``, ``transcription`` implements ``task = "transcribe"``, and ``function`` runs the
user's ``[rollout]`` function. All of them send requests through an ``OpenRow``. After an interruption, the OpenRow
answers requests from the row's recorded generations.
"""
