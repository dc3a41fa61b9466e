"""Typical mistakes, each made as a user would: one message that is on docs/troubleshooting.md."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tomlkit
from PIL import Image

from tests.support.command_line import batchkit
from tests.support.jobs import with_tables
from tests.support.rows import write_jsonl

PAGE = (Path(__file__).parent.parent / "docs" / "troubleshooting.md").read_text(encoding="utf-8")


class Mistake(NamedTuple):
    """``message`` is as on the page, ``…`` for what varies; ``job`` are tables of ``job.toml``."""

    message: str
    args: tuple[str, ...] = ("run", "job.toml")
    job: dict[str, Any] = {}  # noqa: RUF012 - it is only read
    before: Callable[[], object] = lambda: None
    exit_code: int = 2


def of_job(message: str, **job: Any) -> Mistake:
    return Mistake(message, job=job)


def of_row(message: str, **job: Any) -> Mistake:
    return Mistake(message, ("validate", "job.toml"), job, exit_code=3)


def of_set(message: str, *settings: str) -> Mistake:
    return Mistake(
        message, ("run", "job.toml", *(w for s in settings for w in ("--set", *s.split())))
    )


def of_text(message: str, line: str) -> Mistake:
    text = f'[engine]\nkind = "dry-run"\n{line}\n'
    return Mistake(message, before=lambda: Path("job.toml").write_text(text))


def of_input(message: str, name: str, content: bytes) -> Mistake:
    return Mistake(
        message, job={"input": {"path": name}}, before=lambda: Path(name).write_bytes(content)
    )


def of_batch(
    message: str,
    line: dict[str, Any],
    args: tuple[str, ...] = ("run", "job.toml"),
    exit_code: int = 2,
    **job: Any,
) -> Mistake:
    def before() -> None:
        write_jsonl(Path("batch.jsonl"), [{"custom_id": "a", **line}])

    tables = {"input": {"path": "batch.jsonl"}, "prompt": {"user": None}, **job}
    return Mistake(message, args, tables, before, exit_code)


def in_run(message: str, *args: str, exit_code: int = 2, **job: Any) -> Mistake:
    """After a run of the job."""
    return Mistake(message, args, job, lambda: batchkit("run", "job.toml"), exit_code)


def _cut_log() -> None:
    batchkit("run", "job.toml")
    log = Path("output/trial/results.jsonl")
    log.write_bytes(log.read_bytes().replace(b'"ok"', b'"no"', 1))


def _lose_manifest() -> None:
    batchkit("run", "job.toml")
    Path("output/trial/manifest.json").unlink()


MISTAKES = [
    # the command line and the job file
    Mistake("give a job file (… or --model and --input…", ("run",)),
    Mistake("…: is no job file, which is TOML. If it holds the rows: …", ("run", "rows.jsonl")),
    Mistake("…: no such job file; did you mean …", ("run", "jop.toml")),
    Mistake("…: is a folder; give a job file…", ("run", ".")),
    of_text("…: not valid TOML: line …", "model = Qwen/Qwen3"),
    of_text("…: not valid TOML: line …", "in_process = True"),
    of_text("…: not valid TOML: line …", "[engine]"),
    of_job(
        "steps.… comes later; a template sees the steps before its own: …",
        prompt=None,
        steps=[
            {"name": "a", "prompt": {"user": "{{ steps.b.text }}"}},
            {"name": "b", "prompt": {"user": "{{ q }}"}},
        ],
    ),
    of_job(
        "steps.… has no '…'…",
        prompt=None,
        steps=[
            {"name": "a", "prompt": {"user": "{{ q }}"}},
            {"name": "b", "prompt": {"user": "{{ steps.a.txt }}"}},
        ],
    ),
    of_job(
        "rollout.function: … can't be imported:",
        prompt=None,
        rollout={"function": "nowhere.py:solve"},
    ),
    of_text("…: not valid TOML: line …", 'model = "Qwen'),
    of_job("…: unknown key; did you mean …", promt={"user": "x"}),
    of_job("…: unknown key; did you mean …", prompt={"usr": "x"}),
    of_set("…: unknown key; did you mean …", "limit=5"),
    of_set("--set …: write KEY=VALUE in one word…", "limit 5"),
    of_job("…: unknown key; known: …", engine={"max_model_len": 4096}),
    of_job("…: found …, expected …", sampling={"temperature": "0"}),
    of_job("…: found …, expected …", prompt={"images": "{{ photo }}"}),
    of_job("…: found …, expected …", engine={"kind": "vlm"}),
    of_job("…: found …, expected …", name="my run"),
    of_job("engine: this table is missing", engine=None),
    of_job(
        "engine: model is missing: give a folder, a name on the hub, or batchkit-demo…",
        engine={"kind": "vllm"},
    ),
    of_job("… and … are both given; keep one", prompt={"user": "x", "user_file": "rows.jsonl"}),
    of_job("prompt.user: line …", prompt={"user": "{{ q"}),
    of_job("prompt.user_file: …", prompt={"user": None, "user_file": "no.txt"}),
    of_job('base_url is for kind = "openai-server"…', engine={"base_url": "http://h/v1"}),
    of_job("base_url is missing: …", engine={"kind": "openai-server", "model": "m"}),
    of_job(
        'engine.options.…: kind = "…" has no such name…', engine={"options": {"max_model_len": 9}}
    ),
    Mistake("--output …: its suffix names no format; …", ("run", "job.toml", "--output", "a.xlsx")),
    Mistake("--output …: is the input; …", ("run", "job.toml", "--output", "rows.jsonl")),
    Mistake("--shard: …", ("run", "job.toml", "--shard", "4/4")),
    Mistake("…: found …, expected …", ("run", "job.toml", "--set", "input.limit=many")),
    Mistake("init …: known kinds are …", ("init", "txt")),
    # input
    of_job("…: no file matches; check input.path…", input={"path": "row.jsonl"}),
    Mistake(
        "…: no row has what input.where asks for: …",
        job={"input": {"where": {"q": "none"}}},
        exit_code=0,
    ),
    of_job("input.path is not set; …", input={"path": None}),
    of_input("…: the suffix … names no format; set input.format to one of …", "rows.dat", b"x\n"),
    of_input("…: is empty; …", "rows.csv", b""),
    of_input(
        '…: is one JSON value, not JSON lines; set input.format = "json"', "a.jsonl", b"[\n1\n]"
    ),
    of_input(
        "…: is a JSON object; set input.records to the key of its list…", "a.json", b'{"a": []}'
    ),
    of_input("…: is a zip archive or an Excel workbook; …", "rows.csv", b"PK\x03\x04xx"),
    of_input("…: is UTF-16 text; save it as UTF-8", "rows.csv", "q\nü".encode("utf-16")),
    of_batch(
        '… url: … is for task = "…", and the job has task = "…": …',
        {"url": "/v1/embeddings", "body": {"input": "tea"}},
    ),
    # rows
    of_row(
        "nothing to compare: pair.query and pair.documents are not set…",
        task="score",
        prompt={"user": None},
    ),
    of_batch(
        "body: has … texts; a row has one answer…",
        {"url": "/v1/embeddings", "body": {"input": ["tea", "coffee"]}},
        ("validate", "job.toml"),
        exit_code=3,
        task="embed",
    ),
    of_row("… is undefined; the row has …", prompt={"user": "{{ qestion }}"}),
    of_row("nothing to send: prompt.user is not set…", prompt={"user": None}),
    of_row("…: no such file under media.root …", prompt={"images": ["no.png"]}),
    of_row("… outside media.root …", prompt={"images": ["../out.png"]}),
    of_row("… is not on media.allow_urls …", prompt={"images": ["http://example.org/a.png"]}),
    of_row("…: is not an image that can be read: …", prompt={"images": ["rows.jsonl"]}),
    of_row("… input.id is …, which is missing; …", input={"id": "idd"}),
    of_row("… has the id …, too", input={"id": "same"}),
    # a run
    in_run("…: job or input changed since this run began", "run", "job.toml", "--set", "vars.a=1"),
    in_run("--kind …: known kinds are …", "retry-failed", "--kind", "medai"),
    in_run("name a format: …", "export"),
    in_run("--skip-from …: not a run folder", "run", "job.toml", "--skip-from", "no"),
    in_run("the job scores nothing: set [scoring] extract, reference and scorers", "score"),
    Mistake("no run under …", ("status",)),
    Mistake("…: neither a run folder nor a job file", ("status", "no")),
    Mistake("…: no run there; start one with …", ("export", "job.toml", "--csv")),
    Mistake("…: can't be used as a run folder: …", before=lambda: Path("output").write_text("")),
    Mistake(
        "…: has records (…) but no …, so it is unknown which job and input they were made from",
        before=_lose_manifest,
        exit_code=1,
    ),
    Mistake(
        "…: the record at byte … is damaged…",
        ("export", "--csv"),
        before=_cut_log,
        exit_code=1,
    ),
    # scores
    of_job("the scorer choice needs choices", scoring={"scorers": ["choice"]}),
    of_job("… is no regular expression: …", scoring={"extract": "regex", "pattern": "("}),
    of_job(
        "scoring.reference_run: …: no run there…",
        scoring={"scorers": ["em"], "reference_run": "no"},
    ),
    Mistake(
        "… a right answer to compare with: set scoring.reference…",
        ("validate", "job.toml"),
        {"scoring": {"scorers": ["em"]}},
        exit_code=0,
    ),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory: job.toml and its rows, and an image that is not below it."""
    Image.new("RGB", (8, 6)).save(tmp_path / "out.png")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    write_jsonl(Path("rows.jsonl"), [{"q": f"question {n}", "same": "x"} for n in range(3)])
    yield tmp_path
    os.chdir(tmp_path)


