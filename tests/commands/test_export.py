"""Exports hold the newest record of each row, in the order of the input, and read back equal."""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace

from batchkit.storage.ledger import Ledger, line_of
from batchkit.types import Choice, ErrorInfo, Record, Usage, line_of_choice
from tests.support.command_line import Ended, batchkit
from tests.support.dry_runs import LOG, RUN, run, write_job, write_rows
from tests.support.records import record
from tests.support.rows import read_jsonl

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


COLUMNS = [
    *("index", "id", "status", "attempt", "text", "finish_reason", "prompt_tokens"),
    *("completion_tokens", "latency_s", "finished_at", "error_kind", "error_type"),
    *("error_message", "choices", "prompt", "truncated_tokens"),
]
OK = record(0)
FAILED = replace(
    OK,
    status="failed",
    text=None,
    finish_reason=None,
    usage=None,
    error=ErrorInfo("media", "MediaError", "a.png: missing", False),
)


def columns(*fields: str) -> list[str]:
    """With those of the input."""
    return [*COLUMNS[:2], *fields, *COLUMNS[2:]]


def export(*args: str) -> Ended:
    return batchkit("export", *args).ok()


def run_rows(rows: list[dict[str, Any]], **output: Any) -> None:
    """A run of the dry-run engine over ``rows``."""
    write_rows(rows)
    write_job(engine={"model": "tiny"}, output=output, run={"check_rows": 0})
    assert run("--fresh").exit_code in (0, 3)


def run_of(*records: Record, keep: list[str] | None = None) -> None:
    """A run whose ledger holds ``records``, as an engine that can do more would have left it."""
    run_rows([{"q": "x", "kind": "none"}], keep=keep or [])
    for file in (LOG, RUN / "checkpoint.json"):
        file.unlink()
    ledger = Ledger(RUN)
    for one in records:
        ledger.write([line_of(one)])
    ledger.close()


# The same run in every format

CHOICES = [
    line_of_choice(Choice("a", "stop", [{"token": "a", "logprob": -0.5}])),
    line_of_choice(Choice("b", "length")),
]
KEEP = ["kind", "n", "deep", "id", "text", "fields.text", "kind"]
FIELDS = {"kind": "é,\n\"'", "n": 3, "deep": {"a": [1, None]}, "id": "mine", "text": "original"}
GOLDEN = [
    replace(OK, index=2, id="c", text="c, first"),
    replace(FAILED, index=0, id="a"),
    replace(OK, index=1, id="b"),
    replace(OK, index=2, id="c", text="c, again", attempt=2, choices=CHOICES),
    replace(OK, index=0, id="a", text="a, again", attempt=2, fields=FIELDS),
    replace(FAILED, index=1, id="b", attempt=2),
]
NEWEST = {
    "id": ["a", "b", "c"],
    "status": ["ok", "failed", "ok"],
    "text": ["a, again", None, "c, again"],
    "attempt": [2, 2, 2],
    "finish_reason": ["stop", None, "stop"],
    "prompt_tokens": [3, None, 3],
    "error_kind": [None, "media", None],
    "error_type": [None, "MediaError", None],
    "error_message": [None, "a.png: missing", None],
    "kind": ["é,\n\"'", None, None],
    "n": ["3", None, None],
    "deep": ['{"a":[1,null]}', None, None],
    "fields.id": ["mine", None, None],
    "fields.text": ["original", None, None],
    "fields.fields.text": [None, None, None],
}


def test_each_format_has_the_newest_records_in_the_order_of_the_input() -> None:
    run_of(*GOLDEN, keep=KEEP)
    with LOG.open("ab") as log:
        log.write(b'{"index":7,"id":"h","status":"o')  # the run was interrupted
    (RUN / "checkpoint.json").unlink()
    export("job.toml", "--parquet", "--csv", "--jsonl", "--without-input")
    table = pq.read_table(RUN / "results.parquet")
    assert table.column_names == columns(*[*NEWEST][9:])
    assert {name: table[name].to_pylist() for name in NEWEST} == NEWEST
    choices = [None, None, CHOICES]
    assert [one and json.loads(one) for one in table["choices"].to_pylist()] == choices
    with (RUN / "results.csv").open(newline="") as file:
        rows = [*csv.DictReader(file)]
    assert [*rows[0]] == table.column_names
    for name, values in NEWEST.items():
        assert [row[name] for row in rows] == ["" if v is None else str(v) for v in values], name
    lines = LOG.read_bytes().splitlines(keepends=True)
    newest = b"".join(lines[number] for number in (4, 5, 3))
    assert (RUN / "results.newest.jsonl").read_bytes() == newest


