"""A server that the run starts: found, waited for, replaced when it dies, and gone with the run."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import tomlkit

from batchkit.config.loading import make_job
from batchkit.config.server_command import llama_server, what_decides_answers
from batchkit.engines.faults import StartFailed
from batchkit.engines.openai.own_server import claimed_port
from batchkit.engines.registry import open_engine, open_preflight
from batchkit.errors import EngineError, JobError
from batchkit.storage.identity import differences, identity
from tests.support import own_process
from tests.support.chat_server import MODEL
from tests.support.jobs import with_tables
from tests.support.own_process import batchkit
from tests.support.paths import ROOT
from tests.support.rows import read_jsonl, write_jsonl
from tests.support.waiting import until

pytestmark = pytest.mark.slow

# -S: it needs no package, and starts sooner.
SERVER = f"{shlex.quote(sys.executable)} -S -m tests.support.chat_server --port {{port}}"


@pytest.fixture(autouse=True)
def _servers_find_this_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def table(folder: Path, command: str | None = SERVER, **tables: Any) -> dict[str, Any]:
    server = {} if command is None else {"command": command}
    made: dict[str, Any] = {
        "name": "a",
        "input": {"path": "rows.jsonl", "id": "id"},
        "prompt": {"user": "say {{ word }}"},
        "engine": {"kind": "openai-server", "model": MODEL, "server": server},
        "output": {"dir": str(folder / "output")},
    }
    return with_tables(made, tables)


def write(folder: Path, rows: int, command: str = SERVER, **tables: Any) -> Path:
    """The job file's run folder."""
    write_jsonl(folder / "rows.jsonl", ({"id": f"q{n}", "word": f"w{n}"} for n in range(rows)))
    (folder / "job.toml").write_text(tomlkit.dumps(table(folder, command, **tables)))
    return folder / "output" / "a"


def records(folder: Path) -> list[dict[str, Any]]:
    return read_jsonl(folder / "results.jsonl")


def servers(folder: Path) -> list[psutil.Process]:
    """The servers that the run in ``folder`` has started and that are alive."""
    mine = []
    for process in psutil.process_iter():
        try:
            is_ours = process.environ().get("BATCHKIT_TEST_RUN") == str(folder)
            if is_ours and process.cmdline()[2:4] == ["-m", "tests.support.chat_server"]:
                mine.append(process)
        except psutil.Error:
            continue
    return mine


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], subprocess.Popen[str]]:
    """``batchkit run job.toml`` in the background, its processes marked."""
    monkeypatch.setenv("BATCHKIT_TEST_RUN", str(tmp_path))

    return lambda: own_process.begin("run", "job.toml", cwd=tmp_path)


def some_done(folder: Path, at_least: int) -> Callable[[], bool]:
    log = folder / "results.jsonl"
    return lambda: log.exists() and len(log.read_bytes().splitlines()) >= at_least


# --- what the job file says


def test_a_gguf_file_has_a_command_with_room_for_all_its_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = {"model": "my models/a.gguf", "server": {}}
    with pytest.raises(JobError, match=r"engine\.options\.max_model_len is missing"):
        open_preflight(make_job(table(tmp_path, None, engine=engine), "test"))
    engine["options"] = {"max_model_len": 4096, "max_num_seqs": 8}
    open_preflight(make_job(table(tmp_path, None, engine=engine), "test"))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert shlex.split(llama_server("my models/a.gguf", max_model_len=4096, max_num_seqs=8)) == [
        *("llama-server", "-m", "my models/a.gguf", "-c", "32768", "-np", "8"),
        *("--threads", "3", "--port", "{port}"),
    ]
    monkeypatch.delenv("OMP_NUM_THREADS")
    cores = len(os.sched_getaffinity(0))
    assert f" --threads {cores} " in llama_server("a.gguf", max_model_len=1, max_num_seqs=1)
    embeds = llama_server("a.gguf", max_model_len=64, max_num_seqs=2, task="embed")
    assert " -np 2 --embedding -b 64 -ub 64 --threads " in embeds
    ranks = llama_server("a.gguf", max_model_len=64, max_num_seqs=2, task="score")
    assert " -np 2 --reranking -b 64 -ub 64 --threads " in ranks


