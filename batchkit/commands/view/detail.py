"""One row: its records, and its prompt and images as the input has them now."""

from __future__ import annotations

import io
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from batchkit.config.masking import masked_text
from batchkit.config.tables import JobConfig, MediaTable
from batchkit.errors import MediaError, RowError
from batchkit.rendering.media import load_image, shown
from batchkit.rendering.messages import as_text, said
from batchkit.runs.columns import Table
from batchkit.runs.index import Index
from batchkit.runs.inputs import InputRows
from batchkit.scoring import Scoring
from batchkit.storage.answers import answers_in_words
from batchkit.storage.generations import of_row
from batchkit.storage.job_toml import job_of_run, without_masked
from batchkit.types import Request

MOST_IMAGE_BYTES = 4 << 20
_MAX_PIXELS, _MAX_SIDE = 3_000_000, 3_000
_KEPT = 2  # rows whose images may be asked for next: their bytes may be in the input itself


class Prompt(NamedTuple):
    """What a row was asked, or the ``problem`` with showing it. ``sources``: of its images."""

    request: Request | None
    sources: Sequence[Any]
    fields: Mapping[str, Any]
    problem: str = ""


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
        *older, newest = [index.record(entry) for entry in entries]
        job, row = _job(index.folder), newest["index"]
        prompt = _prompt(newest, job)
        self._keep((index.folder, row), prompt.sources)
        return {
            "record": newest,
            "answers": answers_in_words(newest),
            "reference": _reference(job, newest, prompt.fields),
            "attempts": older,
            "prompt": _shown(newest, prompt, url),
            "steps": [*of_row(index.folder, row)],
        }

    def image(self, index: Index, entry: Any, n: int) -> bytes:
        """Image ``n`` of the row with this entry as WebP, of at most ``MOST_IMAGE_BYTES``.

        Raises:
            MediaError: there is none, it can't be opened, or it is not on this machine.
        """
        job, key = _job(index.folder), (index.folder, int(entry["row"]))
        with self._lock:
            sources = self._sources.get(key)
        if sources is None:
            sources = _prompt(index.record(entry), job).sources
            self._keep(key, sources)
        if n >= len(sources):
            raise MediaError(f"row {key[1]} has no image {n}")
        return _encoded(sources[n], job.media)

    def _keep(self, key: tuple[Path, int], sources: Sequence[Any]) -> None:
        with self._lock:
            self._sources[key] = sources
            self._sources.move_to_end(key)
            while len(self._sources) > _KEPT:
                self._sources.popitem(last=False)


def _job(folder: Path) -> JobConfig:
    """The run's job, with images of a size for a page."""
    job = without_masked(job_of_run(folder))
    small = {"max_pixels": min(job.media.max_pixels, _MAX_PIXELS), "min_pixels": 0}
    return job.model_copy(update={"media": job.media.model_copy(update=small)})


def _prompt(record: Mapping[str, Any], job: JobConfig) -> Prompt:
    """Renders the row again as the run did, without opening an image."""
    kept = record.get("fields") or {}
    if job.rollout is not None:
        return Prompt(None, [], kept, "the job's function makes the prompts of a row")
    inputs = InputRows(job, {record["index"]}, load=lambda source, media: Image.new("RGB", (1, 1)))
    row = inputs.row(record)
    if row is None or inputs.renderer is None:
        return Prompt(None, [], kept, masked_text(inputs.problem or "its row is not there"))
    sources: Sequence[Any] = []
    try:
        sources = inputs.renderer.image_sources(row)
        return Prompt(inputs.renderer.render(row), sources, row.fields)
    except RowError as error:
        return Prompt(None, sources, row.fields, masked_text(str(error)))


def _shown(record: Mapping[str, Any], prompt: Prompt, url: str) -> dict[str, Any]:
    images = [f"{url}/images/{n}" for n in range(len(prompt.sources))]
    request, stored = prompt.request, record.get("prompt")
    if request is None:
        found = {"text": stored} if stored else {"error": prompt.problem}
    elif request.messages is None or stored:
        found = {"text": stored or as_text(request, "[image]")}
    else:
        messages = request.messages
        found = {"messages": [{"role": m["role"], "content": said(m, "[image]")} for m in messages]}
    return {**found, "images": images}


def _reference(job: JobConfig, record: Mapping[str, Any], fields: Mapping[str, Any]) -> str | None:
    """The right answer, if a field of the row has it."""
    if not job.scoring.is_on or job.scoring.reference_run is not None:
        return None
    kept = record.get("fields") or {}
    return Scoring(job.scoring, None).reference({**kept, **fields}, record["id"])


def _encoded(source: Any, media: MediaTable) -> bytes:
    if isinstance(source, str) and source[:8].lower().startswith(("http://", "https://")):
        raise MediaError(f"{shown(source)}: not fetched: a view reads nothing from the network")
    image = load_image(source, media)
    image.thumbnail((_MAX_SIDE, _MAX_SIDE))
    for quality in (85, 60, 30):
        file = io.BytesIO()
        image.save(file, "WEBP", quality=quality, method=2)
        if file.tell() <= MOST_IMAGE_BYTES:
            return file.getvalue()
    raise MediaError(f"{shown(source)}: too large for a page")
