"""Server programs that run as long as a block."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from batchkit.isolation.child import die_with_parent
from tests.support.waiting import until


class NotInstalledError(Exception):
    """The reason why a server can't be started here."""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def running(command: Sequence[object], port: int, log: Path, **environment: str) -> Iterator[None]:
    """Run a server, and wait until it listens at ``port``, if that is not 0. Kill it at the end."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            list(map(str, command)),
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            preexec_fn=die_with_parent,
        )

    def answers() -> bool:
        assert process.poll() is None, log.read_text(errors="replace")[-2000:]
        with suppress(OSError):
            if port:
                socket.create_connection(("127.0.0.1", port)).close()
            return True
        return False

    try:
        until(answers)
        yield
    finally:
        process.kill()
        process.wait()
