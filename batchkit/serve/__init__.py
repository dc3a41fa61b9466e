"""The server behind ``batchkit serve``: OpenAI's Batch API on top of runs.

A batch is a run. Its rows are the lines of an uploaded file; its answers and its progress are in the run folder. The
database (``store.py``) holds only data that has no place in a run: files, owners, states and timestamps.
"""
