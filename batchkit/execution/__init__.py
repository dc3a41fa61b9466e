"""The run: rows go to workers, records come back."""