# Read back

NASTY = ["", " ", "NA", "a,b", 'say "x"', "two\nlines", "\r\n", "=1+1", "é🙂\u2028", "tab\t", "007"]


def test_pandas_reads_parquet_and_csv_back_equal() -> None:
    answers = [
        replace(OK, index=n, id=f"q{n}", text=text, fields={"kind": text, "q": None})
        for n, text in enumerate(NASTY)
    ]
    run_of(*answers, replace(FAILED, index=99, id="last"), keep=["kind", "q"])
    export("job.toml", "--parquet", "--csv", "--without-input")
    table = pd.read_parquet(RUN / "results.parquet")
    assert table["text"][:-1].tolist() == table["kind"][:-1].tolist() == NASTY
    assert table["text"].isna().tolist() == [False] * len(NASTY) + [True]
    as_text = pd.read_csv(RUN / "results.csv", dtype=str, keep_default_na=False)
    # CSV has one word for null and for the empty text.
    expected = table.astype(object).where(table.notna(), "")
    for column in ("id", "status", "text", "kind", "error_kind", "error_message", "finished_at"):
        assert as_text[column].tolist() == expected[column].tolist(), column
    for column in ("index", "attempt", "latency_s"):
        assert as_text[column].tolist() == [str(value) for value in table[column]], column
    assert pd.read_csv(RUN / "results.csv")["prompt_tokens"].tolist()[:-1] == [3] * len(NASTY)


def test_run_without_a_record_exports_columns_and_no_row() -> None:
    run_of(keep=["kind"])
    export("job.toml", "--parquet", "--csv", "--jsonl", "--openai")
    table = pq.read_table(RUN / "results.parquet")
    assert (table.num_rows, table.column_names) == (0, columns("kind"))
    assert (RUN / "results.csv").read_text().strip() == ",".join(columns("kind"))
    for name in ("results.newest.jsonl", "results.openai.jsonl", "results.openai.errors.jsonl"):
        assert (RUN / name).read_bytes() == b""


# OpenAI's batch format

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def chat_bodies() -> list[Any]:
    """The answers as the ``openai`` package reads them."""
    chat = pytest.importorskip("openai.types.chat")
    export("job.toml", "--openai")
    lines = read_jsonl(RUN / "results.openai.jsonl")
    return [chat.ChatCompletion.model_validate(line["response"]["body"]) for line in lines]


def test_openai_output_and_errors_match_the_batch_format() -> None:
    run_of(replace(OK, id="custom-a"), replace(FAILED, index=2, id="custom-c"))
    export("job.toml", "--openai")
    (answered,) = read_jsonl(RUN / "results.openai.jsonl")
    message = {"role": "assistant", "content": "yes", "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    assert answered == {
        "id": "batch_req_0",
        "custom_id": "custom-a",
        "response": {
            "status_code": 200,
            "request_id": "req_0",
            "body": {
                "id": "chatcmpl-0",
                "created": 1795222923,
                "model": "tiny",
                "object": "chat.completion",
                "choices": [choice],
                "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
            },
        },
        "error": None,
    }
    assert read_jsonl(RUN / "results.openai.errors.jsonl") == [
        {
            "id": "batch_req_2",
            "custom_id": "custom-c",
            "response": None,
            "error": {"code": "media", "message": "a.png: missing"},
        }
    ]


