"""Any answer → record → line → read back equal; and what a kept field may be."""

from __future__ import annotations

import enum
import json
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from batchkit.config.tables import JobConfig
from batchkit.config.terminal import MAX_LINE
from batchkit.engines.openai.api import ShapeError
from batchkit.engines.openai.chat import Chat
from batchkit.errors import ServerError
from batchkit.execution.completions import to_record
from batchkit.execution.start import Start
from batchkit.storage.checkpoint import Totals
from batchkit.storage.ledger import line_of
from batchkit.storage.lines import record_in, record_of, whole_record
from batchkit.storage.log import RESULTS
from batchkit.storage.plain_json import parsed
from batchkit.storage.schema import choice_of, error_of
from batchkit.types import Completion, Record, Request, Row, Usage
from tests.support.records import indexes, record, write

START = Start.of(JobConfig(engine={"kind": "dry-run"}))


def test_what_a_server_says_has_a_limit_in_a_record() -> None:
    """Of a whole message, the limit is in tests/config/test_secrets.py."""
    error = ServerError("500 " + "no " * 10_000)
    assert len(error_of(error).message) <= MAX_LINE
    assert len(choice_of("", "stop" * 1_000, None).finish_reason or "") <= MAX_LINE


TEXT = st.text(st.characters(exclude_categories=()), max_size=20)  # lone surrogates, too
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | TEXT
JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3)
)
COUNTS = st.sampled_from([-1, 0, 7, 2**32 - 1, 2**32, 2**63, 2**64, True, 1.0]) | LEAVES


def one_of(**shape: Any) -> st.SearchStrategy[Any]:
    """An object of that shape, in which anything may be missing."""
    return st.fixed_dictionaries({}, optional=shape)


TOKEN = one_of(
    token=TEXT, logprob=st.floats() | JSON, top_logprobs=st.lists(one_of(token=TEXT, logprob=JSON))
)
LOGPROBS = one_of(
    content=st.lists(TOKEN, max_size=3) | JSON,
    tokens=st.lists(TEXT, max_size=3),
    token_logprobs=st.lists(st.floats(), max_size=3),
    top_logprobs=st.lists(st.dictionaries(TEXT, st.floats(), max_size=2), max_size=3),
)
TOOL_CALL = one_of(id=TEXT | JSON, function=one_of(name=TEXT | JSON, arguments=TEXT | JSON))
MESSAGE = one_of(
    content=TEXT | JSON | st.lists(one_of(type=st.just("text"), text=TEXT)),
    reasoning=TEXT | JSON,
    tool_calls=st.lists(TOOL_CALL, max_size=2) | JSON,
)
CHOICE = one_of(
    index=JSON,
    text=TEXT,
    message=MESSAGE,
    finish_reason=st.sampled_from(["stop", None]) | JSON,
    logprobs=LOGPROBS | JSON,
)
USAGE = JSON | one_of(
    prompt_tokens=COUNTS,
    completion_tokens=COUNTS,
    completion_tokens_details=one_of(reasoning_tokens=COUNTS) | JSON,
)
GOOD_TOKEN = st.fixed_dictionaries(
    {"token": TEXT, "logprob": st.floats(max_value=0)},
    optional={"top_logprobs": st.lists(TOKEN, max_size=2)},
)
GOOD_CHOICE = st.fixed_dictionaries(  # an answer, with anything beside its text
    {"text": TEXT},
    optional={
        "finish_reason": st.sampled_from(["stop", None]) | JSON,
        "logprobs": one_of(content=st.lists(GOOD_TOKEN, max_size=3)) | LOGPROBS | JSON,
    },
)
GOOD = st.fixed_dictionaries(
    {"choices": st.lists(GOOD_CHOICE, min_size=1, max_size=3)}, optional={"usage": USAGE}
)
ANSWERS = GOOD | JSON | one_of(choices=st.lists(CHOICE, max_size=3) | JSON, usage=USAGE)
ROW = Row(3, "q3", {})
CHAT = Chat(JobConfig(engine={"kind": "dry-run"}), ())


def completion(answer: Any, row: Row = ROW) -> Completion | None:
    try:
        return CHAT.completion_of(Request(row, [], None, {}, "0" * 16), answer, 0.5, 1)
    except ShapeError:
        return None


def read_back(made: Record) -> dict[str, Any]:
    """The line of ``made`` as both readers have it; it can be counted, too."""
    line = line_of(made)
    found = record_of(line.raw)
    assert found is not None
    assert whole_record(line.raw, Path(RESULTS), 0) == found
    totals = Totals()
    totals.add(line.record)
    assert totals.is_settled(made.index)
    return found


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(ANSWERS, TEXT)
def test_any_answer_is_read_back_as_it_was_written(answer: Any, row_id: str) -> None:
    sent = json.dumps(answer).encode()  # as a server in Python sends it: with NaN and surrogates
    done = completion(parsed(sent), structs.replace(ROW, id=row_id))
    if done is None:
        return
    made = to_record(START, done)
    written = {"id": row_id.encode("utf-8", "replace").decode(), "fields": {}}
    assert record_in(line_of(made).raw) == structs.replace(made, **written)
    read_back(made)


