"""Timelines and histograms of a run: its records are streamed, then binned.

Holds at most 48 bytes per row, so that a million rows fit into memory.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from batchkit.storage.answers import answers_in_words
from batchkit.storage.lines import failure_kind

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BINS = 40  # of a histogram
FEW_BINS = 8  # of whole numbers: each has a bar of its own
_SPANS = 120  # of a timeline, at most
_SHORTEST_PAUSE_S = 5.0
_LONGEST_IDLE = 0.02  # of the time at work: a longer gap was a pause between two starts


@dataclass
class RunStats:
    """Counts of all records, and four numbers of each row that reached the engine."""

    rows: int = 0
    ok: int = 0
    cut: int = 0  # answers that ended at max_tokens
    shortened: int = 0  # prompts that were cut to fit
    retried: int = 0
    generations: int = 0  # of rows with several
    has_scores: bool = False
    failed_by_kind: Counter[str] = field(default_factory=Counter)
    failed_rows: array[int] = field(default_factory=lambda: array("q"))
    answered_rows: array[int] = field(default_factory=lambda: array("q"))
    text_lengths: array[int] = field(default_factory=lambda: array("l"))
    finished_at: array[float] = field(default_factory=lambda: array("d"))
    latency_s: array[float] = field(default_factory=lambda: array("d"))
    prompt_tokens: array[int] = field(default_factory=lambda: array("l"))
    completion_tokens: array[int] = field(default_factory=lambda: array("l"))

    def watch(self, records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yields ``records`` unchanged and counts each."""
        for record in records:
            self.add(record)
            yield record

    def add(self, record: Mapping[str, Any]) -> None:
        self.rows += 1
        kind = failure_kind(record)
        if kind is not None:
            self.failed_by_kind[kind] += 1
        (self.answered_rows if kind is None else self.failed_rows).append(record["index"])
        self.ok += kind is None
        self.cut += record.get("finish_reason") == "length"
        self.shortened += bool(record.get("truncated_tokens"))
        self.retried += (record.get("attempt") or 1) > 1
        self.has_scores = self.has_scores or "scores" in record
        self.generations += record.get("generations") or 0
        steps = (record.get("steps") or {}).values()
        self.text_lengths.append(
            len(answers_in_words(record)[0])
            + sum(len(each.get("reasoning") or "") for each in (record, *steps))
            + sum(len(step.get("text") or "") for step in steps)
        )
        usage, latency_s = record.get("usage"), record.get("latency_s")
        if usage is None or not isinstance(latency_s, int | float):
            return
        try:
            finished = datetime.fromisoformat(record["finished_at"]).timestamp()
        except (KeyError, TypeError, ValueError):  # written by hand, or by another version
            return
        self.finished_at.append(finished)
        self.latency_s.append(latency_s)
        self.prompt_tokens.append(usage["prompt_tokens"])
        self.completion_tokens.append(usage["completion_tokens"])


class Histogram(NamedTuple):
    """``counts`` over equal bins from ``low`` to ``top``; the last one also counts larger ones.

    If ``is_whole``, a bin counts whole numbers: those from its lower edge on, below the next one.
    """

    counts: list[int]
    low: float
    top: float
    overflow: int
    median: float
    p99: float
    largest: float
    is_whole: bool = False
    is_constant: bool = False

    @property
    def width(self) -> float:
        return (self.top - self.low) / len(self.counts)


class Timeline(NamedTuple):
    """Rates over the time at work; ``pauses``: where, as a share of ``seconds``, and how long."""

    rows_per_s: list[float]
    in_flight: list[float]
    seconds: float
    pauses: list[tuple[float, float]]
    mean_rows_per_s: float
    most_in_flight: int


def histogram(values: Iterable[float]) -> Histogram | None:
    """Up to the 99th percentile if a long tail would squeeze the rest; None without spread."""
    found = np.asarray(values, dtype=np.float64)
    if not len(found) or not found.max() > 0:
        return None
    median, p99 = (float(value) for value in np.percentile(found, (50, 99)))
    largest = float(found.max())
    least, most = float(found.min()), largest if largest <= 2 * p99 or p99 <= 0 else p99
    is_whole = bool(np.all(found == np.rint(found)))
    (low, top), bins = _domain(least, most), _BINS
    if is_whole:
        low, top, bins = _whole_domain(least, most)
    places = np.clip((found - low) / (top - low) * bins, 0, bins - 1).astype(np.int64)
    counts = np.bincount(places, minlength=bins)
    overflow = int(np.count_nonzero(found > top - is_whole))
    is_constant = least == largest
    return Histogram(
        counts.tolist(), low, top, overflow, median, p99, largest, is_whole, is_constant
    )


