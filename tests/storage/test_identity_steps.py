"""What decides the answers of rows with several generations: a changed job is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from PIL import Image

from tests.support.command_line import batchkit
from tests.support.rows import write_jsonl

Job = dict[str, Any]
FUNCTION = "async def solve(row, generate):\n    return (await generate(row['q'])).text\n"
RUN = Path("output/a")


@pytest.fixture(autouse=True)
def _in_a_folder_with_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "in.jsonl", [{"q": "a", "label": "x"}])
    for name, text in (("u.j2", "{{ q }}"), ("t.json", "[]"), ("solve.py", FUNCTION)):
        Path(name).write_text(text)
    Path("model").mkdir()
    Path("model/weights").write_text("1")
    Image.new("RGB", (8, 8), "red").save("example.png")


def several() -> Job:
    """Two steps, the second of another model."""
    return {
        "name": "a",
        "input": {"path": "in.jsonl"},
        "engine": {"kind": "dry-run"},
        "engines": {
            "judge": {
                "kind": "dry-run",
                "model": "model",
                "options": {"latency_s": 0.0, "max_num_seqs": 4},
            }
        },
        "sampling": {"max_tokens": 16},
        "steps": [
            {"name": "draft", "prompt": {"user_file": "u.j2"}, "extract": "number"},
            {
                "name": "judge",
                "engine": "judge",
                "when": "{{ q }}",
                "prompt": {
                    "user": "{{ steps.draft.text }}",
                    "images": ["example.png"],
                    "chat_template_kwargs": {"b": 1, "a": 2},
                },
                "sampling": {"temperature": 0.5},
            },
        ],
    }


def solving() -> Job:
    return {
        "name": "a",
        "input": {"path": "in.jsonl"},
        "engine": {"kind": "dry-run"},
        "rollout": {"function": "solve.py:solve"},
    }


def run(job: Job, path: str = "job.toml") -> tuple[int, str]:
    Path(path).write_text(tomlkit.dumps(job))
    done = batchkit("run", path)
    return done.exit_code, done.stderr


def set_in(job: Job, key: str, value: Any) -> None:
    """None takes the key away; the number behind the last of a list appends."""
    *above, last = [int(part) if part.isdigit() else part for part in key.split(".")]
    table: Any = job
    for part in above:
        table = table[part]
    if value is None:
        del table[last]
    elif isinstance(table, list) and last == len(table):
        table.append(value)
    else:
        table[last] = value


SCORING = {"reference": "label", "scorers": ["em"]}
CHANGES: list[
    tuple[str, Any, str | None]
] = [  # of the job; and what the message names, if it is refused
    ("steps.1.prompt.user", "x {{ steps.draft.text }}", "steps.judge.prompt.user"),
    ("steps.1.when", None, "steps.judge.when"),
    ("steps.1.sampling.temperature", 0.6, "steps.judge.sampling.temperature"),
    ("sampling.max_tokens", 8, "steps.judge.sampling.max_tokens: 16 → 8"),
    ("steps.0.extract", "final-answer", 'steps.draft.extract: "number" → "final-answer"'),
    ("steps.1.parse", "json", "steps.judge.parse"),
    ("steps.0.engine", "judge", 'steps.draft.engine: "" → "judge"'),
    ("steps.2", {"name": "c", "prompt": {"user": "x"}}, "steps.c.prompt.user"),
    ("engines.judge.model", "other", "engines.judge.model"),
    ("engines.judge.options.latency_s", 0.001, "engines.judge.options.latency_s"),
    (
        "steps.1.prompt.chat_template_kwargs",
        {"a": 2, "b": 1},  # in this order
        "steps.judge.prompt.chat_template_kwargs",
    ),
    ("engines.judge.options.max_num_seqs", 8, None),
    ("scoring", SCORING, None),
    ("retry", {"attempts": 3}, None),
]
FILES = {
    "u.j2": (b"now {{ q }}", "steps.draft.prompt.user"),
    "model/weights": (b"2", "engines.judge.model_files"),
    "example.png": (Path("blue.png"), "prompt.files"),
}


def test_a_change_that_decides_answers_is_refused() -> None:
    assert run(several())[0] == 0
    for key, value, named in CHANGES:
        job = several()
        set_in(job, key, value)
        code, said = run(job)
        assert (code, named is None or named in said) == (2 if named else 0, True), key
        assert named is None or "--on-change requeue" in said
    job = several()
    job["steps"].reverse()
    job["steps"][0]["prompt"]["user"] = "{{ q }}"  # the draft may not read what comes later
    assert run(job)[0] == 2


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_decides_answers_is_read(name: str) -> None:
    assert run(several())[0] == 0
    Image.new("RGB", (8, 8), "blue").save("blue.png")
    content, named = FILES[name]
    Path(name).write_bytes(content.read_bytes() if isinstance(content, Path) else content)
    code, said = run(several())
    assert (code, named in said) == (2, True)


@pytest.mark.parametrize("by", ["majority", "scorer"])
def test_what_chooses_an_answer_decides_it(by: str) -> None:
    job = several()
    job["sampling"] |= {"n": 3, "temperature": 1.0}
    del job["steps"][1]["sampling"], job["steps"][0]["extract"]
    job["scoring"] = {"extract": "number", "reference": "label", "scorers": ["em"]}
    job["select"] = {"by": by}
    assert run(job)[0] == 0
    job["scoring"]["group_by"] = "label"
    assert run(job)[0] == 0
    job["scoring"]["extract"] = "final-answer"
    code, said = run(job)
    assert code == 2
    assert "select.scoring" in said


def test_the_function_is_known_by_its_text_and_not_by_its_place() -> None:
    Path("pkg").mkdir()
    Path("pkg/__init__.py").write_text("")
    Path("pkg/solve.py").write_text(FUNCTION)
    of_module = solving() | {"name": "b", "rollout": {"function": "pkg.solve:solve"}}
    assert run(of_module)[0] == 0
    Path("pkg/solve.py").write_text(FUNCTION + "\n# another")
    assert "rollout.source: " in run(of_module)[1]
    assert run(solving())[0] == 0
    Path("elsewhere").mkdir()
    for name in ("solve.py", "in.jsonl", "output"):
        shutil.move(name, f"elsewhere/{name}")
    job = solving()
    job["output"] = {"dir": str(Path("elsewhere/output").absolute())}
    assert run(job, "elsewhere/job.toml")[0] == 0
    Path("elsewhere/solve.py").write_text(FUNCTION + "\n# another")
    code, said = run(job, "elsewhere/job.toml")
    assert code == 2
    assert "rollout.source: " in said


def test_the_job_of_a_run_with_steps_is_the_same_job() -> None:
    assert run(several())[0] == 0
    shutil.copy(RUN / "job.toml", "again.toml")
    done = batchkit("run", "again.toml")
    assert done.exit_code == 0, done.stderr


def test_a_commit_that_is_learned_later_is_no_change() -> None:
    """An engine's commit on the hub is in the manifest once it is loaded; another one is refused."""
    job = several()
    assert run(job)[0] == 0
    manifest = json.loads((RUN / "manifest.json").read_text())
    manifest["identity"]["found"]["engines.judge.commits"] = {"org/m": "1"}
    (RUN / "manifest.json").write_text(json.dumps(manifest))
    assert run(job)[0] == 0
    kept = json.loads((RUN / "manifest.json").read_text())["identity"]["found"]
    assert kept["engines.judge.commits"] == {"org/m": "1"}
