"""Parquet holds what the records say: it is compared with a table made record by record."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchkit.runs.layout import Layout
from batchkit.runs.table import schema_of
from batchkit.storage.log import read_lines
from batchkit.storage.score_store import SCORES
from batchkit.types import Record
from tests.support.command_line import batchkit
from tests.support.dry_runs import LOG, RUN, run, write_job
from tests.support.tables import expected_table

pytestmark = pytest.mark.slow

KEPT = ["kind", "n", "id", "a.b"]
SCORING = {"extract": "final-answer", "scorers": ["numeric"], "reference": "n"}
REQUIRED = {field.name for field in msgspec.structs.fields(Record) if field.required}
OK: dict[str, Any] = {
    "index": 0,
    "id": "q0",
    "status": "ok",
    "attempt": 1,
    "text": "yes",
    "finish_reason": "stop",
    "usage": {"prompt_tokens": 3, "completion_tokens": 2},
    "latency_s": 0.25,
    "finished_at": "2026-11-21T01:02:03.456Z",
    "error": None,
    "fields": {"kind": "tea", "n": "3"},
    "input_hash": "0123456789abcdef",
}
FAILED = OK | {
    "status": "failed",
    "text": None,
    "finish_reason": None,
    "usage": None,
    "error": {"kind": "media", "type": "MediaError", "message": "a.png: gone", "retryable": False},
}
CHOICES = [{"text": "a", "finish_reason": "stop", "logprobs": [{"token": "a", "logprob": -0.5}]}]


@pytest.fixture(autouse=True)
def _in_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_run()


def make_run(**tables: Any) -> None:
    """A finished run, whose log the tests replace."""
    Path("in.jsonl").write_text('{"q": "x", "kind": "tea", "n": "3", "id": "0", "a.b": "c"}\n')
    write_job(**{"engine": {"model": "tiny"}, "output": {"keep": KEPT}} | tables)
    assert run("--fresh").exit_code == 0
    (RUN / "checkpoint.json").unlink()


def line(record: dict[str, Any]) -> bytes:
    return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)


def exported() -> pa.Table:
    batchkit("export", "job.toml", "--parquet", "out.parquet", "--without-input").ok()
    return pq.read_table("out.parquet")


def assert_same() -> pa.Table:
    found = exported()
    assert found.schema.equals(schema_of(Layout.of(RUN, KEPT)))
    assert found.equals(expected_table(RUN))
    return found


RECORDS: dict[str, dict[str, Any]] = {
    "plain": OK,
    "failed": FAILED,
    "two choices": OK | {"choices": [*CHOICES, {"text": "", "finish_reason": None}]},
    "no choice": OK | {"choices": []},
    "choices of null": OK | {"choices": None},
    "prompt": OK | {"prompt": "<s>what?\n", "truncated_tokens": 12},
    "text is empty": OK | {"text": ""},
    "escapes": OK | {"text": '"\\/\b\f\n\r\t\u0000\u001b\u007f', "id": "\\u0041"},
    "unicode": OK | {"text": "é\u2028漢🙂\ufeff\u0301", "id": "ß", "fields": {"kind": "🙂"}},
    "text like json": OK | {"text": '{"index":5,"id":"x"}', "id": "2026-01-01", "prompt": "NaN"},
    "large numbers": OK | {"usage": {"prompt_tokens": 2**32 - 1, "completion_tokens": 2**32 - 1}},
    "small latency": OK | {"latency_s": 1e-7},
    "field is a huge number": OK | {"fields": {"n": 2**64 - 1}},
    "field is a fraction": OK | {"fields": {"n": 1e16}},
    "field is a list": OK | {"fields": {"n": [1, None, {"index": 3}]}},
    "field is an object": OK | {"fields": {"n": {"index": 3}, "kind": {}}},
    "field like a column": OK | {"fields": {"id": "mine", "a.b": "dot", "a": {"b": 1}}},
    "unknown keys": OK | {"later": [{"a": 1}], "fields": {"other": 5}},
    "usage comes last": {k: v for k, v in OK.items() if k != "usage"} | {"usage": OK["usage"]},
    "index comes last": {k: v for k, v in OK.items() if k != "index"} | {"index": 0},
    "only what a record must have": {k: v for k, v in OK.items() if k in REQUIRED},
}
LINES: dict[str, bytes] = {
    "key twice": line(OK).replace(b'"text":"yes"', b'"text":"no","text":"yes"'),
    "escaped pair": line(OK).replace(b"yes", b"\\ud83d\\ude00 \\u00e9 \\/"),
    "escaped key": line(OK).replace(b'"text"', b'"te\\u0078t"'),
    "spaces": json.dumps(OK, indent=1).replace("\n", " ").encode() + b" \r\n",
    "minus zero": line(OK).replace(b":0.25", b":-0.0"),
    "exponent": line(OK).replace(b":0.25", b":25E-2"),
}
ALL = {name: line(record) for name, record in RECORDS.items()} | LINES


def test_a_record_of_any_kind_is_exported_as_it_is_read() -> None:
    """Each at an index of its own, in any order, among plain ones."""
    rng = random.Random(0)
    plain = [line(OK), line(FAILED), line(OK | {"fields": {"n": 3}})]
    made = [*ALL.values(), *(rng.choice(plain) for _ in range(12_000))]
    indexes = rng.sample(range(20_000), len(made))
    with LOG.open("wb") as log:
        for index, one in zip(indexes, made, strict=True):
            found = re.sub(rb'"index": ?\d+', b'"index":%d' % index, one, count=1)
            assert orjson.loads(found)["index"] == index
            log.write(found)
        log.write(line(OK | {"index": 2**32 - 1}))
    assert assert_same()["index"].to_pylist() == [*sorted(indexes), 2**32 - 1]


def test_newest_record_counts_wherever_it_stands() -> None:
    rng = random.Random(1)
    with LOG.open("wb") as log:
        for number in range(9_000):
            made = rng.choice([OK, FAILED, OK | {"text": "long " * rng.randrange(300)}])
            log.write(line(made | {"index": rng.randrange(4_000), "attempt": number}))
    newest = {r.index: r.attempt for *_, r in read_lines(LOG) if r is not None}
    found = assert_same()
    assert (
        dict(zip(found["index"].to_pylist(), found["attempt"].to_pylist(), strict=True)) == newest
    )


def test_records_longer_than_a_block_of_the_log() -> None:
    texts = [
        letter * n for letter, n in zip("abcé", (3_000_000, 5, 20_000_000, 1_100_000), strict=True)
    ]
    LOG.write_bytes(b"".join(line(OK | {"index": 9 - n, "text": t}) for n, t in enumerate(texts)))
    assert assert_same()["text"].to_pylist() == texts[::-1]


# What is no record


def test_torn_last_line_is_passed_over() -> None:
    whole = line(OK | {"index": 1})
    for torn in (whole[:25], whole[:-1], whole[:10], b"{", b"\0" * 5000):
        LOG.write_bytes(line(OK | {"index": 2, "id": "q2"}) + line(OK) + torn)
        assert assert_same()["index"].to_pylist() == [0, 2], torn


ODD = line(OK | {"index": 600})
DAMAGE = [
    (b"yes", b"y\xff"),
    (b"yes", b"\xed\xa0\x80"),
    (b"yes", b"\\ud800"),
    (b"yes", b"y\x01"),
    (b"0123", b"012\xff"),
    (b":0.25", b":NaN"),
    (b":0.25", b":1e999"),
    (b':"yes"', b":yes"),
    (b"}\n", b"}}\n"),
    (b"}\n", b'}{"id":1}\n'),
    (b'"n":"3"}', b'"n":"3"'),
    (b'"index":600', b'"index":4294967296'),
    (ODD, b"\n\n"),
    (ODD, b'{"index":1}\n'),
    (ODD, b'{"index":"1","status":"ok"}\n{"index": 1}\n'),
    (ODD, b"\0" * 50 + ODD),
    (ODD, b'{"index":1,"id":"q1","sta' + ODD),
]


@pytest.mark.parametrize("behind", [b"", line(OK | {"index": 601})], ids=["last", "in the middle"])
def test_damaged_record_is_reported_with_its_place(behind: bytes) -> None:
    plain = b"".join(line(OK | {"index": n}) for n in range(600))
    for old, new in DAMAGE:
        LOG.write_bytes(plain + ODD.replace(old, new) + behind)
        args = ("export", "job.toml", "--parquet", "out.parquet", "--without-input")
        assert f"the record at byte {len(plain)} is damaged" in batchkit(*args).refused(1), new
        assert not list(Path().glob("*out.parquet*"))


# Scores


def test_later_scores_lie_over_those_of_the_records() -> None:
    make_run(scoring=SCORING)
    LOG.write_bytes(
        b"".join(
            line(OK | {"index": n, "input_hash": f"{n}", "prediction": p, "scores": {"numeric": s}})
            for n, (p, s) in enumerate([("3", 1.0), ("4", 0), (None, None), ("é", 0.5)] * 300)
        )
        + line(FAILED | {"index": 1200})
        + line(OK | {"index": 1201, "scores": {}, "prediction": ""})
        + line(OK | {"index": 1202, "scores": None})
        + line(OK | {"index": 1203, "scores": {"other": 1.0}})
    )
    found = assert_same()
    assert found["scores.numeric"].to_pylist()[:4] == [1.0, 0.0, None, 0.5]
    assert found["prediction"].to_pylist()[:4] == ["3", "4", None, "é"]
    keys = {"finished_at": OK["finished_at"], "prediction": "late"}
    made = [
        keys | {"index": n, "input_hash": f"{n}", "scores": {"numeric": 0.75}, "unscored": None}
        for n in (1, 3)
    ]
    made[1]["input_hash"] = "another record's"
    (RUN / SCORES).write_bytes(b"".join(map(line, made)))
    found = assert_same()
    assert found["scores.numeric"].to_pylist()[:4] == [1.0, 0.75, None, 0.5]
    assert found["prediction"].to_pylist()[:4] == ["3", "late", None, "é"]
