"""The job file: its tables, how it is read, and what is said of its mistakes."""
