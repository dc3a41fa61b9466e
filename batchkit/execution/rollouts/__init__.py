"""Rows with several generations: each row is a coroutine that requests them (``rollouts``).

``steps`` implements ``[[steps]]``, ``transcription`` implements ``task = "transcribe"``, and ``function`` runs the
user's ``[rollout]`` function. All send requests through an ``OpenRow``, which gives an interrupted row its recorded
answers.
"""
