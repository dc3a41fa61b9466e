"""The copy of a run folder in a store while the run works."""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from batchkit.config.regular_file import open_regular
from batchkit.errors import StoreError
from batchkit.storage.forecast_json import FORECAST
from batchkit.storage.log import RESULTS, STEPS, Checksum
from batchkit.storage.metrics import METRICS
from batchkit.storage.runfolder import JOB, LOG, MANIFEST
from batchkit.storage.score_store import SCORES
from batchkit.storage.starts import STARTS
from batchkit.storage.store.lease import Lease
from batchkit.storage.store.restore import local_checksum
from batchkit.storage.store.seals import SealedPart, indexes_in, segment_key
from batchkit.storage.vectors import VECTORS, segments_of

_WHOLE = (JOB, MANIFEST, FORECAST)  # small files that are replaced; the others grow
_LINES = (STARTS, METRICS, LOG, SCORES)
_SEGMENT_BYTES = 8 << 20  # the most in one segment: a request may take 30 s
_LAST_TRIES_S = 60.0  # at the end of a run, if the store can't be reached
_MOST_WAIT_S = 30.0  # between tries
_SAY_S = 60.0  # between messages that the store is behind


class _Added(NamedTuple):
    """Bytes of a file that are not in the store yet. ``inode``: of the local file."""

    file: str
    at: int
    content: bytes
    inode: int


