"""``batchkit view`` in a process of its own, and requests to it."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from tests.support.forks import STACKS
from tests.support.own_process import begin
from tests.support.waiting import until


class Viewed(NamedTuple):
    """The server's process, its address, and a client."""

    process: subprocess.Popen[str]
    url: str
    client: httpx.Client

    def get(self, path: str, code: int = 200, **params: Any) -> Any:
        """The JSON at ``/api/`` + ``path``."""
        answer = self.client.get(f"/api/{path}", params=params)
        assert answer.status_code == code, answer.text
        return answer.json()

    def rows(self, run: str = "a", **params: Any) -> dict[str, Any]:
        """A page of rows, once all of the log is indexed."""
        found: dict[str, Any] = {}

        def is_whole() -> bool:
            found.update(self.get(f"runs/{run}/rows", **params))
            return bool(found["indexed"] == 1)

        until(is_whole)
        return found

    def indexes(self, run: str = "a", **params: Any) -> list[int]:
        return [row["index"] for row in self.rows(run, **params)["rows"]]


@contextmanager
def viewing(*args: str | Path, cwd: Path, port: int = 0) -> Iterator[Viewed]:
    """``args`` follow ``batchkit view``."""
    process = begin("view", *args, "--port", str(port), "--no-browser", cwd=cwd)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("http://"), process.communicate(timeout=30)[1]
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
            client.get("/")  # the event loop runs: a signal before that leaves half a loop
            yield Viewed(process, url, client)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            _, stderr = process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.send_signal(STACKS)  # where it hangs
            time.sleep(1)
            process.kill()
            raise AssertionError(process.communicate()) from None
        assert "Traceback" not in stderr, stderr
