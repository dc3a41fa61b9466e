"""Files with one row per line; blank lines are skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from batchkit.sources.files import BLOCK_BYTES, open_input
from batchkit.sources.reader import Found, Skip

Parse = Callable[[bytes, str, int], Found]  # the line, its file, its number from 1


def read_lines(path: str, skip: Skip, index: int, parse: Parse) -> Iterator[Found]:
    """The result of ``parse`` for each line that ``skip`` doesn't skip; see ``Reader``."""
    with open_input(path) as file:
        for number, line in enumerate(file, start=1):
            if line.isspace():
                continue
            yield None if skip(index) else parse(line, path, number)
            index += 1


def count_lines(path: str) -> int:
    """The number of lines that ``read_lines`` would yield, without splitting the file."""
    total, in_line = 0, False
    with open_input(path) as file:
        while block := file.read(BLOCK_BYTES):
            first, *rest = block.translate(None, b" \t\r\v\f").split(b"\n")
            total += bool(first) and not in_line
            total += sum(map(bool, rest))
            in_line = bool(rest[-1]) if rest else in_line or bool(first)
    return total
