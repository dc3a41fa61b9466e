"""``find-bs`` and ``bench``: how many requests at once serve a job best, measured on its own rows.

A trial (``trial.py``) is a fresh engine process that is fed as a run would feed it, for a bounded
time. ``find.py`` searches with trials, ``bench.py`` repeats them, and neither leaves anything behind.
"""
