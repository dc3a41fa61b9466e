"""vLLM's server, as ``vllm serve``, which the CPU build lacks: ``python -m tests.support.vllm_server …``.

Its engine's process is a fork, as on a GPU; on a CPU it would import vLLM again.
"""

from __future__ import annotations

import multiprocessing


def main() -> None:
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.v1.engine import utils

    utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    entry.main()


if __name__ == "__main__":
    main()
