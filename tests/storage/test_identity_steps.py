"""What decides the answers of rows with several generations: a changed job is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
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


def of_judge(job: Job) -> Job:
    engine: Job = job["engines"]["judge"]
    return engine


CHANGES: dict[str, tuple[Callable[[Job], object], str]] = {
    "template file": (
        lambda job: Path("u.j2").write_text("now {{ q }}"),
        "steps.draft.prompt.user",
    ),
    "template": (
        lambda job: job["steps"][1]["prompt"].update(user="x {{ steps.draft.text }}"),
        "steps.judge.prompt.user",
    ),
    "when": (lambda job: job["steps"][1].pop("when"), "steps.judge.when"),
    "sampling": (
        lambda job: job["steps"][1]["sampling"].update(temperature=0.6),
        "steps.judge.sampling.temperature",
    ),
    "sampling of the job": (
        lambda job: job["sampling"].update(max_tokens=8),
        "steps.judge.sampling.max_tokens: 16 → 8",
    ),
    "extractor": (
        lambda job: job["steps"][0].update(extract="final-answer"),
        'steps.draft.extract: "number" → "final-answer"',
    ),
    "parse": (lambda job: job["steps"][1].update(parse="json"), "steps.judge.parse"),
    "engine of a step": (
        lambda job: job["steps"][0].update(engine="judge"),
        'steps.draft.engine: "" → "judge"',
    ),
    "one more step": (
        lambda job: job["steps"].append({"name": "c", "prompt": {"user": "x"}}),
        "steps.c.prompt.user",
    ),
    "order": (lambda job: job["steps"].reverse(), ""),
    "image of all rows": (
        lambda job: Image.new("RGB", (8, 8), "blue").save("example.png"),
        "prompt.files",
    ),
    "model": (lambda job: of_judge(job).update(model="other"), "engines.judge.model"),
    "model files": (
        lambda job: Path("model/weights").write_text("2"),
        "engines.judge.model_files",
    ),
    "option": (
        lambda job: of_judge(job)["options"].update(latency_s=0.001),
        "engines.judge.options.latency_s",
    ),
    "order of names for the chat template": (
        lambda job: job["steps"][1]["prompt"].update(chat_template_kwargs={"a": 2, "b": 1}),
        "steps.judge.prompt.chat_template_kwargs",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_that_decides_answers_is_refused(change: str) -> None:
    job = several()
    assert run(job)[0] == 0
    make, named = CHANGES[change]
    make(job)
    if change == "order":  # the draft may not read what comes later
        job["steps"][0]["prompt"]["user"] = "{{ q }}"
    code, said = run(job)
    assert code == 2
    assert named in said
    assert "--on-change requeue" in said


def test_a_change_that_decides_no_answer_is_not() -> None:
    job = several()
    assert run(job)[0] == 0
    of_judge(job)["options"]["max_num_seqs"] = 8
    job["scoring"] = {"reference": "label", "scorers": ["em"]}
    job["retry"] = {"attempts": 3}
    assert run(job)[0] == 0


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


def test_a_function_of_a_module_is_known_by_the_text_of_its_file() -> None:
    Path("pkg").mkdir()
    Path("pkg/__init__.py").write_text("")
    Path("pkg/solve.py").write_text(FUNCTION)
    job = solving()
    job["rollout"]["function"] = "pkg.solve:solve"
    assert run(job)[0] == 0
    Path("pkg/solve.py").write_text(FUNCTION + "\n# another")
    assert "rollout.source: " in run(job)[1]


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
    manifest["identity"]["engines.judge.commits"] = {"org/m": "1"}
    (RUN / "manifest.json").write_text(json.dumps(manifest))
    assert run(job)[0] == 0
    kept = json.loads((RUN / "manifest.json").read_text())["identity"]
    assert kept["engines.judge.commits"] == {"org/m": "1"}
