"""The ``find-bs``, ``bench`` and ``tune`` commands: find the fastest settings for a job, using its rows.

All measure with trials (``commands/trial/``). ``find.py`` searches for a batch size, ``table.py`` repeats given
sizes, and ``tune.py`` searches engine options.
"""
