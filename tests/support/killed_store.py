"""A store that writes records with vectors, killed at an instant of its own.

The arguments: the folder, a function of ``os``, and a number: SIGKILL comes as that function is called
for the so-manieth time after the store was opened. A write is killed half-way.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchkit.storage.ledger import Ledger, line_of
from tests.support.records import record, with_vector

ROWS = range(9)


def main() -> None:
    folder, name, number = sys.argv[1:]
    ledger = Ledger(Path(folder))
    pa.array([1])  # it is loaded by now
    real, left = getattr(os, name), int(number)

    def killed(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            if name == "write":
                real(args[0], args[1][: len(args[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    setattr(os, name, killed)
    for row in ROWS:
        if not ledger.totals.is_settled(row):
            ledger.write([line_of(record(row, None)) if row % 3 == 2 else with_vector(row)])
        if row % 2 == 1:
            ledger.flush()
    ledger.close()


if __name__ == "__main__":
    main()
