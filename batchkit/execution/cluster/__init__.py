"""Several workers, placed and pinned to their GPUs by Ray. Only this package uses Ray.

The run hands out rows in leases (``leases``) and is the only writer (``pool``). Each process
that Ray starts runs a Worker (``actor``). ``session`` joins or starts Ray, and computes which
resources a worker needs.
"""
