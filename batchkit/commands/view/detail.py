"""The details of one row: its records, and its prompt and images, rendered again from the current input."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from batchkit.commands.view.media import (
    LARGE,
    SMALL,
    THUMB,
    PlayableClip,
    Webp,
    as_webp,
    clip_of,
    still_as_webp,
)
from batchkit.commands.view.rows import MOST_TEXT, Labels, labels_of
from batchkit.commands.view.search import in_words
from batchkit.errors import MediaError
from batchkit.rendering.messages import as_text, said
from batchkit.runs.index import Index, Table
from batchkit.runs.inputs import InputRows, Prompt
from batchkit.runs.reach import Reach
from batchkit.scoring import Scoring
from batchkit.storage.lines import answers_in_words, whole_record
from batchkit.storage.newest_lines import Generations

_KEPT = 2  # prompts cached for the browser's next requests; few, because they may contain images
_IMAGE = "[image]"
_LIST_S = 1.0  # seconds after which a list receives a partial response


def row_of(index: Index, entries: Table, url: str, media: tuple[Path, ...]) -> dict[str, Any]:
    """Return all details of one row. ``entries``: the index entries of its records, the newest last.

    The URLs of the row's images are ``url``/images/0 and so on; the URLs of the row's clips are ``url``/clips/0 and so
    on.

    Raises:
        StoreError: The log was changed.
    """
    records = [index.record(entry) for entry in entries]
    reach = Reach.of(index.folder, media)
    _prompt.cache_clear()  # an input that was missing may be available again
    prompt = _prompt(index, *_place(entries[-1]), media)
    images = [f"{url}/images/{n}" for n in range(len(prompt.sources))]
    clips = [{"kind": kind, "src": f"{url}/clips/{n}"} for n, (kind, _) in enumerate(prompt.clips)]
    for clip in clips:
        if clip["kind"] == "video":
            clip["poster"] = f"{clip['src']}/poster"
    with closing(Generations(index.folder)) as generations:
        steps = generations.of_record(records[-1])
    found = shown(records, steps, prompt, images, labels_of(reach), _scoring(reach))
    return {**found, "prompt": {**found["prompt"], "clips": clips}}


def beside_answers(
    index: Index, entries: Table, media: tuple[Path, ...]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield a row index and the texts shown beside its answer in the list: the question, the reference and the first
    image (as a data: URI). The rows are in input order. After ``_LIST_S`` seconds the iterator ends, even if rows are
    missing; the page requests those rows again."""
    reach, until = Reach.of(index.folder, media), time.monotonic() + _LIST_S
    inputs = InputRows(reach.job, {*entries["row"].tolist()}, reach)
    labels, scoring = labels_of(reach), _scoring(reach)
    for record in map(index.record, entries):
        prompt = inputs.prompt(record)
        row = shown([record], [], prompt, [], labels, scoring)
        found = {name: row[name] for name in ("asked", "reference")}
        with suppress(MediaError, IndexError):
            found["image"] = _thumb(prompt, reach).uri
        yield record["index"], found
        # If a template was too slow, the other rows' templates are not tried, so those rows take no time.
        if time.monotonic() > until and not prompt.problem:
            return


def _thumb(prompt: Prompt, reach: Reach) -> Webp:
    """Return a thumbnail of the prompt's first image, or of its first video. Raise MediaError if it can't be read, and
    IndexError if the prompt has neither."""
    if prompt.sources:
        return as_webp(prompt.sources[0], reach, THUMB)
    videos = [source for kind, source in prompt.clips if kind == "video"]
    return still_as_webp(videos[0], reach, THUMB)


def _scoring(reach: Reach) -> Scoring | None:
    """Return the scoring that finds a row's reference, or None if the reference is not in the row itself."""
    of = reach.job.scoring
    return Scoring(of, None) if of.is_on and of.reference_run is None else None


class RowMedia(NamedTuple):
    """The images and clips of a row's prompt. The methods raise MediaError if a file is missing or must not be
    opened."""

    prompt: Prompt
    reach: Reach

    @classmethod
    def of(cls, index: Index, entry: Any, media: tuple[Path, ...]) -> RowMedia:
        return cls(_prompt(index, *_place(entry), media), Reach.of(index.folder, media))

    def image(self, n: int) -> bytes:
        """Return image number ``n`` of the prompt as WebP."""
        return as_webp(_nth("image", self.prompt.sources, n), self.reach, LARGE).content

    def clip(self, n: int) -> PlayableClip:
        kind, source = _nth("clip", self.prompt.clips, n)
        return clip_of(kind, source, self.reach)

    def poster(self, n: int) -> bytes:
        """Return a frame of the video that is clip number ``n``, as WebP."""
        return still_as_webp(_nth("clip", self.prompt.clips, n)[1], self.reach, SMALL).content


def _nth(kind: str, sources: Sequence[Any], n: int) -> Any:
    if n >= len(sources):
        raise MediaError(
            f"no {kind} {n}: the row's prompt has {len(sources)} {kind}s, counted from 0"
        )
    return sources[n]


def shown(
    records: Sequence[Mapping[str, Any]],
    steps: Iterable[Mapping[str, Any]],
    prompt: Prompt,
    images: Sequence[Any],
    labels: Labels,
    scoring: Scoring | None,
) -> dict[str, Any]:
    """Return the row's details as the page's script expects them. ``records``: the row's records, the newest last.
    ``steps``: its generations. ``images``: sources or URLs of the prompt's images. ``scoring``: finds the row's
    reference."""
    *older, newest = records
    kept = newest.get("fields") or {}
    fields = {**kept, **prompt.fields}
    found, words = labels.of(newest, fields), _prompt_in_words(newest, prompt)
    return {
        "record": newest,
        **found,
        "asked": found["asked"] or _first_line(words),
        "answers": answers_in_words(newest),
        "reference": scoring and scoring.reference(fields, newest["id"]),
        "fields": {str(name): in_words(value) for name, value in {**fields, **kept}.items()},
        "attempts": older,
        "prompt": {**words, "images": images},
        "steps": [*steps],
    }


def _place(entry: Any) -> tuple[int, int]:
    return int(entry["start"]), int(entry["length"])


@lru_cache(_KEPT)
def _prompt(index: Index, start: int, length: int, media: tuple[Path, ...]) -> Prompt:
    record, reach = (
        whole_record(index.raw(start, length), index.path, start),
        Reach.of(index.folder, media),
    )
    return InputRows(reach.job, {record["index"]}, reach).prompt(record)


def _prompt_in_words(record: Mapping[str, Any], prompt: Prompt) -> dict[str, Any]:
    request, stored = prompt.request, record.get("prompt")
    if stored:
        return {"text": stored}
    if request is None:
        return {"error": prompt.problem}
    if request.messages is None:
        return {"text": as_text(request, _IMAGE)}
    return {
        "messages": [
            {"role": message["role"], "content": said(message, _IMAGE)}
            for message in request.messages
        ]
    }


def _first_line(prompt: Mapping[str, Any]) -> str | None:
    """Return the first line of the last user message, without images; None if there is no text."""
    said = [part["content"] for part in prompt.get("messages", ()) if part["role"] == "user"]
    text = said[-1] if said else prompt.get("text", "")
    lines = text.replace(_IMAGE, "").strip().splitlines()
    return lines[0][:MOST_TEXT] if lines else None
