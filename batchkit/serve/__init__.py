"""``batchkit serve``: OpenAI's Batch API over runs.

A batch is a run: its rows are the lines of an uploaded file, its answers and its progress are in the run folder. The
database (``store.py``) has only what a run has no place for: files, owners, states and their times.
"""
