"""Which keys of the job file decide a run's answers."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from PIL import Image
from pydantic.fields import FieldInfo

from batchkit.config.speed_options import SPEED_OPTIONS
from batchkit.config.tables import JobConfig, Table
from batchkit.config.tables.base import Mark
from batchkit.errors import EngineError
from batchkit.storage.identity import (
    CHANGING,
    Identity,
    check_found,
    differences,
    hub_commits,
    identity,
)
from tests.support.command_line import batchkit
from tests.support.rows import write_jsonl


def fields(table: type[Table], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Each key with its field, down to the tables that are marked as a whole."""
    for name, field in table.model_fields.items():
        tables = [
            part
            for part in (field.annotation, *getattr(field.annotation, "__args__", ()))
            if isinstance(part, type) and issubclass(part, Table)
        ]
        if tables and not marks(field):
            yield from fields(tables[0], f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def marks(field: FieldInfo) -> list[Mark]:
    return [mark for mark in field.metadata if isinstance(mark, Mark)]


@pytest.mark.parametrize(
    ("key", "field"), list(fields(JobConfig)), ids=lambda found: str(found)[:30]
)
def test_every_key_is_marked_once(key: str, field: FieldInfo) -> None:
    assert len(marks(field)) == 1, f"{key}: mark it Identity[…] or Free[…]"


@pytest.mark.parametrize("name", SPEED_OPTIONS)
def test_options_of_speed_decide_no_answers(name: str) -> None:
    plain, other = (
        identity(JobConfig.model_validate({"engine": {"model": "m", "options": options}}))
        for options in ({}, {name: "1"})
    )
    assert plain == other


@pytest.mark.parametrize(
    ("load_format", "are_other"),
    [("dummy", True), ("bitsandbytes", True), ("auto", False), ("runai_streamer", False)],
)
def test_random_weights_are_another_model(load_format: str, are_other: bool) -> None:
    plain, other = (
        identity(JobConfig.model_validate({"engine": {"model": "m", "options": options}}))
        for options in ({}, {"load_format": load_format})
    )
    assert (plain != other) is are_other


def test_chat_template_is_read_however_long_its_path_is(tmp_path: Path) -> None:
    path = tmp_path / ("a" * 200) / ("b" * 200) / "chat.jinja"
    path.parent.mkdir(parents=True)
    path.write_text("{{ messages }}")
    for template, text in ((str(path), "{{ messages }}"), ("{{ messages }}" * 50, None)):
        options = {"chat_template": template}
        job = JobConfig.model_validate({"engine": {"model": "m", "options": options}})
        assert identity(job).files.get("engine.chat_template_text") == text


@pytest.mark.parametrize("is_file", [True, False])
@pytest.mark.parametrize("name", ["tokenizer", "generation_config", "hf_config_path"])
def test_changed_file_of_an_option_is_another_model(
    tmp_path: Path, name: str, is_file: bool
) -> None:
    (tmp_path / "tokenizer.json").write_text("one")
    place = str(tmp_path / "tokenizer.json" if is_file else tmp_path)
    job = JobConfig.model_validate({"engine": {"model": "m", "options": {name: place}}})
    begun = identity(job)
    (tmp_path / "tokenizer.json").write_text("two")
    (message,) = differences(begun, identity(job))
    assert message.startswith("engine.files: ")


@pytest.mark.parametrize("size", [3 * 2**20, 40 * 2**20])
@pytest.mark.parametrize("key", ["model", "lora"])
@pytest.mark.parametrize(("start", "share"), [(0.45, 0.1), (0, 0)])
def test_weights_that_differ_only_in_the_middle_or_in_one_byte_are_another_model(
    tmp_path: Path, size: int, key: str, start: float, share: float
) -> None:
    """In the middle: as after a training with frozen embeddings, head and vision tower."""
    weights = tmp_path / "model.safetensors"
    with weights.open("wb") as file:
        file.truncate(size)
    job = JobConfig.model_validate({"engine": {"model": "m", key: str(tmp_path)}})
    begun = identity(job)
    with weights.open("r+b") as file:
        file.seek(int(size * start))
        file.write(b"x" * max(1, int(size * share)))
    (message,) = differences(begun, identity(job))
    assert message.startswith(f"engine.{key}_files: ")


@pytest.mark.parametrize("kind", ["vllm", "transformers"])
@pytest.mark.parametrize("revision", [None, "v1"])
def test_name_on_the_hub_that_moved_to_another_commit_is_another_model(
    tmp_path: Path, kind: str, revision: str | None
) -> None:
    options = {"download_dir": str(tmp_path), **({"revision": revision} if revision else {})}
    engine = {"kind": kind, "model": "acme/tiny", "options": options}
    job = JobConfig.model_validate({"engine": engine})
    unknown = identity(job)  # the first start, which has yet to download it
    ref = tmp_path / "models--acme--tiny" / "refs" / (revision or "main")
    ref.parent.mkdir(parents=True)
    ref.write_text("a" * 40)
    begun = identity(job)
    noted = check_found(unknown.found, {"engine.commits": hub_commits(job.engine)})
    assert noted == begun.found
    ref.write_text("b" * 40)
    (message,) = differences(begun, identity(job))
    assert message.startswith('engine.commits: {"acme/tiny":"aaa')
    with pytest.raises(EngineError, match=r"engine\.commits: "):
        check_found(noted, {"engine.commits": hub_commits(job.engine)})
    assert differences(unknown, identity(job)) == []


OF_VLLM = {"model": "acme/tiny", "options": {"tokenizer": "acme/words"}}
OF_SERVER = {"kind": "openai-server", "model": "acme/tiny"}


@pytest.mark.parametrize(
    ("engine", "option", "command", "name", "revision"),
    [
        (OF_VLLM, None, None, "words", "main"),
        (OF_VLLM, "tokenizer_revision", None, "words", "v1"),
        (OF_SERVER, None, "vllm serve acme/tiny --port {port}", "tiny", "main"),
        (OF_SERVER, None, "vllm serve acme/tiny --port {port} --revision v1", "tiny", "v1"),
        (OF_SERVER, None, "vllm serve acme/tiny --port {port} --revision=v1", "tiny", "v1"),
    ],
)
def test_other_names_on_the_hub_that_moved_are_noticed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: dict[str, Any],
    option: str | None,
    command: str | None,
    name: str,
    revision: str,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    if option is not None:
        engine = engine | {"options": engine["options"] | {option: revision}}
    if command is not None:
        engine = engine | {"server": {"command": command}}
    job = JobConfig.model_validate({"engine": engine})
    ref = tmp_path / f"models--acme--{name}" / "refs" / revision
    ref.parent.mkdir(parents=True)
    ref.write_text("a" * 40)
    begun = identity(job)
    ref.write_text("b" * 40)
    (message,) = differences(begun, identity(job))
    assert message.startswith(f'engine.commits: {{"acme/{name}":"aaa')


def test_file_that_changed_while_a_run_used_it_differs_from_itself() -> None:
    mixed = Identity({}, {}, {"prompt.files": {"prompt.texts.guide": CHANGING}})
    (message,) = differences(mixed, mixed)
    assert message.startswith('prompt.files: {"prompt.texts.guide":"changing"} → ')


def test_without_the_hubs_library_no_commit_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no dependency: a server may have it in an environment of its own."""
    monkeypatch.setitem(sys.modules, "huggingface_hub.constants", None)
    server = {"command": "vllm serve acme/tiny --port {port}"}
    for engine in ({"kind": "dry-run"}, {"kind": "openai-server", "model": "a", "server": server}):
        assert hub_commits(JobConfig.model_validate({"engine": engine}).engine) == {}


# Rows with several generations

Job = dict[str, Any]
FUNCTION = "async def solve(row, generate):\n    return (await generate(row['q'])).text\n"
RUN = Path("output/a")


@pytest.fixture
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


@pytest.mark.usefixtures("_in_a_folder_with_files")
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


@pytest.mark.usefixtures("_in_a_folder_with_files")
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_decides_answers_is_read(name: str) -> None:
    assert run(several())[0] == 0
    Image.new("RGB", (8, 8), "blue").save("blue.png")
    content, named = FILES[name]
    Path(name).write_bytes(content.read_bytes() if isinstance(content, Path) else content)
    code, said = run(several())
    assert (code, named in said) == (2, True)


@pytest.mark.usefixtures("_in_a_folder_with_files")
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


@pytest.mark.usefixtures("_in_a_folder_with_files")
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


@pytest.mark.usefixtures("_in_a_folder_with_files")
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
