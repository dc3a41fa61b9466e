"""The rows that the page can show: which rows, and what it shows of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
from jinja2 import Environment
from jinja2 import TemplateError as JinjaError
from jinja2.meta import find_undeclared_variables

from batchkit.commands.report.figures import RunStats
from batchkit.commands.report.pictures import Pictures
from batchkit.commands.report.steps import StepsShown
from batchkit.config.masking import masked_text
from batchkit.config.tables import JobConfig, PromptTable
from batchkit.config.terminal import cut_in_the_middle
from batchkit.errors import BatchkitError, RowError
from batchkit.rendering.steps import Renderer
from batchkit.runs.inputs import InputRows, with_group
from batchkit.scoring import Scoring, kept_fields
from batchkit.scoring.metrics import group_name
from batchkit.storage.answers import answers_in_words, calls_in_words
from batchkit.storage.generations import Generations
from batchkit.storage.job_toml import job_of_run, without_masked
from batchkit.storage.lines import failure_kind
from batchkit.storage.score_store import read_scored, references_of
from batchkit.types import Row

MAX_ROWS = 20_000
MAX_FAILED = 5_000
_MAX_TEXT_BYTES = 14 * 2**20  # of all answers; if there is more, long ones are cut in the middle
_MAX_FIELD_BYTES = 7 * 2**20
_TEXT_LIMITS = (40_000, 16_000, 8_000, 4_000, 2_000, 1_000, 500)
_QUESTION_SHARE = 4  # times the space of another field
_LONG = 1_000  # characters: a longer field is a document, not a question
_SEED = 0
_ASKED = ("question", "query", "instruction", "prompt", "problem", "input", "text")


class Shown(NamedTuple):
    """The page's rows as JSON; ``notes`` say what it does not show, and why.

    ``question``: the position in ``field_names`` of the field that holds the question.
    """

    rows: list[dict[str, Any]]
    field_names: list[str]
    question: int | None
    notes: list[str]


def choose(stats: RunStats) -> set[int] | None:
    """Indexes of the rows that the page holds: failed ones first, then a seeded sample of the
    others. None means all of them."""
    if stats.rows <= MAX_ROWS:
        return None
    rng = np.random.default_rng(_SEED)
    failed = _sample(rng, stats.failed_rows, min(MAX_FAILED, MAX_ROWS))
    return failed | _sample(rng, stats.answered_rows, MAX_ROWS - len(failed))


def show(
    folder: Path, stats: RunStats, pictures: Pictures | None, generations: Generations
) -> Shown:
    """Reads the records again, and the input along with them if it still exists."""
    chosen, notes = choose(stats), []
    job = without_masked(job_of_run(folder))
    if chosen is not None:
        notes.append(
            f"The list below holds {len(chosen):,} of {stats.rows:,} rows: "
            f"{_part(len(chosen.intersection(stats.failed_rows)), len(stats.failed_rows))} and a"
            " random sample of the others. Table and charts are over all rows."
        )
    n_rows = stats.rows if chosen is None else len(chosen)
    limit = _text_limit(stats, n_rows)
    if max(stats.text_lengths, default=0) > limit:
        notes.append(f"Answers longer than {limit:,} characters are cut in the middle.")
    inputs = InputRows(job, chosen)
    steps = StepsShown(generations, limit, _MAX_TEXT_BYTES / max(1, n_rows))
    reader = _Reader(job, _scoring(job, notes), pictures, inputs.renderer, limit, n_rows, steps)
    details = [
        reader.read(record, inputs.row(record))
        for record in with_group(read_scored(folder), job)
        if chosen is None or record["index"] in chosen
    ]
    if inputs.problem:
        left = "only the kept fields are shown" if kept_fields(job) else "no fields are shown"
        notes.append(
            f"Where the input can't be read as it was, {left}: {masked_text(inputs.problem)}"
        )
    return _packed(details, job, notes, reader.field_limit)


class _Detail(NamedTuple):
    """What the page shows of a row; its fields as text, cut to the limit for the question."""

    row: dict[str, Any]
    fields: dict[str, str | None]


class _Reader(NamedTuple):
    """Makes what the page shows from a record and its row."""

    job: JobConfig
    scoring: Scoring | None
    pictures: Pictures | None
    renderer: Renderer | None
    text_limit: int
    n_rows: int
    steps: StepsShown

    @property
    def field_limit(self) -> int:
        return int(min(2_000, max(120, _MAX_FIELD_BYTES / max(1, self.n_rows) / 4)))

    def read(self, record: Mapping[str, Any], row: Row | None) -> _Detail:
        kept = record.get("fields") or {}
        fields = {**kept, **(row.fields if row else {})}
        usage, group_by = record.get("usage") or {}, self.job.scoring.group_by
        reference = self.scoring and self.scoring.reference(fields, record["id"])
        found = {
            "i": record["index"],
            "id": clip(str(record["id"]), 300),
            "ok": record["status"] == "ok",
            "kind": failure_kind(record),
            "group": group_name(kept.get(group_by)) if group_by else None,
            "text": _answer(record, self.text_limit),
            "reasoning": clipped(record.get("reasoning"), self.text_limit),
            "prediction": clipped(record.get("prediction"), self.text_limit),
            "reference": clipped(reference, 4_000),
            "scores": record.get("scores"),
            "unscored": record.get("unscored"),
            "error": _error(record.get("error") or {}),
            "finish": record.get("finish_reason"),
            "attempt": record.get("attempt"),
            "latency": record.get("latency_s"),
            "tokens": [usage["prompt_tokens"], usage["completion_tokens"]] if usage else None,
            "cut": record.get("truncated_tokens"),
            "prompt": clipped(record.get("prompt"), 4_000),
            "images": self._images(row),
            "steps": self.steps.read(record),
        }
        longest = self.field_limit * _QUESTION_SHARE
        return _Detail(
            {key: value for key, value in found.items() if value is not None},
            {str(name): clipped(value, longest) for name, value in fields.items()},
        )

    def _images(self, row: Row | None) -> list[int] | None:
        if row is None or row.error is not None or not self.pictures or self.renderer is None:
            return None
        with suppress(RowError):  # the record's own error explains it
            sources = self.renderer.image_sources(row)
            return [self.pictures.add(source) for source in sources] or None
        return None


def clip(text: str, limit: int) -> str:
    """``text``, or both its ends; always valid as UTF-8."""
    return cut_in_the_middle(text, limit).encode("utf-8", "replace").decode()


def clipped(text: Any, limit: int) -> str | None:
    return None if text is None else clip(_as_text(text), limit)


def _answer(record: Mapping[str, Any], limit: int) -> str | None:
    """The answer; all choices if there are several. None of a failed row."""
    answers = answers_in_words(record)
    if len(answers) < 2:
        return clip(answers[0], limit) if answers[0] or record.get("text") is not None else None
    texts = [clip(answer, limit // len(answers)) for answer in answers]
    names = [f"choice {n}" for n in range(1, len(texts) + 1)]
    if (chosen := record.get("selected")) is not None:
        names[chosen] += ", chosen"
    return "\n\n".join(f"[{name}]\n{text}" for name, text in zip(names, texts, strict=True))


def _error(error: Mapping[str, Any]) -> str | None:
    if not error:
        return None
    return clip(f"{error.get('type', '')}: {error.get('message', '')}", 4_000)


def _scoring(job: JobConfig, notes: list[str]) -> Scoring | None:
    if not job.scoring.is_on:
        return None
    try:
        return Scoring(job.scoring, references_of(job))
    except BatchkitError as error:
        notes.append(f"References are not shown: {error}")
        return None


def _packed(details: Sequence[_Detail], job: JobConfig, notes: list[str], limit: int) -> Shown:
    """Fields as a list in the order of ``field_names``, each cut to its share of the page."""
    names: dict[str, None] = {}
    for detail in details:
        names.update(dict.fromkeys(detail.fields))
    question = _question(details, job)
    for row, fields in details:
        row["fields"] = [
            text if (text := fields.get(name)) is None or name == question else clip(text, limit)
            for name in names
        ]
    shown_names = [clip(name, 100) for name in names]
    place = None if question is None else list(names).index(question)
    return Shown([detail.row for detail in details], shown_names, place, notes)


def _question(details: Sequence[_Detail], job: JobConfig) -> str | None:
    """The field that holds a row's question: of those that the template reads, the one whose name
    says so, else the longest that is still short enough for a question."""
    fields = next((detail.fields for detail in details if detail.fields), {})
    own = [name for name in ("messages", "body", "prompt") if name in fields]
    if job.rollout is not None:
        used = set(fields)
    else:
        prompt = job.steps[0].prompt if job.steps else job.prompt
        used = _used(prompt) & set(fields) if prompt.user or prompt.user_file else set(own[:1])
    lengths = {name: len(fields[name] or "") for name in used}
    by_name = (name for word in _ASKED for name in sorted(used, key=len) if word in name.lower())
    by_length = sorted(used, key=lambda name: (lengths[name] > _LONG, -lengths[name], name))
    return next(iter([*by_name, *by_length]), None)


def _used(prompt: PromptTable) -> set[str]:
    """Names that the user's template reads."""
    try:
        path = prompt.user_file
        text = prompt.user if path is None else Path(path).read_text(encoding="utf-8-sig")
        return find_undeclared_variables(Environment().parse(text or ""))
    except (OSError, ValueError, JinjaError):  # the note about the input explains it
        return set()


