"""What a job executes, imports or sends is said once, before it happens, and never taken from a run folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support import dry_runs
from tests.support.chat_server import MODEL, ChatServer, serving
from tests.support.command_line import batchkit
from tests.support.dry_runs import RUN, changed_job, write_rows

pytestmark = pytest.mark.slow

SOLVE = """\
from pathlib import Path
Path("imported").touch()

async def solve(row, generate):
    return (await generate(row["q"] + row["x"])).text
"""
ROLLOUT: dict[str, Any] = {"prompt": None, "rollout": {"function": "solve.py:solve"}}
NOTIFY = "touch ended"


@pytest.fixture(autouse=True)
def _here(in_an_empty_folder: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("MY_KEY", "s3cret-s3cret")
    write_rows([{"q": "a", "x": ""}, {"q": "b"}])
    Path("solve.py").write_text(SOLVE)


def write_job(**tables: Any) -> None:
    usual = {"prompt": {"user": "{{ q }}{{ x }}"}, "run": {"check_rows": 0}}
    dry_runs.write_job(**{**usual, **tables})


def server(base: ChatServer) -> dict[str, Any]:
    return {"kind": "openai-server", "model": MODEL, "base_url": base.url, "api_key_env": "MY_KEY"}


def gone(*names: str) -> None:
    """Forget that commands ran."""
    for name in names:
        Path(name).unlink(missing_ok=True)


def test_each_is_said_once_before_it_happens() -> None:
    with serving() as base:
        tables = {**ROLLOUT, "engine": server(base)}
        write_job(**tables, run={"on_end": NOTIFY, "check_rows": 0})
        said = batchkit("run", "job.toml").stderr.splitlines()
    assert said[:3] == [
        f"batchkit: imports: {Path('solve.py').resolve()}:solve",
        "batchkit: sends $MY_KEY to 127.0.0.1",
        "batchkit: runs: touch ended",
    ]
    assert not [line for line in said[3:] if line.startswith(("imports", "sends", "runs"))]


@pytest.mark.parametrize(
    "command", ["run job.toml --dry-run", "validate job.toml", "plan job.toml"]
)
def test_a_command_says_only_what_it_does(command: str) -> None:
    write_job(**ROLLOUT, run={"on_end": NOTIFY, "check_rows": 0})
    said = batchkit(*command.split()).stderr
    assert said.count("batchkit: imports: ") == 1
    assert "batchkit: runs: " not in said
    assert not Path("ended").exists()


def began(**tables: Any) -> None:
    """A run with a failed row, as its job file made it."""
    write_job(**tables)
    assert batchkit("run", "job.toml").exit_code == 3
    gone("ended", "imported")


SERVER = {"kind": "openai-server", "model": MODEL}
AWAY = {**SERVER, "base_url": "http://127.0.0.1:9", "api_key_env": "MY_KEY"}
REMOTE_CODE = {"kind": "vllm", "model": "m", "options": {"trust_remote_code": True}}
FOREIGN: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    # what the job file says, what the run folder says, and what is refused
    (
        {},
        {"engine": {**SERVER, "server": {"command": "touch ended {port}"}}},
        "runs: touch ended {port}",
    ),
    ({}, {"engine": AWAY}, "sends $MY_KEY to 127.0.0.1"),
    (ROLLOUT, {"rollout": {"function": "other.py:solve"}}, "imports: "),
    ({}, {"engine": REMOTE_CODE}, "runs: Python code that comes with m"),
]


@pytest.mark.parametrize(("ours", "theirs", "line"), FOREIGN, ids=range(len(FOREIGN)))
def test_what_only_a_run_folder_says_is_refused(
    ours: Any, theirs: dict[str, Any], line: str
) -> None:
    shutil.copy("solve.py", "other.py")
    began(**ours)
    changed_job(**theirs)
    commands = [(command, str(RUN / "job.toml")) for command in ("retry-failed", "run", "plan")]
    commands += [("retry-failed", target, "--set", "vars.a=1") for target in (str(RUN), "job.toml")]
    for command in commands:
        found = batchkit(*command).refused()
        assert "job.toml does not have the following settings, and batchkit does not trust" in found
        assert f"\n  {line}" in found
        assert "allow them with --trust" in found
        assert not Path("ended").exists() | Path("imported").exists()


def test_retry_executes_what_the_job_file_still_says() -> None:
    began(**ROLLOUT, run={"on_end": NOTIFY, "check_rows": 0})
    assert batchkit("retry-failed", str(RUN)).exit_code == 3
    assert Path("ended").exists()
    gone("ended")
    changed_job(run={"on_end": "touch stolen"})
    found = batchkit("retry-failed", str(RUN))
    assert "run.on_end is ignored, because " in found.stderr
    assert "(--trust runs it): runs: touch stolen" in found.stderr
    assert not Path("stolen").exists() | Path("ended").exists()
    Path("job.toml").unlink()
    found = batchkit("retry-failed", str(RUN)).refused()
    assert (
        f"/{RUN}/job.toml has the following settings, and batchkit does not trust a run folder"
        in found
    )
    found = batchkit("retry-failed", str(RUN), "--trust")
    assert found.exit_code == 3
    assert Path("stolen").exists()


def test_job_file_inside_of_the_run_folder_is_not_the_users() -> None:
    began(run={"on_end": NOTIFY, "check_rows": 0})
    shutil.copy("job.toml", RUN / "theirs.toml")
    for file in (RUN / "theirs.toml", RUN / "job.toml", Path("job.toml")):
        place = str(file if file == Path("job.toml") else file.resolve())
        with (RUN / "starts.jsonl").open("a") as starts:
            starts.write(json.dumps({"run": {"job_file": place}}) + "\n")
        found = batchkit("retry-failed", str(RUN))
        assert "run.on_end is ignored" in found.stderr
        assert not Path("ended").exists()


def test_what_is_given_on_the_command_line_is_the_users() -> None:
    began()
    Path("job.toml").unlink()
    found = batchkit("retry-failed", str(RUN), "--notify", NOTIFY).refused(3)
    assert "batchkit: runs: touch ended" in found
    assert Path("ended").exists()


def test_key_goes_to_another_host_only_with_trust() -> None:
    with serving() as base:
        began(engine=server(base))
        other = server(base) | {"base_url": base.url.replace("127.0.0.1", "localhost")}
        write_job(engine=other)
        for command in ("run", "plan", "retry-failed"):
            setting = ["--set", f"engine.base_url={other['base_url']}"]
            found = batchkit(command, "job.toml", *setting * (command == "retry-failed")).refused()
            assert "sends $MY_KEY to localhost, but the run used 127.0.0.1 so far" in found
        assert batchkit("run", "job.toml", "--trust").exit_code == 3
        assert batchkit("run", "job.toml").exit_code == 3
