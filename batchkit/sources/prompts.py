"""Plain text: one prompt per line, in the field ``prompt``."""

from __future__ import annotations

from collections.abc import Iterator

from batchkit.config.tables import InputTable
from batchkit.errors import InputError
from batchkit.sources.lines import count_lines, read_lines
from batchkit.sources.reader import Format, Found, Skip, fault


def read(path: str, table: InputTable, skip: Skip, index: int) -> Iterator[Found]:
    """See ``Reader``; white space around a prompt is kept, its line end is not."""
    return read_lines(path, skip, index, _parse)


def _parse(line: bytes, path: str, number: int) -> Found:
    if number == 1 and b"\n" not in line and b"\r" in line.rstrip():
        raise InputError(
            f"{path}: its lines end in \\r, as on old Macs, so all of them would be one prompt; save it with"
            " lines that end in \\n"
        )
    try:
        return {"prompt": line.removesuffix(b"\n").removesuffix(b"\r").decode()}
    except UnicodeDecodeError as bad:
        problem = f"byte 0x{line[bad.start]:02x} at byte {bad.start + 1}"
        return fault(path, number, f"not UTF-8: {problem}; save it as UTF-8")


FORMAT = Format(read, (".txt",), count_lines)
