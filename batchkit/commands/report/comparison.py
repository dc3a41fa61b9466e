"""Runs side by side as one page, in the style of the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from markupsafe import Markup

from batchkit.commands.report.figures import nice
from batchkit.commands.report.page import page, write_page
from batchkit.runs.comparison import Comparison, Delta
from batchkit.scoring.metrics import head


def write_comparison(comparison: Comparison, path: Path) -> Path:
    """Write ``comparison`` as one self-contained web page.

    Raises:
        StoreError: the file can't be written, or its name is not that of a web page.
    """
    pieces = page(
        "report/compare.html.j2",
        runs=comparison.runs,
        origins=comparison.origins,
        warnings=comparison.warnings,
        parts=[_part(comparison, run) for run in comparison.runs[1:]],
        method=comparison.method,
    )
    return write_page(path, pieces)


def _part(comparison: Comparison, run: str) -> dict[str, Any]:
    """One run against the baseline, for the template."""
    deltas = [delta for delta in comparison.deltas if delta.run == run]
    scorers = dict.fromkeys(delta.scorer for delta in deltas)
    scores = [
        _score(comparison, run, scorer, [delta for delta in deltas if delta.scorer == scorer])
        for scorer in scorers
    ]
    return {"run": run, "counts": comparison.counts(run), "scores": scores}


def _score(comparison: Comparison, run: str, scorer: str, deltas: list[Delta]) -> dict[str, Any]:
    """One score. The intervals' scale runs from minus ``reach`` to plus ``reach``."""
    reach = nice(max(abs(end) for delta in deltas for end in (delta.low, delta.high)))
    lines = [
        {
            "delta": delta,
            "before": comparison.mean(comparison.runs[0], delta.group, scorer),
            "after": comparison.mean(run, delta.group, scorer),
            "interval": _interval(delta, reach),
        }
        for delta in deltas
    ]
    flips = [flip for flip in comparison.flips if flip.run == run and flip.scorer == scorer]
    ways = {
        "better": [flip.id for flip in flips if flip.after > flip.before],
        "worse": [flip.id for flip in flips if flip.after < flip.before],
    }
    shown = [(way, ids) for way, ids in ways.items() if ids]
    return {"head": head(scorer), "reach": reach, "lines": lines, "flips": shown}


def _interval(delta: Delta, reach: float) -> Markup:
    """The difference as a mark on its interval; 0 is in the middle."""
    label = f"{delta.delta:+.2f}, between {delta.low:+.2f} and {delta.high:+.2f}"
    at, low, high = (50 + 50 * value / reach for value in (delta.delta, delta.low, delta.high))
    return Markup(
        '<svg role="img" aria-label="{}" viewBox="0 0 100 10" preserveAspectRatio="none">'
        '<line class="grid" x1="50" x2="50" y1="0" y2="10"/>'
        '<line class="whisker{}" x1="{:.2f}" x2="{:.2f}" y1="5" y2="5"/>'
        '<line class="point" x1="{:.2f}" x2="{:.2f}" y1="2" y2="8"/></svg>'
    ).format(label, " clear" if delta.is_clear else "", low, high, at, at)
