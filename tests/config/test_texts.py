"""``prompt.texts``: the content of files in a prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchkit.config.tables import JobConfig
from batchkit.errors import JobError
from batchkit.execution.processor import ProductionBatchProcessor
from batchkit.rendering.renderer import PromptRenderer
from batchkit.rendering.steps import render_or_fail
from batchkit.rendering.templates.prompt import names_in
from batchkit.types import Request, Row
from tests.support import dry_runs
from tests.support.jobs import with_tables
from tests.support.rows import write_jsonl


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The media root: two tables, and a file beside it that must stay unread."""
    (tmp_path / "root/tables").mkdir(parents=True)
    (tmp_path / "root/tables/a.csv").write_text("x,y\n1,2\n", encoding="utf-8")
    (tmp_path / "root/tables/b.csv").write_text("größe\n", encoding="utf-8-sig")
    (tmp_path / "secret.csv").write_text("SECRET", encoding="utf-8")
    return tmp_path / "root"


def job(root: Path, rows: list[dict[str, Any]], **tables: Any) -> JobConfig:
    made: dict[str, Any] = {
        "input": {"path": str(write_jsonl(root.parent / "rows.jsonl", rows))},
        "prompt": {"user": "{{ Table }}|{{ q }}", "texts": {"Table": "tables/{{ file }}"}},
        "media": {"root": str(root)},
        "output": {"dir": str(root.parent / "output"), "prompt": True},
    }
    return dry_runs.job(**with_tables(made, tables))


def rendered(job: JobConfig, fields: dict[str, Any]) -> Request:
    found = render_or_fail(PromptRenderer(job), Row(0, "0", fields))
    if not isinstance(found, Request):
        assert found.error is not None
        raise found.error
    return found


def said(request: Request) -> list[Any]:
    return [message["content"] for message in request.messages or ()]


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        (b"x,y\n1,2\n", "x,y\n1,2\n"),
        ("größe\n".encode("utf-8-sig"), "größe\n"),
        (b"gr\xf6\xdfe", "gr��e"),
        (b"{{ q }}{% for %}", "{{ q }}{% for %}"),
    ],
    ids=["text", "byte order mark", "no UTF-8", "no template"],
)
def test_the_file_stands_in_the_prompt_as_it_is(root: Path, content: bytes, shown: str) -> None:
    (root / "tables/c.csv").write_bytes(content)
    assert said(rendered(job(root, []), {"file": "c.csv", "q": "why?"})) == [f"{shown}|why?"]


def test_system_and_user_know_all_texts_and_the_job_s_own_names(root: Path) -> None:
    prompt = {
        "system": "S {{ Table }}",
        "user": "U {{ Table }} {{ Other }}",
        "texts": {"Table": "{{ folder }}/a.csv", "Other": "{{ folder }}/b.csv"},
    }
    made = job(root, [], vars={"folder": "tables"}, prompt=prompt)
    assert said(rendered(made, {})) == ["S x,y\n1,2\n", "U x,y\n1,2\n größe\n"]


def test_a_text_hides_the_field_of_its_name_but_its_path_may_read_that_field(root: Path) -> None:
    prompt = {"user": "{{ Table }}", "texts": {"Table": "tables/{{ Table }}.csv"}}
    request = rendered(job(root, [], prompt=prompt), {"Table": "a"})
    assert said(request) == ["x,y\n1,2\n"]
    assert request.row.fields == {"Table": "a"}


@pytest.mark.parametrize(
    ("file", "kind", "message"),
    [
        ("none.csv", "media", "tables/none.csv: no such file under media.root"),
        ("../../secret.csv", "media", "outside media.root"),
        ("link.csv", "media", "outside media.root"),
        ("", "media", "Is a directory"),
        ("a.csv\0", "media", "can't be read"),
        (None, "template", "'file' is undefined"),
    ],
)
def test_a_file_that_can_t_be_had_fails_its_row_and_names_itself(
    root: Path, file: str | None, kind: str, message: str
) -> None:
    (root / "tables/link.csv").symlink_to(root.parent / "secret.csv")
    bad = {"q": "?"} if file is None else {"q": "?", "file": file}
    made = job(root, [bad, {"q": "?", "file": "a.csv"}])
    records = list(ProductionBatchProcessor(made, quiet=True).process().records())
    assert [record["status"] for record in records] == ["failed", "ok"]
    assert records[0]["error"]["kind"] == kind
    assert message in records[0]["error"]["message"]
    assert "SECRET" not in json.dumps(records)


def test_a_file_over_max_bytes_fails_its_row(root: Path) -> None:
    made = job(root, [{"file": "a.csv", "q": ""}], media={"max_bytes": 7})
    (record,) = ProductionBatchProcessor(made, quiet=True).process().records()
    assert record["error"]["kind"] == "media"
    assert "media.max_bytes is 7" in record["error"]["message"]


def test_a_path_that_is_no_template_is_refused_at_once(root: Path) -> None:
    with pytest.raises(JobError, match=r"prompt\.texts\.Table: line 1"):
        PromptRenderer(job(root, [], prompt={"texts": {"Table": "{{ file"}}))


def test_the_names_that_a_prompt_reads_are_those_of_the_row(root: Path) -> None:
    made = job(root, [], vars={"lang": "en"}, prompt={"user": "{{ Table }} {{ q }} {{ lang }}"})
    assert names_in(made, made.prompt, ["{{ more }}"]) == {"q", "file", "more"}
    hidden = made.prompt.model_copy(update={"texts": {"Table": "{{ Table }}.csv"}})
    assert names_in(made, hidden, []) == {"q", "Table"}