def _as_text(value: Any) -> str:
    """Chat messages as their texts; bytes as their number; everything else as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return f"({len(value):,} bytes)"
    if isinstance(value, Mapping) and isinstance(value.get("messages"), list):
        value = value["messages"]
    if isinstance(value, list) and value and all(_is_message(part) for part in value):
        return "\n\n".join(f"{part['role']}: {_said(part)}" for part in value)
    try:
        return orjson.dumps(value, default=_foreign, option=orjson.OPT_NON_STR_KEYS).decode()
    except orjson.JSONEncodeError:  # a number or a text that JSON can't represent
        return repr(value)


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and "role" in value
        and bool({"content", "tool_calls"} & set(value))
    )


def _said(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    text = "" if content is None else _content(content)
    try:
        calls = calls_in_words(message)
    except (AttributeError, TypeError):  # the row failed: its calls have another shape
        calls = [_as_text(message["tool_calls"])]
    return "\n".join([*filter(None, [text]), *calls])


def _content(content: Any) -> str:
    if not isinstance(content, list):
        return _as_text(content)
    texts = (part.get("text") if isinstance(part, Mapping) else None for part in content)
    return "\n".join(text if isinstance(text, str) else "[image]" for text in texts)


def _foreign(value: Any) -> str:
    if isinstance(value, bytes | bytearray | memoryview):
        return f"({len(value):,} bytes)"
    return str(value)


def _text_limit(stats: RunStats, n_rows: int) -> int:
    """The largest limit with which the answers of ``n_rows`` rows fit into the page's budget."""
    lengths = np.asarray(stats.text_lengths, dtype=np.int64)
    share = n_rows / max(1, len(lengths))
    for limit in _TEXT_LIMITS:
        if np.minimum(lengths, limit).sum() * share <= _MAX_TEXT_BYTES:
            return limit
    return _TEXT_LIMITS[-1]


def _sample(rng: np.random.Generator, rows: Sequence[int], size: int) -> set[int]:
    if len(rows) <= size:
        return set(rows)
    places = rng.choice(len(rows), size, replace=False, shuffle=False)
    return set(np.asarray(rows, dtype=np.int64)[places].tolist())


def _part(shown: int, total: int) -> str:
    return f"all {total:,} failed ones" if shown == total else f"{shown:,} of {total:,} failed ones"
