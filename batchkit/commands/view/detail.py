"""One row: its records, and its prompt and images as the input has them now."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from PIL import Image

from batchkit.commands.view.images import Limits, as_webp
from batchkit.commands.view.rows import Labels, labels_of
from batchkit.config.masking import masked_text
from batchkit.config.tables import JobConfig
from batchkit.errors import MediaError, RowError
from batchkit.rendering.messages import as_text, said
from batchkit.runs.columns import Table
from batchkit.runs.index import Index
from batchkit.runs.inputs import InputRows
from batchkit.scoring import Scoring
from batchkit.storage.answers import answers_in_words
from batchkit.storage.job_toml import job_of_run, without_masked
from batchkit.storage.newest import Generations
from batchkit.storage.plain_json import encoded
from batchkit.types import Request

_LARGE = Limits(side=3_000, pixels=3_000_000, max_bytes=4 << 20)
_KEPT = 2  # rows whose images may be asked for next: their bytes may be in the input itself


class Prompt(NamedTuple):
    """What a row was asked, or the ``problem`` with showing it. ``sources``: of its images."""

    request: Request | None
    sources: Sequence[Any]
    fields: Mapping[str, Any]
    problem: str = ""


class RowReader:
    """Makes what the page shows of a row. ``chosen``: the rows that will be asked for, ascending."""

    def __init__(self, job: JobConfig, chosen: Iterable[int], scoring: Scoring | None) -> None:
        self._job, self._scoring = job, scoring
        self._labels: Labels = labels_of(job)
        self.inputs = InputRows(job, {*chosen}, load=lambda *_: Image.new("RGB", (1, 1)))

    def read(
        self,
        records: Sequence[Mapping[str, Any]],
        steps: Iterable[Mapping[str, Any]],
        picture: Callable[[int, Any], Any],
    ) -> dict[str, Any]:
        """``records`` of one row, the newest last; its lines of ``steps.jsonl``; ``picture`` gets the number and the
        source of each image, and returns what is in its place."""
        *older, newest = records
        prompt = self.prompt(newest)
        fields = {**(newest.get("fields") or {}), **prompt.fields}
        reference = self._scoring and self._scoring.reference(fields, newest["id"])
        return {
            "record": newest,
            **self._labels.of(newest, fields),
            "answers": answers_in_words(newest),
            "reference": reference,
            "fields": {str(name): _in_words(value) for name, value in fields.items()},
            "attempts": older,
            "prompt": {
                **_shown(newest, prompt),
                "images": [picture(n, source) for n, source in enumerate(prompt.sources)],
            },
            "steps": _steps(newest, steps),
        }

    def prompt(self, record: Mapping[str, Any]) -> Prompt:
        """Renders the row again as the run did, without opening an image."""
        row, renderer = self.inputs.row(record), self.inputs.renderer
        fields = row.fields if row else {}
        if self._job.rollout is not None:
            return Prompt(None, [], fields, "the job's function makes the prompts of a row")
        if row is None or renderer is None:
            problem = self.inputs.problem or "its row is not there"
            return Prompt(None, [], fields, masked_text(problem))
        sources: Sequence[Any] = []
        try:
            sources = renderer.image_sources(row)
            return Prompt(renderer.render(row), sources, fields)
        except RowError as error:
            return Prompt(None, sources, fields, masked_text(str(error)))


class Details:
    """Rows of runs. Opens the input, and keeps the sources of the last rows' images."""

    def __init__(self) -> None:
        self._sources: OrderedDict[tuple[Path, int], Sequence[Any]] = OrderedDict()
        self._lock = threading.Lock()  # requests, in several threads

    def row(self, index: Index, entries: Table, url: str) -> dict[str, Any]:
        """All about the row with these entries, the newest last; its images are at ``url``/images/0
        and so on.

        Raises:
            StoreError: the log was changed.
        """
        records = [index.record(entry) for entry in entries]
        number, sources = records[-1]["index"], list[Any]()

        def picture(n: int, source: Any) -> str:
            sources.append(source)
            return f"{url}/images/{n}"

        reader, steps = _reader(index.folder, number), Generations(index.folder).of(number)
        found = reader.read(records, steps, picture)
        self._keep((index.folder, number), sources)
        return found

    def image(self, index: Index, entry: Any, n: int) -> bytes:
        """Image ``n`` of the row with this entry as WebP.

        Raises:
            MediaError: there is none, it can't be opened, or it is not on this machine.
        """
        key = (index.folder, int(entry["row"]))
        with self._lock:
            sources = self._sources.get(key)
        if sources is None:
            sources = _reader(*key).prompt(index.record(entry)).sources
            self._keep(key, sources)
        if n >= len(sources):
            raise MediaError(f"row {key[1]} has no image {n}")
        return as_webp(sources[n], job_of_run(index.folder).media, _LARGE).content

    def _keep(self, key: tuple[Path, int], sources: Sequence[Any]) -> None:
        with self._lock:
            self._sources[key] = sources
            self._sources.move_to_end(key)
            while len(self._sources) > _KEPT:
                self._sources.popitem(last=False)


def _reader(folder: Path, row: int) -> RowReader:
    job = without_masked(job_of_run(folder))
    is_in_row = job.scoring.is_on and job.scoring.reference_run is None
    return RowReader(job, [row], Scoring(job.scoring, None) if is_in_row else None)


def _shown(record: Mapping[str, Any], prompt: Prompt) -> dict[str, Any]:
    request, stored = prompt.request, record.get("prompt")
    if stored:
        return {"text": stored}
    if request is None:
        return {"error": prompt.problem}
    if request.messages is None:
        return {"text": as_text(request, "[image]")}
    return {
        "messages": [
            {"role": message["role"], "content": said(message, "[image]")}
            for message in request.messages
        ]
    }


def _steps(
    record: Mapping[str, Any], lines: Iterable[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """A row's generations: of ``[[steps]]``, each with what the record has of it."""
    own = record.get("steps")
    if own is None:
        return [*lines]
    by_step = {line["step"]: line for line in lines}
    return [{**by_step.get(name, {}), "step": name, **step} for name, step in own.items()]


def _in_words(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return f"({len(value):,} bytes)"
    return orjson.dumps(orjson.loads(encoded(value)), option=orjson.OPT_INDENT_2).decode()
