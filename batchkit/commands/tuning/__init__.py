"""The ``find-bs`` and ``tune`` commands: find the fastest settings for a job, using its rows.

A measurement is a short real run, called a trial (``commands/trial/``). ``find.py`` searches for a batch size,
``table.py`` measures given sizes several times, and ``tune.py`` searches engine options.
"""
