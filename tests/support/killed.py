"""Programs that are killed at an instant of their own:
``python -m tests.support.killed FUNCTION NUMBER [FOLDER | merge …]``.

SIGKILL comes as FUNCTION, of ``os``, ``shutil`` or ``Path``, is called for the so-manieth time; a write is killed
half-way. With FOLDER the program is a store there, which writes records with vectors. Without, it is
``batchkit run job.toml --on-change requeue``, of which calls count with a file that a requeue changes; with ``merge …``
it is that command, of which calls count with the folder that it builds.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from batchkit.cli import cli
from batchkit.storage.ledger import Ledger, line_of
from tests.support.records import record, with_vector

ROWS = range(9)
MERGED = (".tmp",)
REQUEUED = (".requeue", "results.jsonl", "steps.jsonl", "manifest", "starts")


def main() -> None:
    if len(sys.argv) == 3:
        kill_at(*sys.argv[1:], files=REQUEUED)
        cli(["run", "job.toml", "--on-change", "requeue"], prog_name="batchkit")
        return
    if sys.argv[3] == "merge":
        kill_at(*sys.argv[1:3], files=MERGED)
        cli(sys.argv[3:], prog_name="batchkit")
        return
    import pyarrow as pa

    ledger = Ledger(Path(sys.argv[3]))
    pa.array([1])  # it is loaded by now
    kill_at(*sys.argv[1:3], files=())
    write_rows(ledger)


def write_rows(ledger: Ledger) -> None:
    """Those of ``ROWS`` that it lacks."""
    for row in ROWS:
        if not ledger.totals.is_settled(row):
            ledger.write([line_of(record(row, None)) if row % 3 == 2 else with_vector(row)])
        if row % 2 == 1:
            ledger.flush()
    ledger.close()


def kill_at(function: str, number: str, *, files: tuple[str, ...]) -> None:
    owner_name, _, name = function.partition(".")
    owner: Any = {"os": os, "Path": Path, "shutil": shutil}[owner_name]
    real, left = getattr(owner, name), int(number)

    def killed(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        if not files or any(part in str(arg) for arg in args for part in files):
            left -= 1
            if left == 0:
                if name == "write":
                    real(args[0], args[1][: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    setattr(owner, name, killed)


if __name__ == "__main__":
    main()