def timeline(finished_at: Iterable[float], latency_s: Iterable[float]) -> Timeline | None:
    """Pauses between two starts of the run are cut out; None if no time passed."""
    ends = np.asarray(finished_at, dtype=np.float64)
    starts = ends - np.asarray(latency_s, dtype=np.float64)
    if len(ends) < 2 or ends.max() - starts.min() <= 0:
        return None
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], ends[order]
    starts, ends, cuts = _without_pauses(starts, ends)
    seconds = float(ends.max())
    if seconds <= 0:
        return None
    bins = int(np.clip(len(ends) // 20, 12, _SPANS))
    edges = np.linspace(0, seconds, bins + 1)
    width = seconds / bins
    finished, _ = np.histogram(ends, edges)
    overlap = np.diff(_integral(starts, edges) - _integral(np.sort(ends), edges))
    return Timeline(
        rows_per_s=(finished / width).tolist(),
        in_flight=np.maximum(overlap / width, 0).tolist(),
        seconds=seconds,
        pauses=[(at / seconds, length) for at, length in cuts],
        mean_rows_per_s=len(ends) / seconds,
        most_in_flight=_most(starts, ends),
    )


def nice(value: float) -> float:
    """The next number up that divides into four readable parts: 1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8."""
    if value <= 0:
        return 1.0
    power = 10.0 ** np.floor(np.log10(value))
    steps = (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10)
    step = next(step for step in steps if value <= step * power * (1 + 1e-9))
    return float(f"{step * power:.12g}")


def _domain(least: float, most: float) -> tuple[float, float]:
    """Four equal readable steps that contain both: from 0, or from near ``least`` if far from 0."""
    step = nice(max(most - least, most / 100) / 4)
    while (low := step * np.floor(least / step)) + 4 * step < most * (1 - 1e-9):
        step = nice(step * 1.01)
    return float(low), float(f"{low + 4 * step:.12g}")


def _whole_domain(least: float, most: float) -> tuple[float, float, int]:
    """As ``_domain``, for whole numbers, with the number of bins. Many are a multiple of four, so that
    four equal steps end between bins."""
    start, end = int(least), int(np.ceil(most)) + 1
    if least < most and start <= end - start:
        start = 0
    if end - start <= FEW_BINS:
        return start, end, end - start
    low, bins, width = start, end - start, 1
    widths = (step * 10**power for power in count() for step in (1, 2, 5))
    while bins > _BINS or bins % 4:
        width = next(widths)
        low = start // width * width
        bins = -(-(end - low) // width)
        bins += -bins % 4
    return low, low + bins * width, bins


def _without_pauses(
    starts: NDArray[np.float64], ends: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], list[tuple[float, float]]]:
    """Times from 0 on with long idle stretches taken out, and where those were."""
    last_end = np.maximum.accumulate(ends)
    gaps = np.append(0.0, starts[1:] - last_end[:-1])
    idle = np.maximum(gaps, 0)
    at_work = float(last_end[-1] - starts[0] - idle.sum())
    longest = max(_SHORTEST_PAUSE_S, _LONGEST_IDLE * at_work)
    removed = np.where(idle > longest, idle, 0)
    shift = starts[0] + np.cumsum(removed)
    # No request crosses a pause, so its start and its end move by the same.
    found = np.flatnonzero(removed)
    cuts = [(float(starts[n] - shift[n]), float(removed[n])) for n in found]
    return starts - shift, ends - shift, cuts


def _integral(times: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """For each edge: the sum of (edge - time) over the sorted times before it."""
    sums = np.append(0.0, np.cumsum(times))
    before = np.searchsorted(times, edges, side="right")
    found: NDArray[np.float64] = before * edges - sums[before]
    return found


def _most(starts: NDArray[np.float64], ends: NDArray[np.float64]) -> int:
    """The most requests in flight at one time."""
    running = np.arange(1, len(starts) + 1) - np.searchsorted(np.sort(ends), starts, side="right")
    return int(running.max(initial=0))