@pytest.mark.parametrize(
    ("changes", "status", "reason", "output"),
    [
        ({}, "completed", None, [("message", "yes")]),
        ({"finish_reason": "length"}, "incomplete", "max_output_tokens", [("message", "yes")]),
        ({"finish_reason": "content_filter"}, "incomplete", "content_filter", [("message", "yes")]),
        ({"reasoning": "hm"}, "completed", None, [("reasoning", "hm"), ("message", "yes")]),
        ({"text": "", "tool_calls": [CALL]}, "completed", None, [("function_call", "f")]),
        ({"choices": [{"text": "a"}, {"text": "b"}], "selected": 1}, "completed", None,
         [("message", "b")]),
        ({"usage": None}, "completed", None, [("message", "yes")]),
    ],
)  # fmt: skip
def test_a_line_for_responses_is_exported_as_a_response(
    changes: dict[str, Any], status: str, reason: str | None, output: list[tuple[str, str]]
) -> None:
    responses = pytest.importorskip("openai.types.responses")
    run_of(replace(OK, endpoint="responses", **changes))
    export("job.toml", "--openai")
    (line,) = read_jsonl(RUN / "results.openai.jsonl")
    body = responses.Response.model_validate(line["response"]["body"], strict=True)
    assert (body.id, body.object, body.created_at) == ("resp-0", "response", 1795222923)
    assert (body.status, body.model) == (status, "tiny")
    assert (body.incomplete_details and body.incomplete_details.reason) == reason
    found = {
        "message": lambda item: item.content[0].text,
        "reasoning": lambda item: item.content[0].text,
        "function_call": lambda item: item.name,
    }
    assert [(item.type, found[item.type](item)) for item in body.output] == output
    assert body.output_text == "".join(text for kind, text in output if kind == "message")
    if body.usage is not None:
        counts = body.usage.input_tokens, body.usage.output_tokens, body.usage.total_tokens
        assert counts == (3, 2, 5)
    assert (body.usage is None) == ("usage" in changes)


def test_a_line_for_completions_is_exported_as_a_text_completion() -> None:
    completion = pytest.importorskip("openai.types").Completion
    token = {"token": "é", "logprob": -0.5, "top_logprobs": [{"token": "e", "logprob": -1.0}]}
    choices = [Choice("a", "stop", [token]), Choice("c", "abort")]
    run_of(
        replace(OK, endpoint="completions"),
        replace(OK, index=1, endpoint="completions", choices=[*map(line_of_choice, choices)]),
    )
    export("job.toml", "--openai")
    lines = read_jsonl(RUN / "results.openai.jsonl")
    bodies = [completion.model_validate(line["response"]["body"], strict=True) for line in lines]
    assert [[choice.text for choice in body.choices] for body in bodies] == [["yes"], ["a", "c"]]
    assert [choice.finish_reason for choice in bodies[1].choices] == ["stop", "length"]
    logprobs = bodies[1].choices[0].logprobs
    found = logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs
    assert found == (["é"], [-0.5], [{"e": -1.0}])
    assert (bodies[0].object, bodies[0].usage.total_tokens) == ("text_completion", 5)


def test_finish_reasons_that_openai_lacks_are_beside_ones_that_it_has() -> None:
    wanted = {
        "stop": ("stop", ...),
        "content_filter": ("content_filter", ...),
        "abort": ("length", "abort"),
        "repetition": ("length", "repetition"),
        "eos_token": ("stop", "eos_token"),
        None: ("stop", None),
    }
    run_of(*(replace(OK, index=n, finish_reason=name) for n, name in enumerate(wanted)))
    found = [body.choices[0] for body in chat_bodies()]
    native = [choice.model_extra.get("native_finish_reason", ...) for choice in found]
    reasons = [choice.finish_reason for choice in found]
    assert [*zip(reasons, native, strict=True)] == [*wanted.values()]


def test_choices_with_their_logprobs_are_exported() -> None:
    tops = [{"token": None, "logprob": float("-inf")}, {"token": "é", "logprob": -1.0}]
    token = {"token": "é", "logprob": -0.5, "top_logprobs": tops}
    choices = [Choice("a", "stop", [token]), Choice("", "stop", []), Choice("c", "length")]
    several = replace(OK, text="a", choices=[*map(line_of_choice, choices)], usage=Usage(10, 7))
    run_of(several, replace(OK, index=1, usage=None), replace(several, index=2, selected=2))
    first, second, third = chat_bodies()
    assert [(choice.index, choice.message.content) for choice in third.choices] == [(0, "c")]
    assert [choice.message.content for choice in first.choices] == ["a", "", "c"]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert (first.usage.total_tokens, second.usage) == (17, None)
    (token,) = first.choices[0].logprobs.content
    assert (token.token, token.bytes, token.logprob) == ("é", None, -0.5)
    assert [(top.token, top.logprob) for top in token.top_logprobs] == [("", -9999.0), ("é", -1.0)]


