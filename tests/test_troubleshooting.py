"""Typical mistakes, each made as a user would: one message that is on docs/troubleshooting.md.

Only those are here that no other test makes; tests/test_docs.py holds the page against the code.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.command_line import batchkit
from tests.support.dry_runs import write_job
from tests.support.rows import write_jsonl

PAGE = (Path(__file__).parent.parent / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
RUN = ("run", "job.toml")


class Mistake(NamedTuple):
    """``message`` is as on the page, ``…`` for what varies; ``job`` are tables of ``job.toml``."""

    message: str
    args: tuple[str, ...] = RUN
    job: dict[str, Any] = {}  # noqa: RUF012 - it is only read
    before: Callable[[], object] = lambda: None
    exit_code: int = 2


def lose_manifest() -> None:
    batchkit("run", "job.toml")
    Path("output/a/manifest.json").unlink()


def write_batch() -> None:
    line = {"custom_id": "a", "url": "/v1/embeddings", "body": {"input": "tea"}}
    write_jsonl(Path("batch.jsonl"), [line])
    Path("job.toml").write_text('input.path = "batch.jsonl"\nengine.kind = "dry-run"\n')


MISTAKES = [
    Mistake("give a job file (… or --model and --input…", ("run",)),
    Mistake("…: is no job file, which is TOML. If it holds the rows: …", ("run", "rows.jsonl")),
    Mistake("…: no such job file; did you mean …", ("run", "jop.toml")),
    Mistake("…: is a folder; give a job file…", ("run", ".")),
    Mistake(
        "engine: model is missing: give a folder, a name on the hub, or …",
        job={"engine": {"kind": "vllm"}},
    ),
    Mistake(
        "… and … are both given; keep one", job={"prompt": {"user": "x", "user_file": "rows.jsonl"}}
    ),
    Mistake("init …: known kinds are …", ("init", "txt")),
    Mistake(
        '… url: … is for task = "…", and the job has task = "…", which serves …: …',
        before=write_batch,
    ),
    Mistake(
        "… input.id is …",
        ("validate", "job.toml"),
        {"input": {"path": "rows.jsonl", "id": "idd"}},
        exit_code=3,
    ),
    Mistake("…: no run there; start one with …", ("export", "job.toml", "--csv")),
    Mistake("…: can't be used as a run folder: …", before=lambda: Path("output").write_text("")),
    Mistake(
        "…: has records (…) but no …, so it is unknown which job and input they were made from",
        before=lose_manifest,
        exit_code=1,
    ),
    Mistake("the scorer choice needs choices", job={"scoring": {"scorers": ["choice"]}}),
]


@pytest.mark.usefixtures("in_an_empty_folder")
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.message[:60])
def test_mistake_is_one_message_that_is_on_the_page(mistake: Mistake) -> None:
    assert f"`{mistake.message}`" in PAGE
    write_jsonl(Path("rows.jsonl"), [{"q": f"question {n}"} for n in range(3)])
    write_job(**{"input": {"path": "rows.jsonl"}, "prompt": {"user": "{{ q }}"}, **mistake.job})
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
