"""The run: sends rows to workers, and writes the records that come back."""
