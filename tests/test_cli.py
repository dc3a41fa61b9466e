"""The command line: results on stdout, the rest on stderr, and an exit code that a script can use."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from batchkit.cli import cli
from tests.support.command_line import Ended, batchkit
from tests.support.rows import write_jsonl

COMMANDS = sorted(cli.commands)
HEAVY = {"pydantic", "torch", "vllm", "transformers", "pandas", "pyarrow", "numpy", "ray", "PIL"}
GOOD = [{"id": f"q{n}", "q": f"question {n}"} for n in range(5)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: rows.jsonl with five good rows, an image, and job.toml for them."""
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "rows.jsonl", GOOD)
    Image.new("RGB", (8, 6)).save(tmp_path / "there.png")
    write_job(tmp_path)
    return tmp_path


def write_job(folder: Path, prompt: str = 'user = "{{ q }}"') -> Path:
    path = folder / "job.toml"
    path.write_text(
        'name = "trial"\n[input]\npath = "rows.jsonl"\nid = "id"\n'
        f'[prompt]\n{prompt}\n[engine]\nkind = "dry-run"\n[output]\nkeep = ["q"]\n',
        encoding="utf-8",
    )
    return path


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


# Help


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_every_command_has_help(command: list[str], flag: str) -> None:
    result = batchkit(*command, flag).ok()
    assert result.stdout.startswith("Usage: ")
    assert not result.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_explained(name: str) -> None:
    for parameter in cli.commands[name].params:
        if parameter.param_type_name == "option":
            assert getattr(parameter, "help", None), f"{name} {parameter.opts}"


def test_help_names_every_command_and_the_exit_codes() -> None:
    text = batchkit("--help").stdout
    assert all(f"  {name} " in text for name in COMMANDS)
    assert [line for line in text.splitlines()[1:] if line.endswith("...")] == [], "cut off"
    assert "130 / 143" in text


@pytest.mark.parametrize("args", ["run --help", "--version"])
def test_help_imports_nothing_heavy(args: str) -> None:
    code = (
        "import sys\nfrom batchkit.cli import cli\n"
        f"try: cli({args.split()!r})\nexcept SystemExit: pass\n"
        "print(*{name.split('.')[0] for name in sys.modules}, file=sys.stderr)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    # site-packages may run code of its own when Python starts; that is not ours.
    bare = subprocess.run(
        [sys.executable, "-c", "import sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    ours = set(ran.stderr.split()) - {name.split(".")[0] for name in bare.stdout.split()}
    assert not ours & HEAVY


# The command line itself


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["validate", "job.toml", "--set", "engine.options.speed=9"], "engine.options.speed"),
        (["status"], "no run under output/"),
        (["status", "job.toml"], "start one with `batchkit run job.toml`"),
        (["merge", "job.toml", "--into", "output/b"], "there is no run in this folder"),
        (["retry-failed", "job.toml", "--kind", "bad"], "known kinds are template, media"),
        (["demo", "model", "job.toml"], "job.toml"),
    ],
)
def test_wrong_job_or_run_exits_with_2_and_says_so_on_stderr(
    args: list[str], words: str, folder: Path
) -> None:
    result = batchkit(*args)
    assert result.exit_code == 2
    assert not result.stdout
    assert "batchkit: error: " in result.stderr
    assert words in result.stderr
    assert "Traceback" not in result.stderr


# run


def summary(result: Ended) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def test_run_ends_with_one_line_of_json(folder: Path) -> None:
    result = batchkit("run", "job.toml").ok()
    assert len(result.stdout.splitlines()) == 1
    found = summary(result)
    wanted = "total ok failed skipped retried seconds rows_per_s completion_tokens_per_s exit"
    assert set(wanted.split()) <= set(found)
    assert (found["total"], found["ok"], found["failed"], found["exit"]) == (5, 5, 0, 0)
    assert "5 ok, 0 failed of 5 rows" in result.stderr
    assert (folder / "output" / "trial" / "results.jsonl").exists()


def test_dry_run_prints_rows_and_writes_nothing(folder: Path) -> None:
    write_job(folder, 'user = "Look: {{ q }}"\nimages = ["there.png"]')
    before = files(folder)
    result = batchkit("run", "job.toml", "--dry-run").ok()
    assert result.stdout.count("--- row ") == 3
    assert "--- row 0 (id q0)" in result.stdout
    assert "Look: question 0" in result.stdout
    assert "images: 8x6" in result.stdout
    assert '"temperature": 0.0' in result.stdout
    assert batchkit("run", "job.toml", "--dry-run", "--limit", "1").stdout.count("--- row ") == 1
    failing = batchkit("run", "job.toml", "--dry-run", "--set", "prompt.user={{ question }}").stdout
    assert "would fail, template: 'question' is undefined; the row has id, q" in failing
    assert files(folder) == before


# validate