@pytest.mark.parametrize(
    ("command", "is_another"),
    [
        ("/opt/llama-server -m a.gguf -c 8192 -np 8 -t 2 --port {port} --host={host}", False),
        ("llama-server -m b.gguf -c 8192 -np 8 --port {port}", True),
        # A slot's context is its part of -c: with more, answers are cut sooner.
        ("llama-server -m a.gguf -c 8192 -np 4 --port {port}", True),
        ("llama-server -m a.gguf -c 8192 --port {port}", True),
    ],
)
def test_a_run_is_known_by_what_its_server_answers_not_by_where_and_how_fast(
    command: str, is_another: bool, tmp_path: Path
) -> None:
    begun, found = (
        identity(make_job(table(tmp_path, its, input={}), "test"))
        for its in ("llama-server -m a.gguf -c 8192 -np 8 --port {port}", command)
    )
    keys = [message.partition(": ")[0] for message in differences(begun, found)]
    assert keys == ["engine.server.command"] * is_another


def test_options_of_speed_decide_no_answers() -> None:
    assert what_decides_answers("vllm serve m --enforce-eager --dtype half") == [
        "vllm", "serve", "m", "--dtype", "half",
    ]  # fmt: skip
    assert what_decides_answers("vllm serve --enforce-eager m -tp 2") == ["vllm", "serve", "m"]


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("chat.jinja", "SERVER --chat-template chat.jinja"),
        ("chat.jinja", "SERVER --chat-template-file=chat.jinja"),
        ("adapter/adapter_config.json", "SERVER --lora-modules mine=adapter"),
        ("model/config.json", "SERVER serve model"),
        ("model/params.json", "SERVER serve model"),
        ("b.gguf", "SERVER --lora a.gguf,b.gguf"),
        ("b.gguf", "SERVER --lora-scaled a.gguf:1,b.gguf:0.5"),
        ("steer.bin", "SERVER --control-vector-scaled steer.bin:-0.5"),
        ("words/tokenizer.json", "SERVER --tokenizer words"),
        ("own/generation_config.json", "SERVER --generation-config own"),
        ("model/config.json", "SERVER bash -c 'vllm serve model'"),
        ("b.gguf", "SERVER bash -c 'exec llama-server --lora=a.gguf,b.gguf >/dev/null'"),
        ("ad/a.safetensors", """SERVER --lora-modules '{"name":"mine","path":"ad"}'"""),
        ("ad/a.safetensors", """SERVER --lora-modules '{"name": "mine", "path": "ad"}'"""),
        ("ad/a.safetensors", """SERVER --default-mm-loras='{"audio":"ad"}'"""),
        ("ad/a.safetensors", """SERVER bash -c "vllm serve m --lora-modules '{\\"path\\":\\"ad\\"}'\""""),
        ("serve.sh", "SERVER bash serve.sh"),
        ("serve.sh", "SERVER env A=1 bash -eu serve.sh"),
        ("serve.py", "SERVER python -u serve.py"),
        ("serve.sh", "SERVER bash -c './serve.sh --x'"),
        ("serve.sh", "./serve.sh {port}"),
        ("serve.sh", "FOLDER/serve.sh --port {port}"),
    ],
)  # fmt: skip
def test_a_run_is_known_by_what_is_in_the_files_of_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    file, log = tmp_path / name, tmp_path / "server.log"
    file.parent.mkdir(exist_ok=True)
    file.write_text("one")
    log.write_text("one")
    command = command.replace("SERVER", f"{SERVER} --log-file {log}")
    command = command.replace("FOLDER", str(tmp_path))
    job = make_job(table(tmp_path, command, input={}), "test")
    begun = identity(job)
    log.write_text("two")
    assert differences(begun, identity(job)) == []
    file.write_text("two")
    (message,) = differences(begun, identity(job))
    assert message.startswith("engine.files: ")


# --- a server that does not come up


def test_a_port_is_given_to_one_server_at_a_time() -> None:
    """One that loads for minutes takes its port late, and another run's would be taken for it."""
    first = claimed_port()
    taken = first.number
    with first.claim, claimed_port([taken, taken, taken + 1]).claim as second:
        assert second.getsockname().endswith(str(taken + 1).encode())
    with claimed_port([taken]).claim as again:
        assert again.getsockname().endswith(str(taken).encode())


def python(code: str) -> str:
    return shlex.join([sys.executable, "-c", code, "{port}"])


ENDS = "import sys; print('one'); print('unknown model tiny', file=sys.stderr); sys.exit(5)"
HANGS = "import time; print('thinking', flush=True); time.sleep(600)"