def write_job(tables: dict[str, Any]) -> None:
    job: dict[str, Any] = {
        "name": "trial",
        "input": {"path": "rows.jsonl"},
        "prompt": {"user": "{{ q }}"},
        "engine": {"kind": "dry-run"},
    }
    plain = {name: value for name, value in tables.items() if not isinstance(value, dict)}
    job = with_tables(job, {n: t for n, t in tables.items() if n not in plain}) | plain
    Path("job.toml").write_text(tomlkit.dumps(without_none(job)))


def without_none(table: dict[str, Any]) -> dict[str, Any]:
    return {
        key: without_none(value) if isinstance(value, dict) else value
        for key, value in table.items()
        if value is not None
    }


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.message[:60])
def test_mistake_is_one_message_that_is_on_the_page(mistake: Mistake) -> None:
    assert f"`{mistake.message}`" in PAGE
    write_job(mistake.job)
    mistake.before()
    ended = batchkit(*mistake.args)  # it would raise what is no message of ours
    printed = ended.stdout + ended.stderr
    assert ended.exit_code == mistake.exit_code, printed
    place = 0
    for part in mistake.message.split("…"):
        found = printed.find(part, place)
        assert found >= 0, f"{part!r} is not in {printed}"
        place = found + len(part)
    assert "Traceback" not in printed


def test_sixty_mistakes_are_tried_and_those_in_the_tables_are_all() -> None:
    assert len(MISTAKES) >= 60
    of_vllm = {
        "engine.options.…: vLLM has no such option…",
        "sampling.…: vLLM has no such parameter…",
    }
    of_lengths = {
        "sampling.max_tokens: … leaves no room for a prompt…"
    }  # tests/commands/test_validate.py
    in_tables = {*re.findall(r"^\| `([^`|]*…[^`|]*)`", PAGE, re.MULTILINE)} - {"… problem"}
    assert in_tables - of_vllm - of_lengths <= {mistake.message for mistake in MISTAKES}
