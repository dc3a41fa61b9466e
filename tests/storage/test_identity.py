"""Which keys of the job file decide a run's answers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
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
    noted = check_found(unknown.found, {"engine.commits": hub_commits(job)})
    assert noted == begun.found
    ref.write_text("b" * 40)
    (message,) = differences(begun, identity(job))
    assert message.startswith('engine.commits: {"acme/tiny":"aaa')
    with pytest.raises(EngineError, match=r"engine\.commits: "):
        check_found(noted, {"engine.commits": hub_commits(job)})
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
        assert hub_commits(JobConfig.model_validate({"engine": engine})) == {}
