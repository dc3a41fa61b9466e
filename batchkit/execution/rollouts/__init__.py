"""Rows with several generations: each row is a coroutine that asks for them (``rollouts``).

``[[steps]]`` is one that batchkit has (``steps``), ``[rollout]`` one that the user wrote (``function``). Both
ask through an ``OpenRow``, which gives a row that was interrupted its recorded answers.
"""
