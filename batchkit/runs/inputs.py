"""The input rows of a run's records, if the input is still available."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
from PIL import Image

from batchkit.config.masking import masked_text
from batchkit.config.tables import InputTable, JobConfig
from batchkit.errors import BatchkitError, InputError, RenderTimeoutError, RowError
from batchkit.rendering.steps import Renderer, renderer_of
from batchkit.runs.reach import Reach
from batchkit.scoring import kept_fields
from batchkit.sources import never, read_rows
from batchkit.sources.formats import format_of, load_format
from batchkit.sources.rowhash import has_bytes, input_hash
from batchkit.storage.plain_json import encoded
from batchkit.types import CLIPS, Audio, Request, Row

_LONGEST_QUESTION = 1_000


class Prompt(NamedTuple):
    """The prompt of a row, rendered again to show it.

    - ``sources``: the source of each image. ``clips``: the kind and source of each audio or video clip.
    - ``fields``: the row's input columns; empty if the row is missing.
    - ``problem``: why the prompt can't be shown, otherwise "".
    """

    request: Request | None
    sources: Sequence[Any]
    fields: Mapping[str, Any]
    problem: str = ""
    clips: Sequence[tuple[str, Any]] = ()


class InputRows:
    """A reader that finds the input row of each record. The records must come in input order.

    - ``chosen``: indexes of the rows that will be requested; None if any row may be requested.
    - ``reach``: which files may be opened; None allows all.
    - ``problem`` (attribute): why the first missing row is missing.
    """

    def __init__(
        self,
        job: JobConfig,
        chosen: Collection[int] | None = None,
        reach: Reach | None = None,
    ) -> None:
        self.problem: str | None = None
        self._job, self._reach = job, reach
        self._next: Row | None = None
        self._rows: Iterator[Row] = iter(())
        if job.input.path is None:
            self.problem = "the rows came from Python, so they can't be read again"
            return
        # Rows past the limit too: an earlier start may have had a larger limit.
        everything = job.input.model_copy(update={"limit": None, "where": {}})
        self._rows = self._read(everything, never if chosen is None else lambda i: i not in chosen)

    def _read(self, table: InputTable, skip: Callable[[int], bool]) -> Iterator[Row]:
        files = None if self._reach is None else self._reach.files(table)
        yield from read_rows(table, skip=skip, files=files)

    def prompt(self, record: Mapping[str, Any]) -> Prompt:
        """Render the prompt of a record's row again, as the run did. Images are not opened."""
        row, renderer = self.row(record), self._renderer
        fields = {} if row is None else row.fields
        if self._job.rollout is not None:
            return Prompt(None, [], fields, "the job's [rollout] function makes the prompts")
        if row is None or renderer is None:
            return Prompt(None, [], fields, masked_text(self.problem or "its input row is missing"))
        sources, clips = list[Any](), list[tuple[str, Any]]()
        try:
            for kind, source in renderer.sources(row):
                if kind == "image":
                    sources.append(source)
                else:
                    clips.append((kind, source))
            return Prompt(renderer.render(row), sources, fields, clips=clips)
        except RowError as error:
            reason = str(error) if self._reach is None else self._reach.reason(error)
            if isinstance(error, RenderTimeoutError):  # other rows would time out as well
                self._renderer, self.problem = None, reason
            return Prompt(None, sources, fields, masked_text(reason), clips)

    @cached_property
    def _renderer(self) -> Renderer | None:
        try:
            if self._reach is not None:
                self._reach.check_prompts()
            return renderer_of(self._job, load=_unopened)
        except BatchkitError as error:
            self.problem = str(error)
            return None

    def row(self, record: Mapping[str, Any]) -> Row | None:
        """Return the input row of a record; None if it is missing, or if another row is at its index now."""
        name = f"{self._job.input.path}: row {record['index']} (id {record['id']})"
        try:
            while self._next is None or self._next.index < record["index"]:
                self._next = next(self._rows)
        except (BatchkitError, StopIteration) as error:
            self._next, self._rows = None, iter(())
            self.problem = self.problem or str(error) or f"{name} is no longer in the input"
            return None
        row = self._next
        if (
            row.index == record["index"]
            and row.id == record["id"]
            and record.get("input_hash") == input_hash(row.fields)
        ):
            return row
        now = (
            ""
            if row.id == record["id"] or row.index != record["index"]
            else f"; the row there now has the id {row.id!r}"
        )
        self.problem = self.problem or f"{name} is not the row that was answered{now}"
        return None


