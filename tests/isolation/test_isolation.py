"""What hangs, crashes or eats memory in a child process is answered as an error, and the next question is answered."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from batchkit.errors import EngineError
from batchkit.isolation.child import ChildRefusal, answer_all, limit_memory
from batchkit.isolation.client import Gone, ask, server_of
from tests.support.paths import ROOT
from tests.support.waiting import until


def main(connection: Connection) -> None:
    """This module is the handler."""
    limit_memory(1 << 30)
    answer_all(connection, _answer)


def _answer(question: bytes) -> Any:
    match question:
        case b"hang":
            time.sleep(60)
        case b"crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case b"exit":
            os._exit(3)
        case b"eat memory":
            bytes(2 << 30)
        case b"refuse":
            raise ChildRefusal("why", "no such page")
        case b"raise":
            raise KeyError("x")
        case b"answer what can't be sent":
            return object()
    return os.getpid()


def asked(question: bytes, timeout_s: float = 30.0) -> tuple[str, Any]:
    return ask(__name__, "the test", question, timeout_s)


@pytest.mark.parametrize(
    ("question", "answer", "is_ended"),
    [
        (b"refuse", ("why", "no such page"), False),
        (b"raise", ("error", "KeyError: 'x'"), False),
        (b"answer what can't be sent", ("error", "ValueError: unmarshallable object"), False),
        (b"eat memory", ("memory", ""), True),
        (b"hang", TimeoutError, True),
        (b"crash", -signal.SIGSEGV, True),
        (b"exit", 3, True),
    ],
)
def test_the_next_question_is_answered(question: bytes, answer: Any, is_ended: bool) -> None:
    kind, before = asked(b"")
    server = server_of(__name__, "the test")
    assert (kind, before != os.getpid()) == ("value", True)
    if isinstance(answer, tuple):
        assert asked(question) == answer
    elif isinstance(answer, int):
        with pytest.raises(Gone) as gone:
            asked(question)
        assert gone.value.returncode == answer
    else:
        with pytest.raises(answer):
            asked(question, timeout_s=0.2)
    assert asked(b"")[0] == "value"
    assert (asked(b"")[1] != before) == is_ended
    assert server_of(__name__, "the test") is server


def test_a_handler_that_can_not_be_imported_is_named() -> None:
    with pytest.raises(EngineError, match=r"could not start the process for the test: Module"):
        ask("batchkit.isolation.nothing", "the test", b"", 30.0)


def prepare(*files: str) -> None:
    """With a file, stands for an import that takes long."""
    for file in files:
        Path(file).write_text(str(os.getpid()))
        time.sleep(60)


def test_a_server_that_still_imports_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    program = (
        f"from batchkit.isolation.client import Server; Server({__name__!r}, 'x', {str(file)!r})"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT) as starter:
        until(lambda: file.exists() and file.read_text())
        starter.kill()
    server = int(file.read_text())
    until(lambda: not psutil.pid_exists(server) or psutil.Process(server).status() == "zombie")
