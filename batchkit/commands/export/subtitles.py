"""Subtitle files of a run's transcripts, one per recording: SubRip (``--srt``) or WebVTT (``--vtt``)."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from batchkit.commands.export.outputs import Export, exporting
from batchkit.errors import JobError
from batchkit.storage.job_toml import job_of_run
from batchkit.storage.log import RESULTS
from batchkit.storage.newest_lines import read_newest

_UNSAFE = re.compile(r"[^\w.-]+")
_LONGEST_NAME = 100


def _write(kind: str, folder: Path, path: Path) -> dict[Path, int]:
    """Write a file ``ID.srt`` (or ``.vtt``) to the folder ``path`` for each row with a transcript.

    Raises:
        JobError: The run's task is not ``transcribe``, or ``path`` is a file.
    """
    if (task := job_of_run(folder).task) != "transcribe":
        raise JobError(
            f'{folder}: --{kind} is for task = "transcribe", but the task of this run is "{task}"'
        )
    if path.exists() and not path.is_dir():
        raise JobError(f"{path}: is a file; name a folder, which gets a file for each recording")
    path.mkdir(parents=True, exist_ok=True)
    written, taken = dict[Path, int](), set[str]()
    for record in read_newest(folder / RESULTS):
        if record.get("segments") is None:
            continue
        name = _name_of(record, taken)
        to = path / f"{name}.{kind}"
        with exporting(to, folder) as temporary:
            text = "\n".join(_lines(record["segments"], kind))
            temporary.write_text(text, encoding="utf-8", newline="\n")
        written[to] = len(record["segments"])
    return written


SRT = Export(partial(_write, "srt"), "subtitles")
VTT = Export(partial(_write, "vtt"), "subtitles")


def _name_of(record: Mapping[str, Any], taken: set[str]) -> str:
    """Return a file name for the row: its id, with unsafe characters replaced. If it is ``taken``, add the row's
    index."""
    name = _UNSAFE.sub("_", record["id"]).strip(".")[:_LONGEST_NAME] or "row"
    if name.casefold() in taken:
        name = f"{name}.{record['index']}"
    taken.add(name.casefold())
    return name


def _lines(segments: Sequence[Mapping[str, Any]], kind: str) -> Iterator[str]:
    if kind == "vtt":
        yield "WEBVTT\n"
    for number, segment in enumerate(segments, 1):
        times = [_time(segment[end], "," if kind == "srt" else ".") for end in ("start", "end")]
        text = " ".join(segment["text"].split())
        if kind == "vtt":
            text = html.escape(text, quote=False)
        yield f"{number}\n{times[0]} --> {times[1]}\n{text.replace('-->', '->')}\n"


def _time(seconds: float, point: str) -> str:
    ms = round(seconds * 1000)
    return f"{ms // 3_600_000:02}:{ms // 60_000 % 60:02}:{ms // 1000 % 60:02}{point}{ms % 1000:03}"