class InputColumns:
    """The input columns that an export of the run in ``folder`` adds to its records.

    - ``names``: the columns in ``output.keep``, and those that ``[scoring]`` uses.
    - ``problem``: why rows of the input could not be read; None if they could, or are not needed.
    - ``is_local``: True if the input is, or was, on this machine.
    """

    def __init__(self, folder: Path) -> None:
        reach = Reach.of(folder)
        self.is_local = bool(reach.roots) and "://" not in (reach.job.input.path or "://")
        self._rows = InputRows(reach.job, reach=reach)
        self.names = kept_fields(reach.job)
        if reach.job.output.keep == "*":
            self.names = list(dict.fromkeys([*self._all(reach), *self.names]))
        self._wanted = frozenset(self.names)

    @property
    def problem(self) -> str | None:
        return self._rows.problem

    def of(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns for a record: values that the record has, otherwise values of its input row."""
        kept: dict[str, Any] = record.get("fields") or {}
        if kept.keys() >= self._wanted or (row := self._rows.row(record)) is None:
            return kept
        fields: dict[str, Any] = orjson.loads(encoded({n: row.fields.get(n) for n in self.names}))
        return fields | kept

    def _all(self, reach: Reach) -> Iterator[str]:
        """Yield the names of all input columns, except columns of images or bytes.

        For a single table, only the first row is read. Other inputs are read to the end.
        """
        table, known = reach.job.input, set[str]()
        if table.path is None:
            return
        try:
            files = reach.files(table)
            is_table = [load_format(format_of(path, table)).is_table for path in files] == [True]
            for row in read_rows(table, files=files):
                for name in [name for name in row.fields if name not in known]:
                    known.add(name)
                    if not has_bytes(row.fields[name]):
                        yield name
                if is_table and known:
                    return
        except BatchkitError as error:
            self._rows.problem = str(error)


def with_fields(
    records: Iterable[dict[str, Any]],
    job: JobConfig,
    names: set[str],
    reach: Reach | None = None,
) -> Iterator[tuple[dict[str, Any], Mapping[str, Any]]]:
    """Yield each record with its row's fields: the fields in the record if they include ``names``, otherwise the input
    row.

    ``records`` must be in input order. The input is read only if needed. If an input row is missing, the fields in the
    record are used in two cases: the record is a failed one, which is only counted; or all missing names are in
    ``[vars]``.

    Raises:
        InputError: The input row of an answer is missing.
    """
    rows = InputRows(job, reach=reach)
    for record in records:
        kept = record.get("fields") or {}
        if names <= kept.keys():
            yield record, kept
        elif (row := rows.row(record)) is not None:
            yield record, row.fields
        elif names - job.vars.keys() <= kept.keys() or record["status"] == "failed":
            yield record, kept
        else:
            raise InputError(
                f"{rows.problem}; the run did not keep the fields {sorted(names)}, which are needed: restore"
                " the input, or start a new run with these fields in output.keep"
            )


def _unopened(kind: str, *_: Any) -> Any:
    """Return an empty placeholder for an image or a clip, so that a prompt is rendered without opening files."""
    return Audio(np.zeros(0, np.float32), 1) if kind in CLIPS else Image.new("RGB", (1, 1))


def question_in(fields: Mapping[str, Any], names: Collection[str] | None = None) -> str | None:
    """Return the longest text among ``fields`` that is short enough for a question, or None.

    ``names``: the fields to consider; None for all. Single words and paths don't count. A text with a question mark is
    preferred.
    """
    texts = [
        value
        for name, value in fields.items()
        if isinstance(value, str)
        and len(value) <= _LONGEST_QUESTION
        and (" " in value or not value.isascii())
        and (names is None or name in names)
    ]
    return max(texts, key=lambda text: (text.rstrip().endswith("?"), len(text)), default=None)
