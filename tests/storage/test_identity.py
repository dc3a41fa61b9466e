"""Which keys of the job file decide a run's answers, and runs of earlier versions."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from pydantic.fields import FieldInfo

from batchkit.config.loading import load_job
from batchkit.config.tables import JobConfig, Table
from batchkit.config.tables.base import Mark
from batchkit.errors import ChangedError, EngineError
from batchkit.execution.resume import open_run
from batchkit.execution.start import Options, Start
from batchkit.sources.input import from_job
from batchkit.storage.identity import (
    CHANGING,
    check_found,
    differences,
    hub_commits,
    identity,
    scoring_of,
)
from batchkit.storage.job_toml import write_job
from tests.support.dry_runs import LOG, RUN

RECORD = {"index": 0, "id": "no-id:0", "status": "failed", "error": {"kind": "other"}}
EARLIER = sorted((Path(__file__).parent / "earlier_runs").glob("*.json"))


@pytest.fixture(params=EARLIER, ids=lambda path: path.stem)
def earlier(request: pytest.FixtureRequest, in_tmp_path: Path) -> dict[str, Any]:
    """A run that an earlier version began: its files, its job and its manifest."""
    found: dict[str, Any] = json.loads(request.param.read_text())
    for name, text in found["files"].items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    write_toml(found["job"])
    RUN.mkdir(parents=True)
    (RUN / "manifest.json").write_text(json.dumps(found["manifest"]))
    LOG.write_text(json.dumps(RECORD) + "\n")
    return found


@pytest.fixture
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_toml(job: dict[str, Any]) -> None:
    Path("job.toml").write_text(tomlkit.dumps({"name": "a", **job}))


def go_on() -> None:
    job = load_job(Path("job.toml"))
    options: dict[str, Any] = {"fresh": False, "on_change": "fail", "overrides": []}
    with open_run(Start.of(job, Options(command="run", **options)), from_job(job)):
        pass


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


def without_newer(found: dict[str, Any]) -> dict[str, Any]:
    """``found`` without what that version did not look at; it is compared once a run has it."""
    return {key: value for key, value in found.items() if key != "server.slots"}


def test_identity_is_what_an_earlier_version_wrote(earlier: dict[str, Any]) -> None:
    job = load_job(Path("job.toml"))
    assert without_newer(identity(job)) == earlier["manifest"]["identity"]
    assert scoring_of(job) == earlier["manifest"]["scoring"]


def test_run_of_an_earlier_version_goes_on(earlier: dict[str, Any]) -> None:
    go_on()
    manifest = json.loads((RUN / "manifest.json").read_text())
    manifest["identity"] = without_newer(manifest["identity"])
    unchanged = "name", "batchkit", "created_at", "identity", "fingerprints", "model", "seed"
    for key in (*unchanged, "version", "total", "skipped_elsewhere", "engine_steps", "scoring"):
        assert manifest[key] == earlier["manifest"][key]
    assert manifest["starts"][:-1] == earlier["manifest"]["starts"]


def test_run_goes_on_from_its_own_job_toml(earlier: dict[str, Any]) -> None:
    """Also with the secrets that are masked there."""
    write_job(RUN, load_job(Path("job.toml")))
    (RUN / "job.toml").rename("job.toml")
    go_on()


def test_change_of_an_earlier_run_is_noticed(earlier: dict[str, Any]) -> None:
    job = earlier["job"]
    write_toml(job | {"sampling": job.get("sampling", {}) | {"top_k": 3}})
    with pytest.raises(ChangedError, match=r"sampling.top_k: null → 3"):
        go_on()


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
        assert identity(job)["engine.chat_template_text"] == text


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
def test_weights_that_differ_only_in_the_middle_are_another_model(
    tmp_path: Path, size: int, key: str
) -> None:
    """As after a training with frozen embeddings, head and vision tower."""
    weights = tmp_path / "model.safetensors"
    with weights.open("wb") as file:
        file.truncate(size)
    job = JobConfig.model_validate({"engine": {"model": "m", key: str(tmp_path)}})
    begun = identity(job)
    earlier = {name: value for name, value in begun.items() if name != "engine.blocks"}
    with weights.open("r+b") as file:
        file.seek(int(size * 0.45))
        file.write(b"x" * (size // 10))
    (message,) = differences(begun, identity(job))
    assert message.startswith("engine.blocks: ")
    assert differences(earlier, identity(job)) == []  # it noted the ends alone
    with weights.open("r+b") as file:
        file.write(b"x")
    (message,) = differences(earlier, identity(job))
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
    noted = check_found(unknown, {"engine.commits": hub_commits(job)})
    assert noted == begun
    ref.write_text("b" * 40)
    (message,) = differences(begun, identity(job))
    assert message.startswith('engine.commits: {"acme/tiny":"aaa')
    with pytest.raises(EngineError, match=r"engine\.commits: "):
        check_found(noted, {"engine.commits": hub_commits(job)})
    assert differences(unknown, identity(job)) == []  # nor do runs of earlier versions know it


def check_that_a_new_commit_is_noticed(job: JobConfig, ref: Path, name: str) -> None:
    ref.parent.mkdir(parents=True)
    ref.write_text("a" * 40)
    begun = identity(job)
    ref.write_text("b" * 40)
    (message,) = differences(begun, identity(job))
    assert message.startswith(f'engine.commits: {{"{name}":"aaa')


@pytest.mark.parametrize("revision", [None, "v1"])
def test_tokenizer_on_the_hub_that_moved_to_another_commit_is_another_one(
    tmp_path: Path, revision: str | None
) -> None:
    options = {"download_dir": str(tmp_path), "tokenizer": "acme/words"}
    options |= {"tokenizer_revision": revision} if revision else {}
    job = JobConfig.model_validate({"engine": {"model": "acme/tiny", "options": options}})
    ref = tmp_path / "models--acme--words" / "refs" / (revision or "main")
    check_that_a_new_commit_is_noticed(job, ref, "acme/words")


@pytest.mark.parametrize("revision", ["", " --revision v1", " --revision=v1"])
def test_hub_name_in_a_servers_command_that_moved_is_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, revision: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    server = {"command": f"vllm serve acme/tiny --port {{port}}{revision}"}
    engine = {"kind": "openai-server", "model": "acme/tiny", "server": server}
    job = JobConfig.model_validate({"engine": engine})
    ref = tmp_path / "models--acme--tiny" / "refs" / ("v1" if revision else "main")
    check_that_a_new_commit_is_noticed(job, ref, "acme/tiny")


def test_file_that_changed_while_a_run_used_it_differs_from_itself() -> None:
    mixed = {"prompt.files": {"prompt.texts.guide": CHANGING}}
    (message,) = differences(mixed, mixed)
    assert message.startswith('prompt.files: {"prompt.texts.guide":"changing"} → ')


def test_without_the_hubs_library_no_commit_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no dependency: a server may have it in an environment of its own."""
    monkeypatch.setitem(sys.modules, "huggingface_hub.constants", None)
    server = {"command": "vllm serve acme/tiny --port {port}"}
    for engine in ({"kind": "dry-run"}, {"kind": "openai-server", "model": "a", "server": server}):
        assert hub_commits(JobConfig.model_validate({"engine": engine})) == {}
