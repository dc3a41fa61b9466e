"""``find-bs`` and ``bench``: find the batch size that serves a job best, with its own rows.

Both measure sizes with trials (``commands/trial/``): ``find.py`` searches, ``table.py`` repeats. Neither
leaves files behind.
"""
