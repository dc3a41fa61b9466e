"""The trials of ``tune`` as a picture: ``<name>.tune.html`` beside the run folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from batchkit.commands.tuning.known import Tried, words
from batchkit.commands.view.page import policy, style
from batchkit.config.numbers import number
from batchkit.config.tables import JobConfig
from batchkit.errors import StoreError
from batchkit.storage.files import write_atomically

_WIDTH, _LEFT, _LINE = 960, 480, 26  # in the picture's own units
_LONGEST = 72  # characters of a label


def draw(job: JobConfig, trials: Sequence[Tried], best: Mapping[str, Any]) -> Path:
    """One line for each trial, in their order: its rate as a dot, the interval as a bar, and ``best`` in full colour.

    Raises:
        StoreError: it can't be written.
    """
    path = job.folder.with_name(f"{job.name}.tune.html")
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
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, page.encode())
    except OSError as error:
        raise StoreError(f"{path}: can't write: {error.strerror or error}") from error
    return path


def _line(tried: Tried, y: int, scale: float, *, is_best: bool) -> Iterator[str]:
    label = words(tried.options)
    shown = label if len(label) <= _LONGEST else f"{label[: _LONGEST - 1]}…"
    yield f'<text x="{_LEFT - 12}" y="{y + 4}" text-anchor="end"><title>{escape(label)}</title>{escape(shown)}</text>'
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
