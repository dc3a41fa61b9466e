"""A store whose disk fills up: no file of this process may have more bytes than the limit.

The arguments: the folder, the limit, and "records", "vectors" or "generations". It prints how many of them
were flushed, how many the store counts, and the error that it ended with.
"""

from __future__ import annotations

import resource
import signal
import sys
from pathlib import Path

import pyarrow  # noqa: F401  (it is loaded before the limit holds)

from batchkit.errors import StoreError
from batchkit.storage.ledger import Ledger, line_of
from tests.support.records import generation, record, with_vector


def main() -> None:
    folder, limit, what = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    ledger = Ledger(folder)
    flushed = 0
    made = {
        "vectors": with_vector,
        "records": lambda index: line_of(record(index, "x" * 50)),
        "generations": lambda index: generation(index, "x" * 50),
    }
    try:
        for first in range(0, 1000, 7):
            ledger.write(map(made[what], range(first, first + 7)))
            ledger.flush()
            flushed = first + 7
    except StoreError as error:
        print(flushed, ledger.steps.spent.generations or ledger.totals.ok, error)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
