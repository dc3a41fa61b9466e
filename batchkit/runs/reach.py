"""Decides which files outside a run's folder may be opened while somebody reads the run.

The run may come from someone else, so the job in its folder is not trusted for this. Files are allowed below the
folders that the reader names. If the reader names none, the job file of the run's last start decides, unless it was
removed: files are allowed below its folder and below the folders that it uses. Nothing is downloaded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from PIL import Image

from batchkit.config.loading import load_job
from batchkit.config.tables import InputTable, JobConfig, MediaTable
from batchkit.config.tool_definitions import is_template
from batchkit.errors import InputError, JobError, MediaError, RenderTimeoutError, RowError
from batchkit.rendering.media import load_clip_bytes, load_image, load_still
from batchkit.rendering.media.source import shown
from batchkit.sources.finding import input_files
from batchkit.storage.job_toml import job_of_run, without_masked
from batchkit.storage.starts import place_of_job

_Loaded = TypeVar("_Loaded")
ROW_S = 5.0  # time limit for a template, in seconds
_CLOSED = "/dev/null/closed"  # a root that contains no file
_NO_NETWORK = "reading a run downloads nothing; download the file beforehand"
_MAGIC = re.compile(r"[*?\[]")
_IN_ARCHIVE = re.compile(r"(?:zip|tar)://[^:]*::(?=/)")


class Reach(NamedTuple):
    """The ``job`` of a run, restricted for readers of the run.

    Templates get a short time limit, and only files below one of ``roots`` are opened. ``closed``: why files below
    ``media.root`` are not opened; "" if they may be opened.
    """

    job: JobConfig
    roots: Sequence[str]
    closed: str

    @classmethod
    def of(cls, folder: Path, named: Sequence[Path] = ()) -> Reach:
        """Return the limits for the run in ``folder``. ``named``: folders that replace those of the user's job file.

        Raises:
            JobError, StoreError: The folder is not a run folder.
        """
        job = without_masked(job_of_run(folder))
        roots = [os.path.realpath(root) for root in named] or _own_roots(folder)
        is_open = _is_below(job.media.root, roots)
        media = {"allow_urls": [], "root": job.media.root if is_open else _CLOSED}
        time = {"row_timeout_s": min(ROW_S, job.run.row_timeout_s)}
        closed = "" if is_open else _refusal("media.root", job.media.root, roots)
        return cls(job.with_keys(media=media, run=time), roots, closed)

    def check(self, key: str, path: str) -> None:
        """Raise InputError if ``path``, the value of ``key`` in the job, must not be opened."""
        if not _is_below(path, self.roots):
            raise InputError(_refusal(key, path, self.roots))

    def files(self, table: InputTable) -> dict[str, str]:
        """Return the input's files for ``read_rows``. Raise InputError if one of them must not be opened."""
        self.check("input.path", table.path or "")
        files = input_files(table)
        for path in files:
            self.check("input.path", path)
        return dict.fromkeys(files, "")

    def check_prompts(self) -> None:
        """Raise InputError if a file used by the prompts must not be opened."""
        for key, path in _prompt_files(self.job):
            self.check(key, path)

    def image(self, source: Any, media: MediaTable | None = None) -> Image.Image:
        """Load an image, as ``load_image`` does. Raise MediaError if it can't be loaded or its file must not be
        opened."""
        return self._opened(source, "image", lambda: load_image(source, media or self.job.media))

    def clip(self, source: Any) -> bytes:
        """Return the bytes of a clip. Raise MediaError if it can't be read or its file must not be opened."""
        return self._opened(source, "clip", lambda: load_clip_bytes(source, self.job.media))

    def still(self, source: Any, side: int) -> Image.Image:
        """Return a frame of a video. Raise MediaError if it can't be read or its file must not be opened."""
        return self._opened(source, "clip", lambda: load_still(source, side, self.job.media))

    def _opened(self, source: Any, kind: str, load: Callable[[], _Loaded]) -> _Loaded:
        if isinstance(source, str) and source[:8].lower().startswith(("http://", "https://")):
            raise MediaError(f"{shown(source, kind)}: not fetched: {_NO_NETWORK}")
        try:
            return load()
        except MediaError as error:
            raise MediaError(self.reason(error)) from None

    def reason(self, error: RowError) -> str:
        """Return why a row can't be shown, in words for somebody who only reads the run."""
        if isinstance(error, RenderTimeoutError):
            return f"the prompt's template takes longer than {ROW_S:g} s"
        text = str(error)
        return f"{text.partition(': ')[0]}: {self.closed}" if _CLOSED in text else text


def _own_roots(folder: Path) -> list[str]:
    """Return the folder of the job file that created the run, and the folders that this job file uses.

    The job file counts only if it exists and is outside the run folder. For a run without a job file, return the folder
    in which the run was started, if the run folder is ``output/NAME`` in it.
    """
    if (place := place_of_job(folder)) is None:
        return []
    if place.is_dir():
        return [str(place)] * (folder.resolve().parent.parent == place)
    try:
        job = load_job(place)
    except JobError:
        return []
    named = [job.media.root, *_folder_of(job.input), *(path for _, path in _prompt_files(job))]
    found = [place.parent.resolve(), *(os.path.realpath(one) for one in named if "://" not in one)]
    return [str(root) for root in found if str(root) != "/"]


def _folder_of(table: InputTable) -> Iterator[str]:
    """Yield the input path. For a glob pattern, yield the folder above it."""
    if table.path is not None:
        before, *magic = _MAGIC.split(table.path, maxsplit=1)
        yield str(Path(before + "x").parent) if magic else before


def _prompt_files(job: JobConfig) -> Iterator[tuple[str, str]]:
    """Yield the key (``prompt.user_file``, …) and path of each text file that the prompts of the job and its steps use.

    A path that is a template is left out.
    """
    for place, of_step in job.of_each_step():
        prompt = of_step.prompt
        tools = prompt.tools if isinstance(prompt.tools, str) else None
        files = {"system_file": prompt.system_file, "user_file": prompt.user_file, "tools": tools}
        for name, path in files.items():
            if path is not None and not is_template(path):
                yield f"{place}prompt.{name}", path


def _is_below(path: str, roots: Sequence[str]) -> bool:
    path = _IN_ARCHIVE.sub("", path).removeprefix("file://")
    real = Path(os.path.realpath(path))
    return "://" not in path and any(real.is_relative_to(root) for root in roots)


def _refusal(key: str, path: str, roots: Sequence[str]) -> str:
    if "://" in path:
        return f"{key} {shown(path)}: not fetched: {_NO_NETWORK}"
    why = (
        f"it is outside {', '.join(dict.fromkeys(roots))}"
        if roots
        else "the job file of this run was not found"
    )
    return f"{key} {shown(path)}: not opened: {why}; if you trust the run, name the file's folder with --media"
