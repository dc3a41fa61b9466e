"""The rows of a finished run's input, if they are still there."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from batchkit.config.tables import JobConfig
from batchkit.errors import BatchkitError, JobError
from batchkit.rendering.media import load_image
from batchkit.rendering.renderer import LoadImage
from batchkit.rendering.steps import Renderer, renderer_of
from batchkit.sources import read_rows
from batchkit.sources.rowhash import known_hashes
from batchkit.types import Row


class InputRows:
    """Reads the input along with the records, which come in the same order.

    ``problem`` says why rows are missing, once one was. The ``renderer`` gets its images from
    ``load``.
    """

    def __init__(
        self, job: JobConfig, chosen: Collection[int] | None, load: LoadImage = load_image
    ) -> None:
        self.problem: str | None = None
        self.renderer: Renderer | None = None
        self._next: Row | None = None
        self._rows: Iterator[Row] = iter(())
        try:
            self.renderer = renderer_of(job, load=load)
        except JobError as error:
            self.problem = str(error)
        if job.input.path is None:
            self.problem = "the rows came from Python"
            return
        # Rows past the limit too: a later start may have had a larger one.
        everything = job.input.model_copy(update={"limit": None, "where": {}})
        skip = (lambda index: False) if chosen is None else lambda index: index not in chosen
        self._rows = read_rows(everything, skip=skip)

    def row(self, record: Mapping[str, Any]) -> Row | None:
        while self._next is None or self._next.index < record["index"]:
            try:
                self._next = next(self._rows, None)
            except BatchkitError as error:
                self.problem, self._next, self._rows = str(error), None, iter(())
            if self._next is None:
                self.problem = self.problem or "it is shorter than it was"
                return None
        if self._next.index != record["index"]:
            return None
        if self._next.id != record["id"]:
            found = f"row {record['index']} is now {self._next.id!r}, not {record['id']!r}"
            self.problem = self.problem or found
            return None
        if record.get("input_hash") not in (None, *known_hashes(self._next.fields)):
            self.problem = self.problem or f"row {record['index']} is not what was answered"
            return None
        return self._next
