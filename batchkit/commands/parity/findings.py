"""The result of ``parity``, as text and as JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from batchkit.commands.parity.differences import Difference, Part
from batchkit.commands.parity.sides import EngineSide
from batchkit.errors import EmptyTextError
from batchkit.scoring.metrics import markdown

SHOWN = 10
_BEFORE, _SHOWN_CHARACTERS = 20, 72


class Answers(NamedTuple):
    """One engine's records, by row index. ``seconds``: time for all rows, without loading the model."""

    side: EngineSide
    records: Mapping[int, Mapping[str, Any]]
    versions: Mapping[str, str]
    seconds: float

    def has_failed(self, index: int) -> bool:
        """Return True if the row has no answer to compare. An empty answer is compared, although a run counts it as
        failed."""
        error = self.records[index]["error"]
        return error is not None and error["kind"] != EmptyTextError.kind

    @property
    def failed(self) -> int:
        return sum(map(self.has_failed, self.records))

    @property
    def inputs(self) -> dict[int, tuple[str, str]]:
        """The id and the input hash of each row, by index."""
        return {index: (r["id"], r["input_hash"]) for index, r in self.records.items()}

    @property
    def rows_per_s(self) -> float:
        return len(self.records) / self.seconds if self.seconds else 0.0

    @property
    def left_out(self) -> list[str]:
        """The keys of the job that have no effect on this side."""
        sampling = [f"sampling.{name}" for name in sorted(self.side.greedy.left_out)]
        return [*self.side.left_out, *sampling]


@dataclass(frozen=True, slots=True)
class RowFailure:
    """A row that failed on one engine and was answered by the other."""

    index: int
    id: str
    side: str
    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class ParityResult:
    """The result of ``parity``. ``differences``: the largest gap first. ``failures``: rows that failed on one engine
    only."""

    sides: tuple[Answers, Answers]
    rows: int
    equal: int
    differences: Sequence[Difference]
    failures: Sequence[RowFailure]
    failed_on_both: int
    tie: float

    @property
    def answered(self) -> int:
        """The number of rows that both engines answered."""
        return self.equal + len(self.differences)

    @property
    def ties(self) -> int:
        return sum(found.is_tie(self.tie) for found in self.differences)

    @property
    def exit_code(self) -> int:
        """The exit code: 3 if the answers differ by more than ties, or if no row was answered by both engines."""
        is_sound = self.answered and self.ties == len(self.differences) and not self.failures
        return 0 if is_sound else 3

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "equal": self.equal,
            "differ": len(self.differences),
            "ties": self.ties,
            "tie_below": self.tie,
            "share_equal": self.equal / self.answered if self.answered else None,
            "failed": {found.side.name: found.failed for found in self.sides},
            "failed_on_both": self.failed_on_both,
            "failed_on_one_side": [asdict(found) for found in self.failures],
            "sides": {
                found.side.name: {
                    "kind": found.side.kind,
                    "model": found.side.job.engine.model,
                    "versions": dict(found.versions),
                    "rows_per_s": round(found.rows_per_s, 3),
                    "left_out": found.left_out,
                }
                for found in self.sides
            },
            "differences": [
                {**asdict(found), "tie": found.is_tie(self.tie)} for found in self.differences
            ],
        }

    def to_text(self) -> str:
        parts = [
            markdown(["side", *_HEADS], [_cells(found, self.rows) for found in self.sides]),
            "",
        ]
        parts += self._sentences()
        for found in self.differences[:SHOWN]:
            parts += ["", *self._shown(found)]
        if len(self.differences) > SHOWN:
            parts += ["", f"… and {len(self.differences) - SHOWN:,} more (--json has them all)"]
        return "\n".join(parts)

    def _sentences(self) -> Iterator[str]:
        if not self.answered:
            yield "no row was answered on both sides: nothing was compared"
        else:
            share = self.equal / self.answered
            yield f"equal: {self.equal:,} of {self.answered:,} rows that both answered ({share:.1%})"
        if self.differences:
            yield self._differing()
        if changed := sum(found.has_other_prompt for found in self.differences):
            yield (
                f"{changed:,} of those had prompts of different lengths on the two sides: first check the"
                " chat template, the images' size and max_model_len, then the model"
            )
        if self.failed_on_both:
            yield f"failed on both sides: {self.failed_on_both:,}"
        for found in self.failures[:SHOWN]:
            message = " ".join(found.message.split())
            yield f"failed on {found.side} alone: {_row(found)}: {found.kind}: {message}"
        if len(self.failures) > SHOWN:
            yield f"… and {len(self.failures) - SHOWN:,} more failed on one side alone"
        for answers in self.sides:
            if answers.left_out:
                yield f"left out for {answers.side.name}: {', '.join(answers.left_out)}"

    def _differing(self) -> str:
        median = statistics.median(found.position for found in self.differences)
        n, unit = len(self.differences), self.differences[0].unit
        differing = f"differ: {n:,}, at the median from {unit} {median:g} on (counted from 0)"
        unknown = sum(found.gap is None for found in self.differences)
        if unknown == n:
            return f"{differing}; not both gave logprobs, so the gaps are unknown"
        return f"{differing}; {self.ties:,} of them ties (gap below {self.tie:g})" + (
            f", {unknown:,} with a gap that is not known" if unknown else ""
        )

    def _shown(self, found: Difference) -> Iterator[str]:
        gap = "unknown" if found.gap is None else f"{found.gap:.4f}"
        least = " or more" if found.gap_is_least else ""
        tie = " (a tie)" if found.is_tie(self.tie) else ""
        yield f"{_row(found)}, {found.unit} {found.position}, gap {gap}{least}{tie}"
        for name, part in (("a", found.a), ("b", found.b)):
            yield f"  {name}: {_chosen(part)}{_continuation(part)}"


_HEADS = ("engine", "model", "rows", "failed", "rows/s")


def _cells(found: Answers, rows: int) -> list[str]:
    kind = found.side.kind
    engine = f"{kind} {found.versions.get(kind, '')}".rstrip()
    counts = f"{rows:,}", f"{found.failed:,}", f"{found.rows_per_s:,.1f}"
    return [found.side.name, engine, found.side.job.engine.model or "–", *counts]


def _row(found: Difference | RowFailure) -> str:
    return f"row {found.index} (id {found.id})"


def _chosen(part: Part) -> str:
    """Return an engine's token at the difference with its logprob, and the logprob it gave to the other engine's
    token."""
    if part.logprob is None:
        return ""
    other = "not among its likeliest" if part.other_logprob is None else f"{part.other_logprob:.4f}"
    return f"{json.dumps(part.token, ensure_ascii=False)} {part.logprob:.4f}, the other {other}: "


def _continuation(part: Part) -> str:
    """Return the answer's text around the difference, as one line."""
    start = max(0, part.begins - _BEFORE)
    line = " ".join(part.text[start : start + _SHOWN_CHARACTERS].split())
    before = "…" if start else ""
    after = "…" if start + _SHOWN_CHARACTERS < len(part.text) else f" [{part.finish_reason}]"
    return f"{before}{line}{after}"
