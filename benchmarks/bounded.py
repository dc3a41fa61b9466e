"""Runs a command with a time limit, and ends all processes that it started."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

INTERRUPTED_S = 60  # for an interrupted command to end

start: type[subprocess.Popen[str]] = subprocess.Popen  # the tests fork instead


class Done(NamedTuple):
    """The result of a command. ``code``: exit code, negative if a signal ended the command.
    ``stderr``: its last 4,000 characters. ``is_late``: whether the time limit was reached."""

    code: int
    stdout: list[str]
    stderr: str
    is_late: bool

    @property
    def message(self) -> str:
        how = "it took too long" if self.is_late else f"exit code {self.code}"
        return f"{how}: {self.stderr.strip()}"


def run(
    words: Sequence[str],
    *,
    cwd: Path,
    limit_s: float,
    environment: Mapping[str, str] = os.environ,
    stdin: str = "",
    on_line: Callable[[str], object] = len,
    interrupt: bool = False,
) -> Done:
    """Run a command with a time limit, and call ``on_line`` with each line of its stdout.

    When the time is over, the command is killed. With ``interrupt``, it gets SIGINT first, and one
    minute to end.

    Threads: this one reads, one waits for the command's end, one for the time limit. The command is
    not reaped before they are done, so that no other process can get its pid.
    """
    gone, late = threading.Event(), threading.Event()
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = start(
            words,
            cwd=cwd,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=_clear_up, args=[process.pid, gone], daemon=True).start()
        watch = threading.Timer(max(1.0, limit_s), _end, [process.pid, gone, late, interrupt])
        watch.daemon = True
        watch.start()
        lines: list[str] = []
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            with suppress(BrokenPipeError), process.stdin:
                process.stdin.write(stdin)
            with process.stdout:
                for line in process.stdout:
                    lines.append(line.rstrip("\n"))
                    on_line(lines[-1])
            gone.wait()
        except BaseException:
            _kill(process.pid)
            gone.wait()
            raise
        finally:
            watch.cancel()
            code = process.wait()
        errors.seek(0)
        return Done(code, lines, errors.read()[-4000:], late.is_set())


def _clear_up(pid: int, gone: threading.Event) -> None:
    """Kill the processes that the command left when it ended, because they would keep its stdout
    open, and hold GPU memory."""
    with suppress(ProcessLookupError, PermissionError):
        ended = os.pidfd_open(pid)
        select.select([ended], [], [])
        os.close(ended)
        os.killpg(pid, signal.SIGKILL)
    gone.set()


def _end(pid: int, gone: threading.Event, late: threading.Event, interrupt: bool) -> None:
    late.set()
    if interrupt:
        os.kill(pid, signal.SIGINT)
        gone.wait(INTERRUPTED_S)
    if not gone.is_set():
        _kill(pid)


def _kill(pid: int) -> None:
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
    os.kill(pid, signal.SIGKILL)
