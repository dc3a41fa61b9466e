"""The job file: its tables, how it is read, and how its mistakes are reported."""
