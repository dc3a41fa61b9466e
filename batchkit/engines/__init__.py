"""Engines: objects that answer requests.

Each module in ``ENGINES`` has the functions ``open_engine(job)`` and ``open_preflight(job)``. It may also have:

- ``preload()``: imports the packages that the engine needs. An engine with this function holds a model and runs in a
  child process.
- ``MAX_NUM_SEQS``: the default number of rows that run at the same time.
- ``options_for_share(options, engines)``: returns the engine options with which each of several engines uses an equal
  part of its GPU (``workers.per_gpu``).
- ``REQUIRES``: packages that must be installed; batchkit's extra with the engine's name installs them.
"""

ENGINES = {
    "vllm": "batchkit.engines.vllm",
    "transformers": "batchkit.engines.transformers",
    "openai-server": "batchkit.engines.openai.engine",
    "dry-run": "batchkit.engines.dry_run",
}
