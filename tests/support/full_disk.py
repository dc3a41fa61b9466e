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
from batchkit.storage.store import Store
from tests.support.records import generation, record, with_vector


def main() -> None:
    folder, limit, what = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    store = Store(folder)
    flushed = 0
    try:
        for index in range(1000):
            if what == "generations":
                store.copy_generation(generation(index, "x" * 50))
            else:
                store.append(with_vector(index) if what == "vectors" else record(index, "x" * 50))
            if index % 7 == 6:
                store.flush()
                flushed = index + 1
    except StoreError as error:
        print(flushed, store.steps.count or store.totals.ok, error)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
