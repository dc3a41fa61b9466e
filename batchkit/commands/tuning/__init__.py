"""The ``find-bs`` and ``tune`` commands: find the fastest settings for a job, using its rows.

All three measure with trials (``commands/trial/``): short real runs. ``find.py`` searches for a batch size,
``table.py`` measures given sizes several times, and ``tune.py`` searches engine options.
"""