@pytest.mark.parametrize("usage", [Usage(-1, 2), Usage(2, 2**32), Usage(2**63, 2**64)])
def test_what_no_engine_can_have_counted_is_not_written(usage: Usage) -> None:
    done = completion({"choices": [{"text": "yes"}]})
    assert done is not None
    made = to_record(START, structs.replace(done, usage=usage, latency_s=float("nan")))
    found = read_back(made)
    assert (found["usage"], found["latency_s"]) == (None, 0)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    ),
    st.binary() | st.integers(2**64) | st.sets(st.integers()) | st.datetimes() | TEXT,
)
def test_kept_fields_are_read_back(plain: Any, odd: Any) -> None:
    """What JSON has is read back equal, whatever stands beside it."""
    found = read_back(record(3, fields={"plain": plain, "odd": odd}))
    assert found["fields"]["plain"] == plain


class Level(enum.Enum):
    LOW = "low"


class Broken:
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Colour:
    def __str__(self) -> str:
        return "red"


NEST: Any = "leaf"
for _ in range(300):
    NEST = [NEST]

VALUES: dict[str, tuple[Any, Any]] = {
    "bytes": (b"\x00\xff", "AP8="),
    "infinity": (float("-inf"), None),
    "an integer past 64 bits": (2**70, str(2**70)),
    "the largest that JSON readers agree on": (2**64 - 1, 2**64 - 1),
    "an integer of 10,000 digits": (1 << 33_220, "(int)"),
    "a lone surrogate": ("a\ud800b", "a?b"),
    "a lone surrogate in a key": ({"a\ud800": 1}, {"a?": 1}),
    "newlines and NUL": ("a\nb\r\n\u2028\x85\0", "a\nb\r\n\u2028\x85\0"),
    "datetime": (datetime(2026, 1, 2, 3, tzinfo=UTC), "2026-01-02T03:00:00+00:00"),
    "date": (date(2026, 1, 2), "2026-01-02"),
    "time": (time(1, 2, 3), "01:02:03"),
    "UUID": (UUID(int=5), "00000000-0000-0000-0000-000000000005"),
    "enum": (Level.LOW, "low"),
    "Decimal": (Decimal("1.50"), "1.50"),
    "numpy's float": (np.float64(1.5), 1.5),
    "numpy's integer": (np.int64(-3), -3),
    "numpy's truth": (np.bool_(True), True),
    "numpy's array": (np.arange(3), [0, 1, 2]),
    "set": ({5}, [5]),
    "true, a number and a tuple as keys": (
        {True: 1, None: 2, 3: 4, (1, 2): 5},
        {"true": 1, "null": 2, "3": 4, "(1, 2)": 5},
    ),
    "NaN beside a foreign object": ({"c": [float("nan"), Colour()]}, {"c": [None, "red"]}),
    "without a text": (Broken(), "(Broken)"),
}


@pytest.mark.parametrize("beside", [1, b"bytes"], ids=["alone", "beside bytes"])
@pytest.mark.parametrize(("value", "stored"), VALUES.values(), ids=VALUES)
def test_a_value_is_stored_alike_whatever_stands_beside_it(
    value: Any, stored: Any, beside: Any
) -> None:
    found = read_back(record(3, fields={"v": value, "w": beside}))
    assert found["fields"]["v"] == stored


def test_deeply_nested_value_does_not_stop_the_run(tmp_path: Path) -> None:
    write(tmp_path, record(0, fields={"v": NEST}), record(1))
    assert indexes(tmp_path) == [0, 1]


@pytest.mark.parametrize("text", ["a\ud800b", "\0", "\u2028\n", "é🙂", ""])
def test_any_text_is_one_line(text: str) -> None:
    made, kept = structs.replace(record(1, text), id=text), text.replace("\ud800", "?")
    assert line_of(made).raw.count(b"\n") == 1
    found = read_back(made)
    assert (found["text"], found["id"]) == (kept, kept)


WHOLE = orjson.loads(line_of(record(3)).raw)
FAULTS = {
    "status": "XX",
    "id": 5,
    "index": True,
    "attempt": "1",
    "text": ["a"],
    "usage": {"prompt_tokens": 3},
    "usage.prompt_tokens": {"prompt_tokens": -1, "completion_tokens": 2},
    "latency_s": "long",
    "error": "it broke",
    "fields": [1],
    "choices": {"text": "a"},
    "scores": {"f1": "good"},
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_line_with_a_wrong_value_is_no_record_and_is_named(name: str) -> None:
    raw = orjson.dumps(WHOLE | {name.split(".")[0]: FAULTS[name]}) + b"\n"
    assert record_of(raw) is None
    with pytest.raises(
        Exception, match=r"results\.jsonl: the record at byte 70 is damaged"
    ) as stop:
        whole_record(raw, Path("run", RESULTS), 70)
    assert f"`$.{name}" in str(stop.value)
    assert "`batchkit verify --repair run`" in str(stop.value)
