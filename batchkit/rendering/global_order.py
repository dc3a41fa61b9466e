"""``run.order = "global"``: the order of rows over the whole input.

- Rows with the same adapter run next to each other.
- Among them, rows whose prompts begin alike run next to each other, at several depths: of the rows that share their
  first 1,024 characters, rows that share 4,096 are neighbors, and so on. So the engine computes a shared beginning about once,
  although it caches few of them at the same time.
- Rows with longer expected answers run first: among groups with different beginnings, and within a group. So no long
  answer begins when the others have ended.

The input is read twice: once for the keys of all rows, 26 bytes for each; then the rows are divided into parts on disk,
which are loaded one after another. An input that fits into ``BLOCK_BYTES`` is read once and kept in memory. The expected
lengths are learned from finished rows (``answer_lengths.py``), so the rows in memory are sorted again several times.
"""

from __future__ import annotations

import pickle
from array import array
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

from batchkit.errors import InputError
from batchkit.rendering.ordering import size_of
from batchkit.storage.files import OwnFolder, disk_errors, write_all
from batchkit.types import Row, RowHint

if TYPE_CHECKING:
    import numpy as np

    Numbers = np.ndarray[Any, Any]

Hint = Callable[[Row], RowHint]
Expect = Callable[[RowHint], float]
"""Returns the expected length of a row's answer, in tokens; only comparisons matter."""

BLOCK_BYTES = 16 * 2**20  # size of the rows in memory, with ``_ROW_BYTES`` for each
_ROW_BYTES = 512
_BYTES_PER_ROW = 32  # parts grow with the number of rows, so that there are not too many
_MOST_PARTS = 256  # open files
_DEPTHS = (64, 256, 1024, 4096)  # characters
_GROUP = 1  # rows that share the adapter and 256 characters are a group
_LEAST_GAIN = 0.1
_PIECES = 64  # of the rows in memory
_LEAST_SEEN_AGAIN = 3  # groups; fewer are chance
_LEAST_SORTED = 256  # rows that run before the others are sorted again
_WRITTEN_AT_ONCE = 2**16
_PROTOCOL = 5  # of pickle


class Block(NamedTuple):
    """The first rows of the input, up to ``BLOCK_BYTES``. ``is_all``: there are no more rows that can be read."""

    rows: list[Row]
    hints: list[RowHint]
    is_all: bool


def first_block(rows: Iterator[Row], hint: Hint) -> Block:
    """Read the first rows."""
    block, size = Block([], [], is_all=False), 0
    for row in rows:
        block.rows.append(row)
        block.hints.append(hint(row))
        size += _ROW_BYTES + size_of(row.fields.values(), BLOCK_BYTES)
        if size >= BLOCK_BYTES:
            return block
    return block._replace(is_all=True)


def shared_less(block: Block, n_rows: int, look_ahead: int) -> float:
    """Return the share of rows whose beginning would be computed again if rows are only moved within ``look_ahead``
    rows, estimated from ``block``. ``n_rows``: number of rows of the whole input.

    The number of groups in the input is estimated with the formula of Chao and Lin (2012) from the number of groups that
    occur in one piece of the block, and in two. Adjacent pieces count as one, so a group of a sorted input occurs in one.
    """
    keys = [_key(hint)[_GROUP] for hint in block.hints]
    n = len(keys)
    if n <= look_ahead or n_rows <= 0:
        return 0.0
    in_windows = sum(len({*keys[at : at + look_ahead]}) for at in range(0, n, look_ahead))
    last, times = dict[int, int](), Counter[int]()
    for place, key in enumerate(keys):
        piece = place * _PIECES // n
        if last.get(key, -2) < piece - 1:
            times[key] += 1
        last[key] = piece
    seen = Counter(times.values())
    if len(times) - seen[1] < _LEAST_SEEN_AGAIN:  # equal rows are near each other, or nowhere
        return 0.0
    per_unseen = 2 * seen[2] + seen[1] * n / max(1, n_rows - n)
    n_groups = len(times) + (seen[1] ** 2 / per_unseen if seen[1] else 0)
    return max(0.0, in_windows / n - n_groups / n_rows)