def test_tool_calls_and_reasoning_are_exported_as_vllms_server_sends_them() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    called = replace(OK, text="", finish_reason="tool_calls", tool_calls=[call])
    chosen = [line_of_choice(Choice("b", "stop", reasoning="c"))]
    no_id = [{**call, "id": None}, call, {**call, "id": None}]
    run_of(
        replace(called, usage=Usage(3, 9, 4), reasoning="so"),
        replace(called, index=1, text="one moment", choices=chosen),
        replace(OK, index=2, text="", reasoning="hm"),
        replace(called, index=3, tool_calls=no_id),
    )
    bodies = chat_bodies()
    first, second, third, fourth = [body.choices[0].message for body in bodies]
    assert (first.content, first.reasoning) == (None, "so")
    assert [call.model_dump() for call in first.tool_calls] == [call]
    assert bodies[0].choices[0].finish_reason == "tool_calls"
    assert bodies[0].usage.completion_tokens_details.reasoning_tokens == 4
    assert bodies[0].usage.total_tokens == 12
    assert "reasoning_tokens" not in bodies[0].usage.model_extra
    assert (second.content, second.reasoning, second.tool_calls) == ("b", "c", None)
    assert bodies[1].usage.completion_tokens_details is None
    assert (third.content, third.reasoning) == ("", "hm")
    assert [call.id for call in fourth.tool_calls] == ["call_0", "a", "call_2"]


# The command


def test_export_prints_rows_sizes_and_ratio() -> None:
    run_rows([{"q": "x"}] * 50)
    done = export("job.toml", "--parquet", "out.parquet")
    size, whole = Path("out.parquet").stat().st_size, LOG.stat().st_size
    assert done.stdout == (
        f"out.parquet: 50 rows, {size:,} bytes, {size / whole:.2f} × the {whole:,} of results.jsonl\n"
    )
    found = json.loads(export("job.toml", "--csv", "out.csv", "--json").stdout)
    expected = {"path": "out.csv", "format": "csv", "rows": 50, "source_bytes": whole}
    assert found | expected == found
    assert found["bytes"] == Path("out.csv").stat().st_size
    assert found["ratio"] == pytest.approx(found["bytes"] / whole, abs=1e-4)


def test_the_run_may_be_left_out_the_format_not() -> None:
    run_rows([{"q": "x"}])
    assert export("--parquet").stderr == "batchkit: output/a\n"
    for run_or_job in ("output/a", "job.toml"):  # neither is a path to write to
        (RUN / "results.parquet").unlink()
        export("--parquet", run_or_job)
        assert (RUN / "results.parquet").exists()
    for args, named in ((["job.toml"], "--parquet"), (["nowhere", "--csv"], "nowhere")):
        done = batchkit("export", *args)
        assert (done.exit_code, named in done.stderr) == (2, True)


REFUSED = [
    ("--jsonl", "output/a/results.jsonl"),
    ("--parquet", "output/a/link.jsonl"),
    ("--csv", "output/a/hard.jsonl"),
    ("--openai", "output/a/sub/../results.jsonl"),
    ("--jsonl", "input.errors.jsonl"),
    ("--openai", "input.jsonl"),  # its second file
    ("--realhit", "as-input"),  # its second file
    ("--openai", "hard.jsonl"),  # its second file
    ("--jsonl", "output/a/checkpoint.json"),
    ("--jsonl", "output/a/metrics.jsonl"),
    ("--jsonl", "output/a/.lock"),
]


def test_export_never_writes_over_a_file_of_the_run() -> None:
    write_rows([{"q": "x"}])
    Path("in.jsonl").rename("input.errors.jsonl")
    write_job(input={"path": "input.errors.jsonl"})
    run()
    (RUN / "sub").mkdir()
    (RUN / "link.jsonl").symlink_to("results.jsonl")
    Path("as-input").mkdir()
    for old, new in (
        (LOG, RUN / "hard.jsonl"),
        (LOG, Path("hard.errors.jsonl")),
        (Path("input.errors.jsonl"), Path("as-input/checkpoint.json")),
    ):
        os.link(old, new)
    before = {file: file.read_bytes() for file in Path().rglob("*") if file.is_file()}
    for option, path in REFUSED:
        done = batchkit("export", "job.toml", option, path).refused(1)
        assert "belongs to a run, as one of its files or its input" in done, path
    assert {file: file.read_bytes() for file in Path().rglob("*") if file.is_file()} == before


