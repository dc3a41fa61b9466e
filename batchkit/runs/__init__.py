"""Reading a run: its index, its newest records, its table, its scores and steps."""
