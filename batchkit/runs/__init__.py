"""Readers of a run on disk: its index, newest records, table, scores and generations."""
