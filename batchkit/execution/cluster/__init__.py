"""Several workers, which Ray starts and assigns to GPUs. Only this package uses Ray.

- ``session``: joins or starts Ray, and computes the resources of a worker.
- ``actor``: the code in each process that Ray starts; it runs a Worker.
- ``leases``: decides which rows each worker gets.
- ``hiring``: decides how many workers there are, and starts them.
- ``head``: watches Ray's head node.
- ``pool``: the run's side, which is the only writer of the run folder.
"""