@pytest.mark.parametrize(
    ("command", "timeout_s", "words"),
    [
        ("lama-server -m x --port {port}", 60, ["engine.server.command: no program 'lama-server'"]),
        ("FOLDER/serve {port}", 60, ["serve: can't be started: Exec format error"]),
        (f"{SERVER} {'x' * 2**17}", 60, ["engine.server.command: found a text of 131,"]),
        (
            python(ENDS),
            60,
            [
                "it ended before it was ready (exit code 5",
                "\n  unknown model tiny",
                "FOLDER/output/a/engine.log",
            ],
        ),
        (
            python(HANGS),
            1,
            ["after 1 s (engine.server.start_timeout_s)", "/health", "\n  thinking"],
        ),
    ],
    ids=["no program", "no machine code", "too long", "it ends", "it hangs"],
)
def test_a_server_that_does_not_start_is_reported_with_its_reason(
    command: str, timeout_s: float, words: list[str], tmp_path: Path
) -> None:
    (tmp_path / "serve").write_bytes(b"\x7fELF nonsense")
    (tmp_path / "serve").chmod(0o755)
    made = table(tmp_path, command.replace("FOLDER", str(tmp_path)), input={})
    made["engine"]["server"]["start_timeout_s"] = timeout_s
    with pytest.raises((JobError, EngineError)) as failed:
        open_engine(make_job(made, "test")).close()
    for part in words:
        assert part.replace("FOLDER", str(tmp_path)) in str(failed.value)


def test_a_log_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    (folder := tmp_path / "a file where a folder is needed").write_text("")
    with pytest.raises(EngineError, match=r"engine\.log: can't be written: "):
        open_engine(make_job(table(folder, input={}), "test"))


def test_the_cause_is_the_last_error_that_names_one(tmp_path: Path) -> None:
    lines = [
        "WARNING: failed to raise a limit",
        "RuntimeError: device-side assert",
        "EngineDeadError: EngineCore died. See stack trace (above) for the root cause.",
        'INFO: 127.0.0.1 - "POST /v1/chat/completions HTTP/1.1" 500 Internal Server Error',
        "shutting down",
    ]
    command = python(f"print(*{lines}, sep='\\n')")
    with pytest.raises(StartFailed) as failed:
        open_engine(make_job(table(tmp_path, command, input={}), "test"))
    assert str(failed.value.fault) == "exit code 0: RuntimeError: device-side assert"


def test_a_command_of_the_jobs_own_that_runs_out_of_memory_is_not_tried_again(
    tmp_path: Path,
) -> None:
    """batchkit can't make it smaller."""
    code = "import sys; print('starting'); sys.exit('cudaMalloc failed: out of memory')"
    folder = write(tmp_path, 20, python(code))
    ran = batchkit("run", "job.toml", cwd=tmp_path)
    assert ran.returncode == 1
    assert "\n  cudaMalloc failed: out of memory" in ran.stderr
    assert (folder / "engine.log").read_text().count("starting") == 1


# --- a server that runs


def test_a_server_is_waited_for_and_ends_with_its_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No proxy is asked for it."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "")
    monkeypatch.setenv("BATCHKIT_TEST_RUN", str(tmp_path))
    command = f"sh -c 'sleep 600 & exec {SERVER} --loads-s 1'"
    job = make_job(table(tmp_path, command, input={}), "test")
    began = time.monotonic()
    with closing(open_engine(job)) as engine:
        assert time.monotonic() - began >= 1
        assert engine.versions["server"] == job.engine.server.command  # type: ignore[union-attr]
        (server,) = servers(tmp_path)
        children = server.children()
        assert [child.name() for child in children] == ["sleep"]
    assert not server.is_running()
    is_gone = lambda child: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE  # noqa: E731
    until(lambda: all(map(is_gone, children)))
    assert "serving at http://127.0.0.1:" in (job.folder / "engine.log").read_text()
    engine.close()


