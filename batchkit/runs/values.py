"""What an index keeps of a record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Annotated, Any, Literal, NamedTuple
from zlib import crc32

import msgspec

from batchkit.scoring.metrics import group_name
from batchkit.storage.answers import answers_in_words
from batchkit.storage.lines import failure_kind, record_of

_UNKNOWN = "unknown"
DAMAGE = (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError)


class Values(NamedTuple):
    """``id``, ``made`` and ``answer`` are hashes; ``made`` is also that of the line of scores.jsonl that
    was made from the record. ``kind``: of its failure, "" for an answer. ``is_cut``: the answer ended at
    max_tokens; ``is_shortened``: the prompt was cut to fit.
    """

    row: int
    id: int
    made: int
    answer: int
    letters: int
    tokens: int
    prompt_tokens: int
    latency_s: float
    is_ok: bool
    is_cut: bool
    is_shortened: bool
    group: str | None
    kind: str
    scores: Mapping[str, float | None]


def values_of(record: Mapping[str, Any], group_by: str | None) -> Values:
    """Of a record that ``record_of`` accepts.

    Raises:
        one of ``DAMAGE``: an index in it is not one.
    """
    answer = "\n".join(answers_in_words(record))
    fields, kind = record.get("fields") or {}, failure_kind(record)
    usage = record.get("usage") or {}
    return Values(
        row=record["index"],
        id=hash_of(record["id"]),
        made=made_of(record.get("input_hash"), record.get("finished_at")),
        answer=crc32(answer.encode()),
        letters=len(answer),
        tokens=usage.get("completion_tokens", 0),
        prompt_tokens=usage.get("prompt_tokens", 0),
        latency_s=record.get("latency_s") or 0.0,
        group=None if group_by is None else group_name(fields.get(group_by)),
        kind="" if kind is None else kind or _UNKNOWN,
        is_ok=record["status"] == "ok",
        is_cut=record.get("finish_reason") == "length",
        is_shortened=bool(record.get("truncated_tokens")),
        scores=record.get("scores") or {},
    )


def reader(group_by: str | None) -> Callable[[bytes], Values]:
    """A function from a line of the log to its values; it raises one of ``DAMAGE`` if the line is not
    a record. Most lines have one text as their answer: of these it parses only what it needs."""
    names = [("group", Any, None)]
    fields = msgspec.defstruct("_Fields", names, rename={"group": group_by or ""}, gc=False)
    decode: Callable[[bytes], Any] = msgspec.json.Decoder(
        msgspec.defstruct("_Line", [("fields", fields | None, None)], bases=(_Plain,), gc=False)
    ).decode

    def read(raw: bytes) -> Values:
        try:
            line = decode(raw)
        except (msgspec.DecodeError, RecursionError):
            return _slowly(raw, group_by)
        if line.choices or line.tool_calls or line.label or line.score or line.embedding:
            return _slowly(raw, group_by)
        text, usage, error, fields = line.text or "", line.usage, line.error, line.fields
        is_ok, kind = line.status == "ok", ""
        if not is_ok:
            kind = (error and error.kind) or _UNKNOWN
        elif not text or text.isspace():
            kind = "empty"
        return Values(
            line.index,
            hash_of(line.id),
            made_of(line.input_hash, line.finished_at),
            crc32(text.encode()),
            len(text),
            0 if usage is None else usage.completion_tokens,
            0 if usage is None else usage.prompt_tokens,
            line.latency_s or 0.0,
            is_ok,
            line.finish_reason == "length",
            bool(line.truncated_tokens),
            None if group_by is None else group_name(fields.group if fields else None),
            kind,
            line.scores or {},
        )

    return read


_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
_NONE = msgspec.Raw(b"")


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: _Count = 0
    completion_tokens: _Count = 0


class _Error(msgspec.Struct, gc=False):
    kind: str | None = None


class _Plain(msgspec.Struct, gc=False):
    """A line; its ``fields``, of which only the group is wanted, are those of a subclass."""

    index: _Count
    id: str
    status: Literal["ok", "failed"]
    text: str | None = None
    usage: _Usage | None = None
    latency_s: float | None = None
    finish_reason: str | None = None
    truncated_tokens: int | None = None
    finished_at: str | None = None
    input_hash: str | None = None
    error: _Error | None = None
    scores: dict[str, float | None] | None = None
    fields: Any = None
    choices: msgspec.Raw = _NONE
    tool_calls: msgspec.Raw = _NONE
    label: msgspec.Raw = _NONE
    score: msgspec.Raw = _NONE
    embedding: msgspec.Raw = _NONE


def _slowly(raw: bytes, group_by: str | None) -> Values:
    record = record_of(raw)
    if record is None:
        raise ValueError("not a record")
    return values_of(record, group_by)


def hash_of(row_id: str) -> int:
    return int.from_bytes(blake2b(row_id.encode(), digest_size=8).digest(), "little")


def made_of(input_hash: str | None, finished_at: str | None) -> int:
    return crc32(f"{input_hash} {finished_at}".encode())
