"""Engines, which answer requests.

Each module in ``ENGINES`` has ``open_engine(job)`` and ``open_preflight(job)``. Optional names:

- ``SAMPLING``: the only sampling parameters that the engine supports.
- ``preload()``: import what the engine needs. An engine with it holds a model and runs in a child process.
- ``MAX_NUM_SEQS``: the default number of rows that run at the same time.
- ``REQUIRES``: packages that the extra with the engine's name installs.
"""

ENGINES = {
    "vllm": "batchkit.engines.vllm",
    "transformers": "batchkit.engines.transformers",
    "openai-server": "batchkit.engines.openai.engine",
    "dry-run": "batchkit.engines.dry_run",
}
