"""The sandbox's process: ``python -m batchkit.scoring.chart.zygote FD FOLDER``.

Imports what charts need, and forks for each run received over FD. It alone decides when a chart's
process has exceeded a limit, and deletes what that left. It ends with the process that started it,
and deletes FOLDER.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import shutil
import signal
import sys
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal, NoReturn

from batchkit.scoring.chart.answer import TABLE_NAME
from batchkit.scoring.chart.child import SCRATCH, preload, probe, run_chart
from batchkit.scoring.chart.messages import (
    CONFINED,
    DEFAULT_LIMITS,
    MAX_RESULT_BYTES,
    Ended,
    Run,
    SandboxLimits,
    decode_run,
    encode,
)
from batchkit.sources.child_process import die_with_parent

_TICK_S = 0.05
_MAX_FILES = 500
_READ_BYTES = 2**16

Cause = Literal["time", "folder", "result"]


def main() -> None:
    connection, folder = Connection(int(sys.argv[1])), Path(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to end
    signal.signal(signal.SIGTERM, lambda *_: _leave_at_once(folder))
    die_with_parent(signal.SIGTERM)
    try:
        refusal = _what_import_said()
        signal.signal(signal.SIGTERM, _leave)
        connection.send_bytes((refusal or _what_probe_found(folder)).encode())
        gc.collect()
        gc.freeze()  # the forks' garbage collector skips, and so doesn't copy, what was imported
        while True:
            run = decode_run(connection.recv_bytes())
            connection.send_bytes(encode(_run(run, folder, connection)))
    except (EOFError, OSError):
        pass  # the parent has ended
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _leave_at_once(folder: Path) -> NoReturn:
    """Used while foreign code is imported, which may swallow an exception."""
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _leave(*_: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not stop the clean-up
    sys.exit(0)


def _what_import_said() -> str:
    """Why charts can't be drawn, "" if they can."""
    warnings.simplefilter("ignore")
    try:
        preload()
    except Exception as error:  # a broken installation may raise anything
        return f"{type(error).__name__}: {error}"
    return ""


def _what_probe_found(folder: Path) -> str:
    """Why code is not confined, "" if it is: tried out before any chart runs."""
    ended = _run(None, folder, None)
    if ended.returncode == 0 and ended.written.startswith(CONFINED):
        return ended.written.removeprefix(CONFINED)
    return ended.written or f"confining a process ended in {ended}"


def _run(run: Run | None, folder: Path, connection: Connection | None) -> Ended:
    """Runs ``run``, or the probe for None, in its own process; leaves nothing behind.

    Raises:
        EOFError: the caller has ended.
    """
    home = folder / "chart"
    (home / SCRATCH).mkdir(parents=True)
    receiving, sending = os.pipe()
    os.set_blocking(receiving, False)
    try:
        if run is not None and run.table is not None:
            with contextlib.suppress(OSError):  # the code reports that it is missing
                shutil.copyfile(run.table, home / TABLE_NAME)
        pid = os.fork()
        if pid == 0:
            if run is None:
                probe(home, sending)
            run_chart(run, home, sending)
        os.close(sending)
        limits = DEFAULT_LIMITS if run is None else run.limits
        written = bytearray()
        try:
            cause = _watch(pid, receiving, written, home / SCRATCH, limits, connection)
        finally:
            os.kill(pid, signal.SIGKILL)  # not reaped yet: its id is not reused
            returncode = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        while len(written) <= MAX_RESULT_BYTES and _read(receiving, written):
            pass
        return Ended(
            cause or ("result" if len(written) > MAX_RESULT_BYTES else None),
            returncode,
            written[:MAX_RESULT_BYTES].decode(errors="replace"),
        )
    finally:
        os.close(receiving)
        shutil.rmtree(home, ignore_errors=True)


def _watch(
    pid: int,
    receiving: int,
    written: bytearray,
    scratch: Path,
    limits: SandboxLimits,
    connection: Connection | None,
) -> Cause | None:
    """Wait until the process ends or exceeds a limit, which is returned; fills ``written``."""
    deadline = time.monotonic() + limits.timeout_s
    ended = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        poll.register(receiving, select.POLLIN)
        if connection is not None:
            poll.register(connection.fileno(), select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll(_TICK_S * 1000)}
            if receiving in ready and not _read(receiving, written):
                poll.unregister(receiving)  # closed; the process may still run
            if connection is not None and connection.fileno() in ready:
                raise EOFError  # closed: nothing is sent during a run
            cause = _excess(written, scratch, limits, deadline)
            if cause is not None or ended in ready:
                return cause
    finally:
        os.close(ended)


def _excess(
    written: bytearray, scratch: Path, limits: SandboxLimits, deadline: float
) -> Cause | None:
    if len(written) > MAX_RESULT_BYTES:
        return "result"
    if time.monotonic() > deadline:
        return "time"
    # Flat: folders can't be created in it. Complete: files can't be removed from it.
    with os.scandir(scratch) as entries:
        sizes = [entry.stat(follow_symlinks=False).st_blocks * 512 for entry in entries]
    return "folder" if sum(sizes) > limits.folder_bytes or len(sizes) > _MAX_FILES else None


def _read(fd: int, into: bytearray) -> bool:
    """Append what is available; False at the end, or if there is nothing."""
    try:
        read = os.read(fd, _READ_BYTES)
    except BlockingIOError:
        return False
    into += read
    return bool(read)


if __name__ == "__main__":
    main()
