"""The execution of a run: rows go to workers, and their records are written."""
