"""``find-bs`` and ``bench``: find the batch size that serves a job best, with its own rows.

A trial (``trial.py``) is a fresh engine process that gets rows as in a run, for a limited time.
``find.py`` searches with trials, ``bench.py`` repeats them, and neither leaves files behind.
"""
