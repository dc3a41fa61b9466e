"""``batchkit serve`` in a process of its own, and the ``openai`` SDK as its client."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import tomlkit
from openai import OpenAI
from openai.types import Batch
from openai.types.batch_error import BatchError

from tests.support.command_line import batchkit
from tests.support.forks import LightFork
from tests.support.own_process import begin
from tests.support.small_vllm import SMALL
from tests.support.waiting import until

CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


class Served(NamedTuple):
    """The server's process, its address without ``/v1``, and what it has printed."""

    process: subprocess.Popen[str]
    url: str
    stderr: list[str]

    def client(self, key: str = "none") -> OpenAI:
        """The SDK as it comes; errors are raised at once."""
        return OpenAI(base_url=f"{self.url}v1", api_key=key, max_retries=0, timeout=60)

    def http(self, key: str = "") -> httpx.Client:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60, trust_env=False)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def serving(*args: str | Path, cwd: Path, start: type[Any] = LightFork) -> Iterator[Served]:
    """``args`` follow ``batchkit serve``. At the end it is stopped with SIGTERM, unless it was killed."""
    process = begin("serve", *args, "--port", "0", cwd=cwd, start=start)
    printed: list[str] = []
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert "http://" in line, process.communicate(timeout=30)[1]
    try:
        reader = threading.Thread(target=lambda: printed.extend(process.stderr or ()))
        reader.start()  # or the pipe is full, and the server waits
        yield Served(process, line.split()[-1].removesuffix("v1"), printed)
    finally:
        was_killed = process.poll() is not None
        if not was_killed:
            process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=60)
        reader.join()
        assert "Traceback" not in "".join(printed), "".join(printed)
        assert was_killed or code == 0, (code, printed)


def new_keys(*names: str, cwd: Path) -> list[str]:
    """A key of each name, in ``keys.txt``."""
    args = ("serve", "--api-key-file", cwd / "keys.txt", "--new-key")
    return [batchkit(*args, name).stdout.strip() for name in names]


def request(custom_id: str, model: str, text: Any = "Hello", **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    body = {"model": model, "messages": messages, "max_tokens": 8, **body}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


def lines_of(requests: Sequence[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in requests)


def submit(
    client: OpenAI, requests: Sequence[dict[str, Any]] | bytes, window: str = "24h", **more: Any
) -> Batch:
    content = requests if isinstance(requests, bytes) else lines_of(requests)
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    given: Any = {"completion_window": window, "endpoint": CHAT, **more}
    return client.batches.create(input_file_id=file.id, **given)


def ended(client: OpenAI, batch: Batch, within_s: float = 120) -> Batch:
    until(lambda: client.batches.retrieve(batch.id).status in ENDED, within_s)
    return client.batches.retrieve(batch.id)


def faults_of(batch: Batch) -> list[BatchError]:
    """Why the batch failed."""
    return (batch.errors and batch.errors.data) or []


def content(client: OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """The lines of an output or error file; none if there is no such file."""
    if file_id is None:
        return []
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def texts_of(lines: list[dict[str, Any]]) -> dict[str, str]:
    return {
        line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"]
        for line in lines
    }


def job_file(folder: Path, model: Path, **more: Any) -> str:
    engine = {"model": str(model), "options": {**SMALL, **more}}
    (folder / "job.toml").write_text(tomlkit.dumps({"engine": engine}))
    return "job.toml"