def test_export_never_writes_over_an_input_that_was_moved_after_the_first_start() -> None:
    write_rows([{"q": "x"}])
    write_job()
    run("--limit", "1")
    moved = Path("in.jsonl").rename("moved.jsonl")
    write_job(input={"path": "moved.jsonl"})
    assert run().exit_code == 0
    before = moved.read_bytes()
    batchkit("export", "job.toml", "--jsonl", "moved.jsonl").refused(1)
    assert moved.read_bytes() == before


@pytest.mark.parametrize("option", ["--jsonl", "--parquet"])
def test_export_reads_one_log_though_a_requeue_replaces_it(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An export lists the records first and reads them then; both must be of the same file."""
    run_rows([{"q": "x" * n} for n in range(1, 9)])
    assert batchkit("export", "job.toml", option, "before").exit_code == 0
    real = np.argsort

    def argsort(*args: Any, **kwargs: Any) -> Any:
        Path("new").write_bytes(b"".join(LOG.read_bytes().splitlines(keepends=True)[:0:-1]))
        Path("new").replace(LOG)
        return real(*args, **kwargs)

    monkeypatch.setattr(np, "argsort", argsort)
    assert batchkit("export", "job.toml", option, "meanwhile").exit_code == 0
    assert Path("meanwhile").read_bytes() == Path("before").read_bytes()


def test_export_replaces_an_older_export_in_one_step() -> None:
    run_rows([{"q": "x"}])
    export("job.toml", "--csv", "out.csv")
    with Path("out.csv").open() as old:
        run_of(*GOLDEN)
        export("job.toml", "--csv", "out.csv")
        assert len(old.read().splitlines()) == 2
    assert len(Path("out.csv").read_text().splitlines()) == 4
    done = batchkit("export", "job.toml", "--csv", "out.csv/out.csv").refused(1)
    assert "out.csv: can't write" in done


# What a spreadsheet would run

FORMULAS = [
    "=1+1",
    "+1+1",
    "-1+1|' /C calc'!A0",
    "@SUM(1,1)",
    "\t=1+1",
    "\r=1+1",
    "\n=1",
    "\uff1d1",
]
HARMLESS = ["1=1", "-5", "+5", "-.5e-3", "a -b", "", "'=1", "ü"]


def test_safe_csv_holds_nothing_that_a_spreadsheet_runs() -> None:
    texts = [*FORMULAS, *HARMLESS]
    kept = [
        replace(OK, index=n, id=f"@{n}", text=t, fields={"=f": -n}) for n, t in enumerate(texts)
    ]
    run_of(*(replace(record, scores={"em": -0.5}) for record in kept), keep=["=f"])
    said = export("job.toml", "--csv", "exact.csv").stderr
    assert (
        f"would run {len(FORMULAS) + len(texts) + 1} of its texts as formulas; use --safe-csv"
        in said
    )
    assert export("job.toml", "--csv", "safe.csv", "--safe-csv").stderr == ""
    assert "output/a/results.csv: " in export("job.toml", "--safe-csv").stdout
    assert (RUN / "results.csv").read_bytes() == Path("safe.csv").read_bytes()
    exact, safe = (
        list(csv.reader(io.StringIO(Path(name).read_bytes().decode(), newline="")))
        for name in ("exact.csv", "safe.csv")
    )
    assert exact[0] == columns("=f")
    assert safe[0] == columns("'=f")
    text, field = exact[0].index("text"), 2
    assert [row[text] for row in exact[1:]] == texts
    assert [row[text] for row in safe[1:]] == [*(f"'{t}" for t in FORMULAS), *HARMLESS]
    assert [row[field] for row in safe[1:]] == [str(-n) if n else "0" for n in range(len(texts))]
    assert safe[1][COLUMNS.index("id")] == "'@0"