def test_validate_passes_good_rows_and_writes_nothing(folder: Path) -> None:
    before = files(folder)
    result = batchkit("validate", "job.toml").ok()
    assert result.stdout.startswith("5 rows: 5 ok, 0 would fail\nprompt tokens: min ")
    found = json.loads(batchkit("validate", "job.toml", "--json").stdout)
    assert (found["rows"], found["ok"], found["failed"], found["problems"]) == (5, 5, 0, [])
    assert {"min", "median", "p99", "max"} <= set(found["prompt_tokens"])
    assert files(folder) == before


BAD = [
    {"id": "a", "q": "fine", "photo": "there.png"},
    {"id": "b", "photo": "there.png"},
    {"id": "c", "q": "no picture", "photo": "gone.png"},
    {"id": "a", "q": "id again", "photo": "there.png"},
    {"q": "no id", "photo": "there.png"},
]


def test_validate_finds_every_bad_row(folder: Path) -> None:
    write_job(folder, 'user = "{{ q }}"\nimages = ["{{ photo }}"]')
    write_jsonl(folder / "rows.jsonl", BAD)
    result = batchkit("validate", "job.toml", "--json")
    assert result.exit_code == 3
    assert len(result.stdout.splitlines()) == 1
    found = json.loads(result.stdout)
    assert (found["rows"], found["ok"], found["failed"]) == (5, 2, 3)
    assert found["failed_by_kind"] == {"template": 1, "media": 1, "invalid_request": 1}
    problems = {problem["index"]: problem for problem in found["problems"]}
    assert list(problems) == [1, 2, 4]
    assert "'q' is undefined" in problems[1]["message"]
    assert "gone.png" in problems[2]["message"]
    assert (
        "input.id: 1 rows repeat the id of an earlier row; for example, row 3 repeats row 0 ('a')"
        in str(found["hints"])
    )
    assert "input.id" in problems[4]["message"]
    result = batchkit("validate", "job.toml")
    assert result.exit_code == 3
    assert "5 rows: 2 ok, 3 would fail" in result.stdout
    assert "row 2 (id c) media: gone.png" in result.stdout


def test_validate_shows_the_first_problems_of_as_many_rows_as_asked_and_counts_the_rest(
    folder: Path,
) -> None:
    write_jsonl(folder / "rows.jsonl", [*GOOD, *({"id": str(n)} for n in range(50))])
    assert batchkit("validate", "job.toml", "--rows", "5").exit_code == 0
    result = batchkit("validate", "job.toml")
    assert result.exit_code == 3
    assert "55 rows: 5 ok, 50 would fail" in result.stdout
    assert "row 5 (id 0) template: " in result.stdout
    assert result.stdout.rstrip().endswith("… and 30 more")


# What reads a run


@pytest.fixture
def finished(folder: Path) -> Path:
    """A run of six rows, the last of them failed."""
    write_jsonl(folder / "rows.jsonl", [*GOOD, {"id": "bad"}])
    assert batchkit("run", "job.toml").exit_code == 3
    return folder


def test_run_is_named_by_its_job_its_folder_or_not_at_all(finished: Path) -> None:
    result = batchkit("status", "--json").ok()
    found = result.json
    assert (found["name"], found["ok"], found["failed"], found["pending"]) == ("trial", 5, 1, 0)
    assert found["failed_by_kind"] == {"template": 1}
    assert (found["prompt_tokens"], found["completion_tokens"]) == (15, 30)
    assert (found["engine_restarts"], found["held_by"]) == (0, None)
    assert result.stderr == "batchkit: output/trial\n"
    text = batchkit("status", "job.toml")
    assert text.stdout == batchkit("status", "output/trial").stdout
    assert text.stderr == ""
    assert "trial: 5 ok, 1 failed, 0 of 6 left" in text.stdout
    assert "no process works on it" in text.stdout


# What nobody can compile

PARENTHESES = f"{'(' * 5_000}1{')' * 5_000}"


@pytest.mark.parametrize(
    ("prompt", "key"),
    [
        (f'user = "{{{{ {PARENTHESES} }}}}"', "prompt.user"),
        (f'user = "a"\nimages = ["x{{{{ {PARENTHESES} }}}}"]', "prompt.images.0"),
        (f'user = "{{{{ {"9" * 5_000} }}}}"', "prompt.user"),
        ('user_file = "deep.txt"', "prompt.user_file"),
    ],
    ids=range(4),
)
def test_template_that_nobody_can_compile_is_one_message(
    folder: Path, prompt: str, key: str
) -> None:
    (folder / "deep.txt").write_text(f"{{{{ {PARENTHESES} }}}}")
    write_job(folder, prompt)
    result = batchkit("run", "job.toml").refused()
    assert result.startswith("batchkit: error: " + key), result[:300]
    assert len(result) < 500
    assert not (folder / "output").exists()
