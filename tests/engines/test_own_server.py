"""A server that the run starts: found, waited for, replaced when it dies, and gone with the run."""

from __future__ import annotations

import os
import re
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

from batchkit.config.loading import make_job
from batchkit.config.server_command import llama_server, what_decides_answers
from batchkit.config.tables import JobConfig
from batchkit.engines.faults import StartFailed
from batchkit.engines.openai.own_server import claimed_port
from batchkit.engines.registry import open_engine, open_preflight
from batchkit.errors import EngineError, JobError
from batchkit.storage.identity import differences, identity
from tests.support import own_process
from tests.support.chat_server import MODEL
from tests.support.command_line import batchkit
from tests.support.dry_runs import LOG, RUN, manifest
from tests.support.paths import ROOT
from tests.support.server_runs import records, write_job
from tests.support.waiting import until

pytestmark = [pytest.mark.usefixtures("in_an_empty_folder"), pytest.mark.slow]

# -S: it needs no package, and starts sooner.
SERVER = f"{shlex.quote(sys.executable)} -S -m tests.support.chat_server --port {{port}}"


@pytest.fixture(autouse=True)
def _servers_find_this_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def job(command: str = SERVER, **engine: Any) -> JobConfig:
    """``engine``: keys of its table."""
    its = {"kind": "openai-server", "model": MODEL, "server": {"command": command}, **engine}
    return make_job({"name": "a", "engine": its}, "test")


def servers() -> list[psutil.Process]:
    """The servers that this test's run has started and that are alive."""
    mine = []
    for process in psutil.process_iter():
        try:
            is_ours = process.environ().get("BATCHKIT_TEST_RUN") == str(Path.cwd())
            if is_ours and process.cmdline()[2:4] == ["-m", "tests.support.chat_server"]:
                mine.append(process)
        except psutil.Error:
            continue
    return mine


def begin() -> subprocess.Popen[str]:
    """``batchkit run job.toml`` in the background, its processes marked."""
    return own_process.begin("run", "job.toml", cwd=Path.cwd(), BATCHKIT_TEST_RUN=str(Path.cwd()))


def some_done(at_least: int) -> Callable[[], bool]:
    return lambda: LOG.exists() and len(LOG.read_bytes().splitlines()) >= at_least


# --- what the job file says


def test_a_gguf_file_has_a_command_with_room_for_all_its_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine: dict[str, Any] = {"model": "my models/a.gguf", "server": {}}
    with pytest.raises(JobError, match=r"engine\.options\.max_model_len is missing"):
        open_preflight(job(**engine))
    engine["options"] = {"max_model_len": 4096, "max_num_seqs": 8}
    open_preflight(job(**engine))
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
    command: str, is_another: bool
) -> None:
    begun = identity(job("llama-server -m a.gguf -c 8192 -np 8 --port {port}"))
    keys = [message.partition(": ")[0] for message in differences(begun, identity(job(command)))]
    assert keys == ["engine.server.command"] * is_another


def test_options_of_speed_decide_no_answers() -> None:
    decides = what_decides_answers("vllm serve m --enforce-eager --dtype half")
    assert decides == ["vllm", "serve", "m", "--dtype", "half"]
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
    tmp_path: Path, name: str, command: str
) -> None:
    file, log = tmp_path / name, tmp_path / "server.log"
    file.parent.mkdir(exist_ok=True)
    file.write_text("one")
    log.write_text("one")
    command = command.replace("SERVER", f"{SERVER} --log-file {log}")
    command = command.replace("FOLDER", str(tmp_path))
    begun = identity(made := job(command))
    log.write_text("two")
    assert differences(begun, identity(made)) == []
    file.write_text("two")
    (message,) = differences(begun, identity(made))
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
        (
            "lama-server -m x --port {port}",
            60,
            ["engine.server.command: program 'lama-server' not"],
        ),
        ("FOLDER/serve {port}", 60, ["serve: can't be started: Exec format error"]),
        (f"{SERVER} {'x' * 2**17}", 60, ["at most 16,384; put the command into a script"]),
        (python(ENDS), 60, ["ready (exit code 5", "\n  unknown model tiny", "output/a/engine.log"]),
        (python(HANGS), 1, ["1 s (engine.server.start_timeout_s)", "/health", "\n  thinking"]),
    ],
    ids=["no program", "no machine code", "too long", "it ends", "it hangs"],
)
def test_a_server_that_does_not_start_is_reported_with_its_reason(
    command: str, timeout_s: float, words: list[str], tmp_path: Path
) -> None:
    (tmp_path / "serve").write_bytes(b"\x7fELF nonsense")
    (tmp_path / "serve").chmod(0o755)
    command = command.replace("FOLDER", str(tmp_path))
    server = {"command": command, "start_timeout_s": timeout_s}
    with pytest.raises((JobError, EngineError)) as failed:
        open_engine(job(server=server)).close()
    for part in words:
        assert part in str(failed.value)


def test_a_log_that_can_not_be_written_is_named() -> None:
    Path("output").write_text("")  # where a folder is needed
    with pytest.raises(EngineError, match=r"engine\.log: can't be written: "):
        open_engine(job())


def test_the_cause_is_the_last_error_that_names_one() -> None:
    lines = [
        "WARNING: failed to raise a limit",
        "RuntimeError: device-side assert",
        "EngineDeadError: EngineCore died. See stack trace (above) for the root cause.",
        'INFO: 127.0.0.1 - "POST /v1/chat/completions HTTP/1.1" 500 Internal Server Error',
        "shutting down",
    ]
    with pytest.raises(StartFailed) as failed:
        open_engine(job(python(f"print(*{lines}, sep='\\n')")))
    assert str(failed.value.fault) == "exit code 0: RuntimeError: device-side assert"


