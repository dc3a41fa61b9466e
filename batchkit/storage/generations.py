"""Reading ``steps.jsonl``: the generations of chosen rows, and what all of them cost."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from batchkit.storage.files import open_private
from batchkit.storage.lines import Generation, generation_in, tokens_in
from batchkit.storage.log import STEPS, read_generations
from batchkit.storage.newest import line_rows

_BLOCK_BYTES = 1 << 20


class Generations:
    """What the ``steps.jsonl`` of ``folder`` has of each row; nothing, if there is none.

    From the first question on it holds 32 bytes for each line, and it reads only lines that are asked
    for. A line that is not a generation is left out.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / STEPS
        self._file: int | None = None

    def of(self, index: int) -> Iterator[dict[str, Any]]:
        """The row's, in the order in which they ended."""
        import numpy as np

        if self._file is None:
            if not self._path.exists():
                return
            self._open()
        assert self._file is not None
        first, last = np.searchsorted(self._rows, [index, index + 1])
        for number in self._lines[first:last].tolist():
            start, end = int(self._bounds[number]), int(self._bounds[number + 1])
            if (found := _generation(os.pread(self._file, end - start, start))) is not None:
                yield found

    def of_record(self, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Of a row with several: what its record has of each of ``[[steps]]``, or else its generations."""
        if (steps := record.get("steps")) is not None:
            return [{"step": name, **step} for name, step in steps.items()]
        return [*self.of(record["index"])] if "generations" in record else []

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self) -> None:
        import numpy as np

        with self._path.open("rb") as file:
            self._bounds, rows = line_rows(file)
        self._lines = np.argsort(rows, kind="stable")
        self._rows = rows[self._lines]
        self._file = open_private(self._path, os.O_RDONLY)


class StepTotals(NamedTuple):
    """Of the generations of one step: how many, and their tokens."""

    generations: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def with_one(self, generation: Generation) -> StepTotals:
        prompt_tokens, completion_tokens = tokens_in(generation)
        return StepTotals(
            self.generations + 1,
            self.failed + (generation.status == "failed"),
            self.prompt_tokens + prompt_tokens,
            self.completion_tokens + completion_tokens,
        )


def of_row(folder: Path, index: int) -> Iterator[dict[str, Any]]:
    """Those of one row, in the order in which they ended; reads all of the file, and holds one block."""
    head = b'{"index":%d,' % index
    with suppress(FileNotFoundError), (folder / STEPS).open("rb") as file:
        for block in iter(lambda: file.read(_BLOCK_BYTES) + file.readline(), b""):
            for raw in BytesIO(block) if head in block else ():
                if raw.startswith(head) and (found := _generation(raw)) is not None:
                    yield found


def totals_by_step(folder: Path) -> dict[str, StepTotals]:
    """Of all of ``steps.jsonl``, by the step's name, in the order in which they first ended."""
    found: dict[str, StepTotals] = {}
    for line in read_generations(folder):
        if (generation := line.record) is not None:
            found[generation.step] = found.get(generation.step, StepTotals()).with_one(generation)
    return found


def _generation(raw: bytes) -> dict[str, Any] | None:
    return None if generation_in(raw) is None else orjson.loads(raw)