def worth_ordering(block: Block, n_rows: int | None, look_ahead: int) -> bool:
    """Return whether the whole input should and can be ordered, according to its first rows. ``n_rows``: their number,
    or None."""
    if n_rows is None or shared_less(block, n_rows, look_ahead) < _LEAST_GAIN:
        return False
    try:
        pickle.dumps(block.rows[0].fields, _PROTOCOL)
    except Exception:  # of a value's own code
        return False
    return True


def ordered_in_memory(
    rows: Sequence[Row], hints: Sequence[RowHint], expect: Expect
) -> Iterator[tuple[Row, int]]:
    """Yield ``rows`` in order, each with the number of its group. When a quarter of the rows have run, the others are
    sorted again, because ``expect`` may have learned."""
    import numpy as np

    keys = _Keys()
    for row, hint in zip(rows, hints, strict=True):
        keys.add(row.index, hint, 0)
    left = np.arange(len(rows))
    while len(left):
        lengths = np.array([expect(hints[place]) for place in left.tolist()], np.float32)
        left = keys.in_order(left, lengths)
        n_now = keys.cut(left, max(_LEAST_SORTED, len(left) // 4))
        for place in left[:n_now].tolist():
            yield rows[place], keys.group(place)
        left = np.sort(left[n_now:])


def ordered_on_disk(
    rows: Iterable[Row],
    again: Callable[[Container[int]], Iterable[Row]],
    hint: Hint,
    expect: Expect,
) -> Iterator[tuple[Row, int]]:
    """Yield ``rows`` in order, each with the number of its group.

    ``again``: returns the rows with these indexes, read a second time.

    Raises:
        InputError: a row has values that can't be stored.
        StoreError: the disk is full.
    """
    keys, lengths = _Keys(), array("f")
    for row in rows:
        size = _ROW_BYTES + size_of(row.fields.values(), 2**31)
        keys.add(row.index, (found := hint(row)), size)
        lengths.append(expect(found))
    if not lengths:
        return
    parts = _Parts(keys.parts(lengths))
    del keys, lengths
    with closing(parts):
        parts.write(again(parts))
        for number in range(parts.n_parts):
            loaded = parts.load(number)
            yield from ordered_in_memory(loaded, [hint(row) for row in loaded], expect)


def _key(hint: RowHint) -> tuple[int, ...]:
    """Return a checksum of the adapter and the prompt's beginning for each depth."""
    text = hint.beginning[: _DEPTHS[-1]]
    found, last, start = list[int](), crc32(hint.lora.encode()), 0
    for depth in _DEPTHS:
        if start < len(text):
            last = crc32(text[start:depth].encode("utf-8", "replace"), last)
        found.append(last)
        start = depth
    return tuple(found)


class _Keys:
    """The sort keys of rows, in the order of the input."""

    def __init__(self) -> None:
        self._indexes, self._sizes = array("I"), array("I")
        self._keys = [array("I") for _ in _DEPTHS]
        self._names = dict[str, int]()  # of adapters, with a number for each
        self._loras = array("H")

    def add(self, index: int, hint: RowHint, size: int) -> None:
        self._indexes.append(index)
        self._sizes.append(size)
        number = self._names.setdefault(hint.lora, len(self._names))
        self._loras.append(number & 0xFFFF)  # if there are more adapters, some may mix
        for column, key in zip(self._keys, _key(hint), strict=True):
            column.append(key)

    def in_order(self, places: Numbers, lengths: Numbers) -> Numbers:
        """Return the ``places`` of rows in the order in which the rows run. Rows with nothing in common, and with equal
        ``lengths`` of their answers, keep their order."""
        import numpy as np

        top, *deeper = (_by_first(np.frombuffer(key, np.uint32)[places]) for key in self._keys)
        lora = np.frombuffer(self._loras, np.uint16)[places]
        longest = np.zeros(len(places), np.float32)
        np.maximum.at(longest, top, lengths)
        found: Numbers = places[np.lexsort((-lengths, *reversed(deeper), top, -longest[top], lora))]
        return found

    def cut(self, places: Numbers, least: int) -> int:
        """Return how many of the first ``places`` to take: at least ``least``, and at most twice this number. The cut is
        between the two neighbors that have least in common."""
        import numpy as np

        near = places[least - 1 : 2 * least]
        if len(near) < 2:
            return least
        keys: list[Numbers] = [np.frombuffer(key, np.uint32)[near] for key in self._keys]
        keys.append(np.frombuffer(self._loras, np.uint16)[near])
        common = np.sum([key[1:] == key[:-1] for key in keys], axis=0)
        return least + int(np.argmin(common))

    def group(self, place: int) -> int:
        """Return the number of a row's group, which is not 0."""
        return self._keys[_GROUP][place] + 1

    def parts(self, lengths: array[float]) -> Numbers:
        """Return the part of each row by index, counted from 1; 0 for an index without a row."""
        import numpy as np

        n_rows = len(self._indexes)
        every = np.arange(n_rows, dtype=np.uint32)
        order = self.in_order(every, np.frombuffer(lengths, np.float32))
        indexes = np.frombuffer(self._indexes, np.uint32)
        ends = np.cumsum(np.frombuffer(self._sizes, np.uint32)[order], dtype=np.int64)
        part_bytes = max(BLOCK_BYTES, _BYTES_PER_ROW * n_rows, int(ends[-1]) // (_MOST_PARTS - 1))
        parts = np.zeros(int(indexes.max()) + 1, np.uint16)
        parts[indexes[order]] = 1 + ends // (part_bytes + 1)
        return parts


def _by_first(keys: Numbers) -> Numbers:
    """Return, for each key, the place of the first equal key."""
    import numpy as np

    _, first, which = np.unique(keys, return_index=True, return_inverse=True)
    found: Numbers = first.astype(np.uint32)[which]
    return found


class _Parts:
    """The rows of the input, divided into files. It contains the indexes of its rows. The files are pickled, because a
    prompt may show the type of a value, for example of a date; only this process writes and reads them.

    ``of_row``: as returned by ``_Keys.parts``.
    """

    def __init__(self, of_row: Numbers) -> None:
        self._of_row = of_row
        self.n_parts = int(of_row.max())
        self._folder = OwnFolder("order")
        self._paths = [self._folder.path / f"{number}.rows" for number in range(self.n_parts)]
        self._broken: list[Row] = []  # rows that can't be read

    def __contains__(self, index: object) -> bool:
        return isinstance(index, int) and index < len(self._of_row) and self._of_row[index] > 0

    def write(self, rows: Iterable[Row]) -> None:
        waiting = [bytearray() for _ in self._paths]
        advice = '; make room, set TMPDIR, or set run.order = "window"'
        with ExitStack() as held, disk_errors(self._folder.path, advice=advice):
            files = [held.enter_context(path.open("wb", buffering=0)) for path in self._paths]
            for row in rows:
                if row.error is not None:
                    self._broken.append(row)
                    continue
                try:
                    content = pickle.dumps((row.index, row.id, {**row.fields}), _PROTOCOL)
                except Exception as error:  # of a value's own code
                    raise InputError(
                        f'row {row.index} (id {row.id}): run.order = "global" can\'t store its values: {error}; set'
                        ' run.order = "window"'
                    ) from error
                part = int(self._of_row[row.index]) - 1
                waiting[part] += len(content).to_bytes(4) + content
                if len(waiting[part]) >= _WRITTEN_AT_ONCE:
                    write_all(files[part].fileno(), memoryview(waiting[part]))
                    waiting[part] = bytearray()
            for file, rest in zip(files, waiting, strict=True):
                write_all(file.fileno(), memoryview(rest))

    def load(self, number: int) -> list[Row]:
        """Return the rows of a part, in the order of the input, and remove its file."""
        rows = list[Row]()
        content, at = memoryview(self._paths[number].read_bytes()), 0
        while at < len(content):
            end = at + 4 + int.from_bytes(content[at : at + 4])
            rows.append(Row(*pickle.loads(content[at + 4 : end])))
            at = end
        rows += [row for row in self._broken if self._of_row[row.index] == number + 1]
        self._paths[number].unlink()
        return rows

    def close(self) -> None:
        self._folder.close()
