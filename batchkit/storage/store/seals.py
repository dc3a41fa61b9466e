"""The format of a run in a store: a chain of seals.

    seals/00000001.json                       who writes the run, and which bytes of which files were added
    segments/00000002-00000001-…              the added bytes of all files, one after another
    heartbeats/00000001                       changes while the writer lives

Seal N is created only by a writer that has read seal N - 1, and only if seal N does not exist yet. So there is one chain,
whatever writers, clocks and listings do. A machine takes the run over with a seal in the state ``claimed``; the number
of that seal is its fencing number, ``fence``, and is part of the name of each of its segments. The previous writer's next
seal then fails, because its number exists.

The name of a segment is SEAL-FENCE-FIRST-LAST-CRC32: the first and the last row in it, and the checksum of its bytes. It is
written before its seal, so a seal never names a segment that is not there.

The files of a run, in the state of a seal, are the parts of all seals up to it. A part at byte 0 replaces the file.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from batchkit.errors import StoreError
from batchkit.storage.log import Checksum
from batchkit.storage.store.objects import Objects

_AT_ONCE = 16  # requests for seals
_AHEAD_BYTES = 32 << 20
_INDEX = re.compile(rb'^\{"index":(\d+)', re.MULTILINE)


class _Part(BaseModel):
    """A part of a seal. Keys that this version does not know are ignored."""

    model_config = ConfigDict(strict=True, frozen=True)


class Owner(_Part):
    """The process that writes the run. ``machine`` is unique for a boot and a namespace of process ids."""

    host: str
    pid: int
    machine: str
    token: str  # random, so that no two processes have equal seals

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class SealedPart(_Part):
    """Bytes of a file: ``size`` bytes from byte ``at``. ``crc32``: of the file from byte 0 to the end of this part."""

    file: str
    at: int
    size: int
    crc32: int

    @property
    def end(self) -> int:
        return self.at + self.size


class Seal(_Part):
    """One object of the chain.

    - ``timeout_s``: without a sign of life for so long, the writer counts as dead.
    - ``segment``: the key of the segment with the bytes of ``parts``, or None if there are no parts.
    - ``removed``: files that the run no longer has, or that begin anew with this seal.
    """

    version: Literal[1] = 1
    number: int
    fence: int
    state: Literal["claimed", "open", "closed"]
    owner: Owner
    timeout_s: float
    written_at: str  # by the writer's clock, for people
    segment: str | None = None
    parts: list[SealedPart] = []
    removed: list[str] = []


class Piece(NamedTuple):
    """A part, the segment that has it, and its first byte there. ``seal``: the number of its seal."""

    part: SealedPart
    segment: str
    start: int
    seal: int


class Chain:
    """The seals of a run, as far as they have been read. ``files``: the pieces of each file, in their order.

    ``cache``: a local file that keeps the seals, because a run of a day has thousands.

    Raises (every method):
        StoreError: the store can't be reached, or a seal is damaged.
    """

    def __init__(self, objects: Objects, cache: Path | None = None) -> None:
        self.objects, self._cache = objects, cache
        self.last: Seal | None = None
        self.files: dict[str, list[Piece]] = {}
        if cache is not None and cache.exists():
            self._read_cache(cache)

    @property
    def next_number(self) -> int:
        return 1 if self.last is None else self.last.number + 1

    def catch_up(self) -> Chain:
        """Read the seals that are new. They are asked for by number, because a listing may lag behind."""
        n = 1  # doubled, because most often there is nothing new
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            while True:
                numbers = range(self.next_number, self.next_number + n)
                for number, raw in zip(numbers, pool.map(self._read, numbers), strict=True):
                    if raw is None:
                        return self
                    self._append(self._parsed(number, raw))
                    if self._cache is not None:
                        with self._cache.open("ab") as file:
                            file.write(raw + b"\n")
                n = min(2 * n, 4 * _AT_ONCE)

    def add(self, seal: Seal) -> bool:
        """Add a seal. Return False if another process has written a seal with this number."""
        if not self.objects.create(_key(seal.number), seal.model_dump_json().encode()):
            return False
        self._append(seal)
        return True

    def checksum(self, file: str) -> Checksum:
        """Return the checksum and the size of a file."""
        pieces = self.files.get(file)
        return Checksum(pieces[-1].part.crc32, pieces[-1].part.end) if pieces else Checksum()

    def heartbeat(self) -> bytes | None:
        """Return the newest sign of life of the writer."""
        return None if self.last is None else self.objects.get(heartbeat_key(self.last.fence))

    def _read_cache(self, cache: Path) -> None:
        """Read the seals in ``cache``, unless the store has another run instead."""
        lines = cache.read_bytes().splitlines(keepends=True)
        raw = [
            line for line in lines if line.endswith(b"\n")
        ]  # a kill may have cut the last one off
        if raw and self._read(len(raw)) == raw[-1].removesuffix(b"\n"):
            for number, line in enumerate(raw, start=1):
                self._append(self._parsed(number, line))
            if len(raw) < len(lines):
                cache.write_bytes(b"".join(raw))
        else:
            cache.unlink()

    def _read(self, number: int) -> bytes | None:
        return self.objects.get(_key(number))

    def _parsed(self, number: int, raw: bytes) -> Seal:
        try:
            return Seal.model_validate_json(raw)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise StoreError(
                f"{self.objects.address}/{_key(number)}: damaged at {where or 'its start'}: {first['msg']}; restore a copy of"
                " the object, or set output.store to another folder"
            ) from error

    def _append(self, seal: Seal) -> None:
        for file in seal.removed:
            self.files.pop(file, None)
        start = 0
        for part in seal.parts:
            assert seal.segment is not None
            pieces = self.files.setdefault(part.file, [])
            if part.at == 0:
                pieces.clear()
            pieces.append(Piece(part, seal.segment, start, seal.number))
            start += part.size
        self.last = seal


def pieces_after(pieces: list[Piece], local: Checksum) -> list[Piece] | None:
    """Return the pieces behind the ``local`` bytes of a file. Return None if the local bytes are no beginning of it that
    ends between two pieces."""
    if local == Checksum():
        return pieces
    for number, piece in enumerate(pieces, 1):
        if Checksum(piece.part.crc32, piece.part.end) == local:
            return pieces[number:]
    return None


def indexes_in(lines: bytes) -> list[int]:
    """Return the indexes of the rows whose records are in ``lines`` of results.jsonl."""
    return [int(found) for found in _INDEX.findall(lines)]


def segment_key(number: int, fence: int, rows: tuple[int, int] | None, content: bytes) -> str:
    """Return the key of a segment. ``rows``: the first and the last row in it."""
    of_rows = "none" if rows is None else f"{rows[0]}-{rows[1]}"
    return f"segments/{number:08}-{fence:08}-{of_rows}-{zlib.crc32(content):08x}"


def heartbeat_key(fence: int) -> str:
    return f"heartbeats/{fence:08}"


def contents_of(objects: Objects, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, bytes]]:
    """Yield ``pieces`` with their bytes, a few segments read ahead. Neighbors in one segment are read with one request.

    Raises:
        StoreError: the store can't be reached.
    """
    segments = [[*its] for _, its in groupby(pieces, key=lambda piece: piece.segment)]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        while segments:
            n, size = 0, 0
            while n < len(segments) and n < _AT_ONCE and size < _AHEAD_BYTES:
                size += sum(piece.part.size for piece in segments[n])
                n += 1
            some, segments = segments[:n], segments[n:]
            for found in pool.map(lambda its: _read(objects, its), some):
                yield from found


def _read(objects: Objects, pieces: Sequence[Piece]) -> list[tuple[Piece, bytes]]:
    """Return pieces of one segment with their bytes."""
    full = [piece for piece in pieces if piece.part.size]
    found = dict[int, bytes]()
    if full:
        starts, sizes = [piece.start for piece in full], [piece.part.size for piece in full]
        found = dict(zip(starts, objects.get_ranges(full[0].segment, starts, sizes), strict=True))
    return [(piece, found[piece.start] if piece.part.size else b"") for piece in pieces]


def _key(number: int) -> str:
    return f"seals/{number:08}.json"
