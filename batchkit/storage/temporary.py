"""Temporary folders of this process. What a killed one has left there is removed by the next start."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from batchkit.storage.files import open_private

OWNER = ".owner"
HOMES = (
    "/tmp",
)  # besides the temporary folder of this process, which may have too long a name for Ray


class OwnFolder:
    """A new folder ``batchkit-KIND-…``, until ``close``. This process, or a fork of it, locks a file in it as long as it
    lives."""

    def __init__(self, kind: str, home: str | None = None) -> None:
        made = Path(tempfile.mkdtemp(prefix=f".batchkit-{kind}-", dir=home))
        self._lock = open_private(made / OWNER, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = made.rename(made.with_name(made.name[1:]))

    def keep(self) -> None:
        """Leave it to the user: it is not removed then."""
        (self.path / OWNER).unlink()
        os.close(self._lock)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_orphans() -> None:
    """Remove the folders whose owner has died."""
    for home in {tempfile.gettempdir(), *HOMES}:
        for owner in Path(home).glob(f"batchkit-*/{OWNER}"):
            with suppress(OSError):  # its owner lives, or it is another user's
                lock = open_private(owner, os.O_RDWR)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(owner.parent, ignore_errors=True)
                finally:
                    os.close(lock)