def test_a_run_starts_its_server_and_says_so_in_its_manifest(tmp_path: Path) -> None:
    folder = write(tmp_path, 50)
    ran = batchkit("run", "job.toml", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert {r["text"] for r in records(folder)} == {f"0 images, asked: say w{n}" for n in range(50)}
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["starts"][0]["engine"] == {"server": SERVER, "owned_by": "tests"}
    assert batchkit("run", "job.toml", cwd=tmp_path).returncode == 0


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_server_that_is_killed_is_replaced_by_one_of_the_same_model(
    is_changed: bool, tmp_path: Path, begin: Callable[[], subprocess.Popen[str]]
) -> None:
    weights = tmp_path / MODEL  # engine.model starts from the working directory
    weights.write_text("of yesterday")
    folder = write(tmp_path, 80, f"{SERVER} --latency-s 0.1")
    run = begin()
    until(some_done(folder, 20))
    if is_changed:
        weights.write_text("of a training that goes on")
    (server,) = servers(tmp_path)
    server.kill()
    _, err = run.communicate(timeout=120)
    assert "SIGKILL" in err
    assert servers(tmp_path) == []
    if is_changed:
        assert run.returncode == 1, err
        assert "other files than those that the run began with" in err
        assert "engine.model_files" in err
        assert len(records(folder)) < 80
        weights.write_text("of yesterday")
        assert batchkit("run", "job.toml", cwd=tmp_path).returncode == 0
    else:
        assert run.returncode == 0, err
        status = batchkit("status", "--json", folder, cwd=tmp_path)
        assert json.loads(status.stdout)["engine_restarts"] >= 1
    assert sorted(r["index"] for r in records(folder)) == list(range(80))
    assert {r["status"] for r in records(folder)} == {"ok"}


def test_a_server_that_grows_too_large_is_replaced_between_rows(tmp_path: Path) -> None:
    options = {"options": {"max_num_seqs": 4}}
    folder = write(tmp_path, 45, f"{SERVER} --latency-s 0.3 --leaks-mb 5", engine=options)
    ran = batchkit("run", "job.toml", "--set", "run.max_host_gb=0.2", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "engine restart: its process holds 0.2 GiB (run.max_host_gb = 0.2)" in ran.stderr
    assert "engine died" not in ran.stderr
    assert sorted(r["index"] for r in records(folder)) == list(range(45))


def test_a_server_that_prints_much_does_not_fill_the_disk(tmp_path: Path) -> None:
    command = f"{SERVER} --latency-s 0.3 --prints-mb 34 --dies-of w9"
    folder = write(tmp_path, 10, command)
    ran = batchkit("run", "job.toml", cwd=tmp_path)
    assert ran.returncode == 3, ran.stderr
    assert "serving at http://127.0.0.1:" in (folder / "engine.log").read_text()[-1000:]
    assert (folder / "engine.log").stat().st_size < 33 * 2**20


def test_the_row_that_kills_the_server_fails_alone_and_may_be_run_again_on_another(
    tmp_path: Path,
) -> None:
    folder = write(tmp_path, 60, f"{SERVER} --dies-of w37")
    ran = batchkit("run", "job.toml", cwd=tmp_path)
    assert ran.returncode == 3, ran.stderr
    failed = [r for r in records(folder) if r["status"] == "failed"]
    assert [(r["id"], r["error"]["kind"]) for r in failed] == [("q37", "engine_crash")]
    assert "exit code 3" in failed[0]["error"]["message"]
    assert sorted(r["index"] for r in records(folder)) == list(range(60))
    recovered = f'engine.server.command="{SERVER}"'
    again = batchkit("retry-failed", folder, "--set", recovered, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert records(folder)[-1]["text"] == "0 images, asked: say w37"


def test_a_server_that_answers_nobody_any_more_is_replaced(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        60,
        f"{SERVER} --hangs-once {tmp_path / 'hung'}",
        engine={"options": {"give_up_s": 1.0}},
        run={"row_timeout_s": 1.0},
        retry={"attempts": 3},
    )
    ran = batchkit("run", "job.toml", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "engine died (stall)" in ran.stderr
    assert sorted(r["index"] for r in records(folder)) == list(range(60))


# --- however the run ends


@pytest.mark.parametrize(
    ("signums", "options"),
    [
        ([signal.SIGINT], "--latency-s 0.2"),
        ([signal.SIGINT, signal.SIGINT], "--latency-s 0.2"),
        ([signal.SIGTERM], "--latency-s 0.2"),
        ([signal.SIGINT], "--loads-s 300"),
        ([signal.SIGKILL], "--latency-s 0.2"),
    ],
)
def test_a_server_ends_with_its_run_however_that_ends(
    signums: list[int],
    options: str,
    tmp_path: Path,
    begin: Callable[[], subprocess.Popen[str]],
) -> None:
    is_loading = "loads" in options
    folder = write(tmp_path, 100, f"{SERVER} {options}", run={"price_per_gpu_hour": 2.0})
    run = begin()
    until((lambda: len(servers(tmp_path)) == 1) if is_loading else some_done(folder, 10))
    (server,) = servers(tmp_path)
    for signum in signums:
        run.send_signal(signum)
        time.sleep(0.1)
    _, err = run.communicate(timeout=60)
    if signums == [signal.SIGKILL]:
        until(lambda: not server.is_running())
        return
    assert run.returncode == 128 + signums[0], err
    assert not server.is_running()
    assert is_loading or {r["status"] for r in records(folder)} == {"ok"}
    assert json.loads((folder / "manifest.json").read_text())["starts"][-1]["gpu_seconds"] > 0
