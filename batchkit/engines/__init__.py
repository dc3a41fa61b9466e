"""Engines: what answers requests.

A module of ``ENGINES`` has ``open_engine(job)`` and ``open_preflight(job)``. It may have ``SAMPLING``, the
only sampling parameters that it knows; ``preload()``, which imports what it needs, if it holds a model and so
runs in a process of its own; ``MAX_NUM_SEQS``, how many rows that runs at once if the job does not say; and
``REQUIRES``, packages of the extra of its name.
"""

ENGINES = {
    "vllm": "batchkit.engines.vllm",
    "transformers": "batchkit.engines.transformers",
    "openai-server": "batchkit.engines.openai.engine",
    "dry-run": "batchkit.engines.dry_run",
}
