"""vLLM's server, as ``vllm serve``, and its ``run-batch``, which the CPU build lacks:
``python -m tests.support.vllm_server [run-batch] …``.

Its engine's process is a fork, as on a GPU; on a CPU it would import vLLM again.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from batchkit.engines.openai.own_server import claimed_port
from tests.support.forks import Fork

# For vLLM this is still true, but it leaves the worker in the engine's process: fewer imports.
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "01"}


@contextmanager
def serving(model: Path, options: Mapping[str, Any], log: Path) -> Iterator[str]:
    """The address of the API of a server that runs ``model``; it prints to ``log``."""
    port, claim = claimed_port()
    url = f"http://127.0.0.1:{port}"
    with (
        claim,
        log.open("w") as output,
        _begun(model, options, "--port", str(port), output=output) as server,
    ):
        while not _is_up(f"{url}/health"):
            assert server.poll() is None, log.read_text()[-2000:]
            time.sleep(0.05)
        try:
            yield f"{url}/v1"
        finally:
            server.terminate()


def run_batch(model: Path, options: Mapping[str, Any], batch: Path) -> list[dict[str, Any]]:
    """What ``vllm run-batch`` answers to the lines of ``batch``."""
    answers = batch.with_suffix(".answers.jsonl")
    words = ("run-batch", "-i", str(batch), "-o", str(answers))
    with _begun(model, options, *words, output=subprocess.PIPE) as process:
        printed, _ = process.communicate(timeout=240)
    assert process.returncode == 0, printed[-2000:]
    return [json.loads(line) for line in answers.read_text().splitlines()]


def _begun(model: Path, options: Mapping[str, Any], *words: str, output: Any) -> Fork:
    first, rest = (words[:1], words[1:]) if words[0] == "run-batch" else ((), words)
    program = [sys.executable, "-m", __name__, *first]
    command = [*program, "--model", str(model), *flags(options), *rest]
    environment = {**os.environ, **ENVIRONMENT, "VLLM_LOGGING_LEVEL": "WARNING"}
    return Fork(command, stdout=output, stderr=subprocess.STDOUT, text=True, env=environment)


def flags(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if value is not False:
            yield f"--{name.replace('_', '-')}"
        if not isinstance(value, bool):
            yield value if isinstance(value, str) else json.dumps(value)


def _is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(url):
            return True
    except OSError:
        return False


def main() -> None:
    from vllm.v1.engine import utils

    utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    if sys.argv[1:2] == ["run-batch"]:
        from vllm.entrypoints.launchers import run_batch

        del sys.argv[1]
        args = run_batch.parse_args()
        run_batch.validate_run_batch_args(args)
        asyncio.run(run_batch.main(args))
    else:
        from vllm.entrypoints.launchers.api_server import entry

        entry.main()


if __name__ == "__main__":
    main()
