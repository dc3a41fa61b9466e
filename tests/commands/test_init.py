"""``batchkit init``: every job file that it writes runs, and every option in it is one."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest
import tomlkit
from jsonschema import Draft202012Validator
from PIL import Image

from batchkit.cli import cli
from batchkit.commands.init import KINDS
from batchkit.config.job_schema import job_schema
from batchkit.config.loading import load_job, parse_job
from tests.support.command_line import batchkit
from tests.support.rows import write_jsonl

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
ROOT = Path(__file__).parents[2]
DRY = ["--set", "engine.kind=dry-run"]


def write_inputs() -> None:
    """Two rows for each kind."""
    page = Image.new("RGB", (64, 48), "red")
    page.save("a.png")
    Path("scans").mkdir()
    page.save("scans/a.pdf", save_all=True, append_images=[page])
    Path("photos.csv").write_text("photo\na.png\na.png\n")
    Path("rows.csv").write_text("text,label\ngood,1\nbad,0\n")
    Path("questions.csv").write_text("question\nwhy?\nhow?\n")
    searches = [{"query": q, "documents": ["tea", "soup"]} for q in ("a", "b")]
    write_jsonl(Path("searches.jsonl"), searches)
    made = {"input": {"path": "questions.csv"}, "prompt": {"user": "{{ question }}"}}
    Path("answers.toml").write_text(
        tomlkit.dumps({"name": "text", "engine": {"kind": "dry-run"}, **made})
    )
    batchkit("run", "answers.toml")
    body = {"model": "x", "messages": [{"role": "user", "content": "hi"}]}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    write_jsonl(Path("batch.jsonl"), [line, {**line, "custom_id": "b"}])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_job_file_of_each_kind_runs_as_it_is_written(kind: str) -> None:
    assert batchkit("init", kind).stdout.startswith(f"{kind}.toml: ")
    write_inputs()

    assert batchkit("validate", f"{kind}.toml", *DRY).exit_code == 0
    assert "would fail" not in batchkit("run", f"{kind}.toml", *DRY, "--dry-run").stdout
    ran = batchkit("run", f"{kind}.toml", *DRY)
    assert (ran.exit_code, ran.json["ok"], ran.json["name"]) == (0, 2, f"{kind}.dry-run"), (
        ran.stderr
    )
    commands = re.findall(r"^#   batchkit (.*?)  ", Path(f"{kind}.toml").read_text(), re.MULTILINE)
    (export,) = [command.split() for command in commands if command.startswith("export")]
    assert batchkit(export[0], f"output/{kind}.dry-run", *export[2:]).exit_code == 0


@pytest.mark.parametrize("kind", KINDS)
def test_every_option_that_is_commented_out_is_one(kind: str) -> None:
    batchkit("init", kind)
    text = Path(f"{kind}.toml").read_text()
    options = re.sub(r"^# (?=\w+ = )", "", text, flags=re.MULTILINE)
    assert options != text
    parse_job(tomllib.loads(options), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_schema_in_the_first_line_allows_the_job_file_and_no_wrong_key(kind: str) -> None:
    batchkit("init", kind)
    text = Path(f"{kind}.toml").read_text()
    address = text.partition("\n")[0].removeprefix("#:schema ")
    schema = json.loads(Path(url2pathname(urlsplit(address).path)).read_text("utf-8"))
    assert schema == json.loads(batchkit("init", "--schema").stdout)
    check = Draft202012Validator(schema)
    job = tomllib.loads(re.sub(r"^# (?=\w+ = )", "", text, flags=re.MULTILINE))
    check.validate(job)
    job["run"] = {"max_in_fligth": 4}
    (fault,) = check.iter_errors(job)
    assert "max_in_fligth" in fault.message


@pytest.mark.parametrize("job", sorted((ROOT / "jobs").glob("*.toml")), ids=lambda job: job.name)
def test_schema_allows_the_jobs_of_the_project(job: Path) -> None:
    Draft202012Validator(job_schema()).validate(tomllib.loads(job.read_text("utf-8")))


def test_job_has_the_name_of_its_file() -> None:
    assert batchkit("init", "text", "reviews.toml").exit_code == 0
    assert load_job(Path("reviews.toml")).name == "reviews"
    assert "batchkit run reviews.toml" in Path("reviews.toml").read_text()
    assert batchkit("init", "text", ".hidden one.toml").exit_code == 0
    assert load_job(Path(".hidden one.toml")).name == "text"


def test_kinds_are_listed_with_what_they_are_for() -> None:
    listed = batchkit("init").stdout
    assert all(re.search(rf"^  {kind} +\w+ .*\.$", listed, re.MULTILINE) for kind in KINDS)
    assert batchkit("init", "--list").stdout == listed
    help_text = " ".join((cli.commands["init"].help or "").split())
    assert f"KIND is {', '.join(KINDS[:-1])} or {KINDS[-1]}." in help_text


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["txt"], "known kinds are text, images"),
        (["txt"], "did you mean 'text'?"),
        (["text"], "text.toml: exists already; give another file"),
        (["text", "no/such/folder.toml"], "no/such/folder.toml: can't be written: No such file"),
    ],
)
def test_file_that_cannot_be_written_is_one_message(args: list[str], words: str) -> None:
    Path("text.toml").write_text("mine")
    assert words in batchkit("init", *args).refused()
    assert Path("text.toml").read_text() == "mine"