def test_a_command_of_the_jobs_own_that_runs_out_of_memory_is_not_tried_again() -> None:
    """batchkit can't make it smaller."""
    code = "import sys; print('starting'); sys.exit('cudaMalloc failed: out of memory')"
    write_job(python(code), 20)
    ran = batchkit("run", "job.toml")
    assert ran.exit_code == 1
    assert "\n  cudaMalloc failed: out of memory" in ran.stderr
    assert (RUN / "engine.log").read_text().count("starting") == 1


# --- a server that runs


def test_a_server_is_waited_for_and_ends_with_its_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No proxy is asked for it."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "")
    monkeypatch.setenv("BATCHKIT_TEST_RUN", str(Path.cwd()))
    command = f"sh -c 'sleep 600 & exec {SERVER} --loads-s 1'"
    began = time.monotonic()
    with closing(open_engine(job(command))) as engine:
        assert time.monotonic() - began >= 1
        assert engine.versions["server"] == command
        (server,) = servers()
        children = server.children()
        assert [child.name() for child in children] == ["sleep"]
    assert not server.is_running()
    is_gone = lambda child: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE  # noqa: E731
    until(lambda: all(map(is_gone, children)))
    assert "serving at http://127.0.0.1:" in (RUN / "engine.log").read_text()
    engine.close()


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_server_that_is_killed_is_replaced_by_one_of_the_same_model(is_changed: bool) -> None:
    weights = Path(MODEL)  # engine.model starts from the working directory
    weights.write_text("of yesterday")
    write_job(f"{SERVER} --latency-s 0.1", 80)
    run = begin()
    until(some_done(20))
    if is_changed:
        weights.write_text("of a training that goes on")
    (server,) = servers()
    server.kill()
    _, err = run.communicate(timeout=120)
    assert "SIGKILL" in err
    assert servers() == []
    if is_changed:
        assert run.returncode == 1, err
        assert "files have changed since the run began" in err
        assert "engine.model_files" in err
        assert len(records()) < 80
        weights.write_text("of yesterday")
        assert batchkit("run", "job.toml").exit_code == 0
    else:
        assert run.returncode == 0, err
        assert batchkit("status", "--json", RUN).json["engine_restarts"] >= 1
    assert [(r["index"], r["status"]) for r in records()] == [(n, "ok") for n in range(80)]


def test_a_server_that_grows_too_large_is_replaced_between_rows() -> None:
    command = f"{SERVER} --latency-s 0.3 --leaks-mb 5"
    write_job(command, 90, engine={"options": {"max_num_seqs": 4}}, run={"max_host_gb": 0.2})
    ran = batchkit("run", "job.toml")
    assert ran.exit_code == 0, ran.stderr
    used = r"engine restart: the engine's process uses 0\.\d GiB \(run\.max_host_gb = 0\.2\)"
    assert re.search(used, ran.stderr), ran.stderr
    assert "engine died" not in ran.stderr
    assert [r["index"] for r in records()] == list(range(90))


def test_a_server_that_prints_much_does_not_fill_the_disk() -> None:
    write_job(command := f"{SERVER} --latency-s 0.3 --prints-mb 34", 10)
    ran = batchkit("run", "job.toml")
    assert ran.exit_code == 0, ran.stderr
    assert [r["text"] for r in records()] == [f"0 images, asked: row {n}" for n in range(10)]
    assert manifest()["starts"][0]["engine"] == {"server": command, "owned_by": "tests"}
    assert "engine.log was cut here" in (RUN / "engine.log").read_text()[:100]
    assert (RUN / "engine.log").stat().st_size < 33 * 2**20


def test_the_row_that_kills_the_server_fails_alone_and_may_be_run_again_on_another() -> None:
    write_job(f"{SERVER} --dies-of 37", 60)
    ran = batchkit("run", "job.toml")
    assert ran.exit_code == 3, ran.stderr
    assert [r["index"] for r in records()] == list(range(60))
    (failed,) = (r["error"] for r in records() if r["status"] == "failed")
    assert failed["kind"] == "engine_crash"
    assert "exit code 3" in failed["message"]
    again = batchkit("retry-failed", RUN, "--set", f'engine.server.command="{SERVER}"')
    assert again.exit_code == 0, again.stderr
    assert [r["text"] for r in records() if r["index"] == 37] == [None, "0 images, asked: row 37"]


def test_a_server_that_answers_nobody_any_more_is_replaced() -> None:
    limits = {"engine": {"options": {"give_up_s": 1.0}}, "run": {"row_timeout_s": 1.0}}
    write_job(f"{SERVER} --hangs-once {Path.cwd() / 'hung'}", 60, retry={"attempts": 3}, **limits)
    ran = batchkit("run", "job.toml")
    assert ran.exit_code == 0, ran.stderr
    assert "engine died (stall)" in ran.stderr
    assert [r["index"] for r in records()] == list(range(60))


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
def test_a_server_ends_with_its_run_however_that_ends(signums: list[int], options: str) -> None:
    is_loading = "loads" in options
    write_job(f"{SERVER} {options}", 100, budget={"price_per_gpu_hour": 2.0})
    run = begin()
    until((lambda: len(servers()) == 1) if is_loading else some_done(10))
    (server,) = servers()
    for signum in signums:
        run.send_signal(signum)
        time.sleep(0.1)
    _, err = run.communicate(timeout=60)
    if signums == [signal.SIGKILL]:
        until(lambda: not server.is_running())
        return
    assert run.returncode == 128 + signums[0], err
    assert not server.is_running()
    assert is_loading or {r["status"] for r in records()} == {"ok"}
    assert manifest()["starts"][-1]["gpu_seconds"] > 0