class Mirror:
    """Uploads the new bytes of the run folder in a separate thread: each ``interval_s``, and in ``close``.

    The loop calls ``offer`` when ``is_due``. Only ``close`` waits for the store. The lease's chain tells which bytes the
    store has, so a seal whose reply was lost counts once it is found there.
    """

    def __init__(self, lease: Lease, folder: Path, interval_s: float) -> None:
        self._lease, self._chain, self._folder = lease, lease.chain, folder
        self._interval_s = interval_s
        # The inode numbers of local files that begin with the bytes in the store.
        self._inodes = {file: inode for file in self._chain.files if (inode := self._inode(file))}
        self._sealed: Mapping[str, int] = {}  # the newest ``ends`` that the store has
        self._offers = SimpleQueue[tuple[Mapping[str, int], bool]]()
        self._waits, self._trouble, self._is_complete = True, "", False
        self._sealed_at, self._said_at = time.monotonic(), -_SAY_S
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="store-upload", daemon=True)
        self._thread.start()

    @property
    def is_due(self) -> bool:
        """True if the interval is over and nothing is being uploaded."""
        return self._waits and time.monotonic() - self._sealed_at >= self._interval_s

    def offer(self, ends: Mapping[str, int], *, is_last: bool = False) -> None:
        """Upload the files as they are now. ``ends``: the sizes of the logs of records, generations and vectors, whose
        bytes before it are final."""
        self._waits = False
        self._offers.put((dict(ends), is_last))

    def sealed_end(self, file: str) -> int:
        """Return how much of ``file`` the store has for certain; 0 if another process has taken the run over. Any thread
        may call this."""
        return 0 if self._lease.lost else self._sealed.get(file, 0)

    def message(self) -> str:
        """Return a line if the store has been behind for several intervals; "" if it is not, or if a line
        was returned in the last minute."""
        now, trouble = time.monotonic(), self._trouble
        behind_s = now - self._sealed_at
        if not trouble or behind_s < 3 * self._interval_s or now - self._said_at < _SAY_S:
            return ""
        self._said_at = now
        return f"the store is {behind_s:.0f} s behind, and the run continues: {trouble}"

    def close(self, ends: Mapping[str, int]) -> None:
        """Upload the rest, and give the run back.

        Raises:
            StoreError: the rest could not be uploaded.
        """
        self._closing.set()
        self.offer(ends, is_last=True)
        self._thread.join()
        if not (self._is_complete or self._lease.lost):
            trouble = self._trouble or "the upload failed"
            raise StoreError(
                f"{trouble}. The newest rows are not in the store; they are in {self._folder}. Run the same command"
                " again on this machine"
            )

    def _inode(self, file: str) -> int:
        """Return the inode number of a local file; 0 if its beginning differs from the file in the store."""
        path, known = self._folder / file, self._chain.checksum(file)
        if not path.is_file() or local_checksum(path, known.end) != known:
            return 0
        return path.stat().st_ino

    def _work(self) -> None:
        is_last, deadline = False, float("inf")
        while not is_last:
            ends, is_last = self._offers.get()
            wait_s = 1.0
            while not self._is_uploaded(ends, is_last):
                if self._lease.lost:
                    return
                if not self._closing.is_set():
                    self._closing.wait(wait_s)
                    wait_s = min(2 * wait_s, _MOST_WAIT_S)
                    continue
                deadline = min(deadline, time.monotonic() + _LAST_TRIES_S)
                if time.monotonic() > deadline:
                    return
                time.sleep(1.0)
            self._sealed_at, self._sealed = time.monotonic(), ends
            self._waits = True
        self._is_complete = True

    def _is_uploaded(self, ends: Mapping[str, int], is_last: bool) -> bool:
        """Upload everything before ``ends``, in one or more seals. Return False if that failed."""
        try:
            while self._lease.is_held():
                added = [*self._added(ends)]
                removed = [file for file in self._chain.files if self._is_obsolete(file)]
                if added or removed:
                    self._seal(added, removed)
                elif is_last and not self._lease.is_closed:
                    self._lease.add("closed")
                else:
                    self._trouble = ""
                    return True
        except (StoreError, OSError) as error:
            self._trouble = str(error)
        return False

    def _is_obsolete(self, file: str) -> bool:
        """Return whether the store has a file that is gone here, or that is not the beginning of the one here. All of these
        are removed with one seal, so that a restored run never mixes two."""
        return not (self._folder / file).exists() or not (file in _WHOLE or file in self._inodes)

    def _seal(self, added: Sequence[_Added], removed: Sequence[str]) -> None:
        parts, segment = list[SealedPart](), None
        for part in added:
            before = self._chain.checksum(part.file).crc32 if part.at else 0
            crc32, size = zlib.crc32(part.content, before), len(part.content)
            parts.append(SealedPart(file=part.file, at=part.at, size=size, crc32=crc32))
        if added:
            content = b"".join(part.content for part in added)
            number, rows = self._chain.next_number, _rows_in(added)
            segment = segment_key(number, self._lease.fence, rows, content)
            self._chain.objects.put(segment, content)
        self._lease.add("open", segment=segment, parts=parts, removed=[*removed])
        self._inodes.update((part.file, part.inode) for part in added)

    def _added(self, ends: Mapping[str, int]) -> Iterator[_Added]:
        """Yield the bytes to upload, up to ``_SEGMENT_BYTES``."""
        room = _SEGMENT_BYTES
        vectors = sorted(file for file in ends if file.startswith(f"{VECTORS}/"))
        for file in (*_WHOLE, STARTS, *vectors, STEPS, RESULTS, SCORES, METRICS, LOG):
            if room <= 0:
                return
            with suppress(FileNotFoundError), open_regular(self._folder / file) as opened:
                if (found := self._read(file, opened, ends.get(file), room)) is not None:
                    room -= len(found.content)
                    yield found

    def _read(self, file: str, opened: FileIO, end: int | None, room: int) -> _Added | None:
        """Return the bytes of a file before ``end`` that the store does not have, at most ``room``."""
        state, known = os.fstat(opened.fileno()), self._chain.checksum(file)
        end = state.st_size if end is None else min(end, state.st_size)
        if file in _WHOLE:
            content = opened.readall()
            is_new = file not in self._chain.files or Checksum().and_of(content) != known
            return _Added(file, 0, content, state.st_ino) if is_new else None
        is_same = self._inodes.get(file) == state.st_ino and end >= known.end
        at = known.end if is_same else 0  # also if the file was replaced
        opened.seek(at)
        content = opened.read(min(room, end - at))
        if file in _LINES:  # another thread may be writing the last line
            content = content[: content.rfind(b"\n") + 1]
        is_new = bool(content) or at < known.end or file not in self._chain.files
        return _Added(file, at, content, state.st_ino) if is_new else None


def upload_all(lease: Lease, folder: Path) -> None:
    """Upload a run folder to which nothing is added any more.

    Raises:
        StoreError: the store could not be reached.
    """
    logs = [folder / RESULTS, folder / STEPS, *segments_of(folder).values()]
    ends = {str(log.relative_to(folder)): log.stat().st_size for log in logs if log.exists()}
    Mirror(lease, folder, interval_s=1).close(ends)


def _rows_in(added: Sequence[_Added]) -> tuple[int, int] | None:
    """Return the first and the last row of the records in ``added``."""
    indexes = [
        index for part in added if part.file == RESULTS for index in indexes_in(part.content)
    ]
    return (min(indexes), max(indexes)) if indexes else None
