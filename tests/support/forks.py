"""Python programs that start as forks of one process, which has imported once what all tests need.

``Fork`` is ``subprocess.Popen`` for commands of the form ``python -m MODULE …``, whose module has a
function ``main``: a new process with its own descriptors, environment, working directory and process
group, a real process id and a real exit code. What it saves is the import of vLLM, about ten CPU
seconds each time. ``LightFork`` is for what needs no model, and saves about one.

``python -m tests.support.forks FD`` is the fork server. It imports, starts no thread, opens no device,
and forks for each request received over FD. It ends with the process that started the tests, which gives the
other end to all that ask (``offer``): pytest-xdist's processes, and workers on Ray. A
``Fork`` that runs a command has such a server of its own, forked from it at its beginning, from which
its ``Launcher`` gets the engines' launchers: so they are below the command in the tree of processes.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from batchkit.engines.process.launcher import Launcher
from batchkit.isolation import server
from batchkit.isolation.child import die_with_parent
from tests.support.paths import ROOT

LAUNCHER = "batchkit.isolation.server"
COMMANDS = (
    "batchkit.cli",
    "batchkit.commands.export",
    "batchkit.commands.report",
    "batchkit.commands.run",
    "batchkit.commands.view.server",
    "batchkit.runs.status",
    "batchkit.engines.dry_run",
    "batchkit.engines.openai",
    "batchkit.execution.processor",
    "batchkit.serve.batch_routes",
    "batchkit.serve.flex_routes",
    "batchkit.serve.file_routes",
    "batchkit.serve.server",
    "batchkit.sources.lines",
    "numpy",
    "psutil",
    "rouge_score.rouge_scorer",
    "sacrebleu.metrics.bleu",
    "uvicorn.protocols.http.h11_impl",
)
# What an engine of the tests imports beyond ``preload_engine``.
MODELS = (
    "batchkit.engines.process.child",
    "batchkit.engines.vllm.core",
    "mistral_common.tokens.tokenizers.mistral",
    "tests.support.failing_worker",
    "transformers.models.whisper.processing_whisper",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.lora.punica_wrapper.punica_cpu",
    "vllm.lora.worker_manager",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.models.qwen2",
    "vllm.model_executor.models.qwen3_vl",
    "vllm.model_executor.models.whisper",
    "vllm.model_executor.warmup.kernel_warmup",
    "vllm.plugins.lora_resolvers.filesystem_resolver",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.pool.flash_maxsim",
    "vllm.v1.worker.cpu_model_runner",
)


class _Request(NamedTuple):
    """``numbers`` are the descriptors that the fork gets, as it will know them."""

    module: str
    arguments: Sequence[str]
    cwd: str
    finds_in_cwd: bool
    environment: Mapping[str, str]
    numbers: Sequence[int]
    new_session: bool
    process_group: int
    has_vllm: bool


STACKS = signal.SIGUSR2  # a fork prints its threads' stacks
_MOST_SAID = 100  # bytes of a process id, or an exit code
_OFFERED = "BATCHKIT_TEST_FORKS"  # where
_started: dict[bool, socket.socket] = {}  # whether they have imported vLLM
_servers: dict[bool, socket.socket] = {}  # the same, of those that this process uses
_server_below: int | None = None  # its process id, where it is this process's child


def offer(path: Path) -> None:
    """Give the fork servers to every process that asks at ``path``, in a thread."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(str(path))
    listening.listen()
    os.environ[_OFFERED] = str(path)
    threading.Thread(target=_offer, args=(listening,), daemon=True).start()


def _offer(listening: socket.socket) -> None:
    while True:
        connection, _ = listening.accept()
        with connection, suppress(OSError):  # it has ended
            has_vllm = connection.recv(1) == b"1"
            if has_vllm not in _started:
                _started[has_vllm] = _start(has_vllm)
            socket.send_fds(connection, [server.READY], [_started[has_vllm].fileno()])


def _start(has_vllm: bool) -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), str(int(has_vllm))],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            start_new_session=True,
        )
    atexit.register(process.wait)
    atexit.register(process.kill)
    return ours


def vllm_is_used() -> bool:
    """Whether this process has asked for a fork that has imported vLLM."""
    return True in _servers


def _connected(has_vllm: bool) -> socket.socket:
    """To the fork server. A request is one message, so that several processes may send theirs over one socket."""
    if has_vllm not in _servers:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
            asking.connect(os.environ[_OFFERED])
            asking.send(b"1" if has_vllm else b"0")
            _, (fd,), _, _ = socket.recv_fds(asking, 1, 1)
        _servers[has_vllm] = socket.socket(fileno=fd)
    return _servers[has_vllm]


class Fork(subprocess.Popen[Any]):
    """The process is not this one's child: the fork server waits for it, and sends its exit code."""

    _has_vllm = True
    _life: socket.socket | None = None

    def _execute_child(self, args: Any, *rest: Any) -> None:  # type: ignore[override]
        (_, _, _, pass_fds, cwd, env, _, _, _, *pipes) = rest
        stdin, stdin_ours, stdout_ours, stdout, stderr_ours, stderr = pipes[:6]
        new_session, process_group = pipes[-2:]
        words = [os.fspath(word) for word in args]
        assert words[0] == sys.executable
        module = words.index("-m") + 1
        standard = [
            given if given != -1 else own for own, given in enumerate((stdin, stdout, stderr))
        ]
        request = _Request(
            "batchkit.__main__" if words[module] == "batchkit" else words[module],
            words[module + 1 :],
            str(Path(cwd or ".").absolute()),
            "-P" not in words[:module],
            dict(os.environ if env is None else env),
            [0, 1, 2, *pass_fds],
            new_session,
            process_group,
            self._has_vllm,
        )
        self._life, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            fds = [theirs.fileno(), *standard, *pass_fds]
            socket.send_fds(_connected(self._has_vllm), [pickle.dumps(request)], fds)
        self.pid = int(self._life.recv(_MOST_SAID).removeprefix(server.READY))
        self._child_created = True
        self._close_pipe_fds(stdin, stdin_ours, stdout_ours, stdout, stderr_ours, stderr)  # type: ignore[attr-defined]

    def __del__(self, *_: Any) -> None:
        """There is no child to wait for. ``subprocess`` would keep this object and ask it again at each
        later start; in a garbage cycle ``_life`` is closed by then, and its number is another file's."""

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        return self._ended_within(0)

    def _wait(self, timeout: float | None) -> int:
        code = self._ended_within(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def _ended_within(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and self._life is not None:
            self._life.settimeout(timeout_s)
            try:
                code = self._life.recv(_MOST_SAID)
            except (TimeoutError, BlockingIOError):
                return None
            # Without one, the server was killed, and this process with it.
            self.returncode = int(code) if code else -signal.SIGKILL
            self._life.close()
        return self.returncode


class LightFork(Fork):
    """For a command that loads no model."""

    _has_vllm = False


def fork_engines() -> None:
    """In the process of a worker on Ray: its engines are forks, too. Here and not in ``ray_head.py``, because each
    such process imports this module."""
    Launcher.start = Fork


def _serve(control: socket.socket) -> Callable[[], None]:
    """Fork for each request until the other end is closed. Returns, in each fork, what it does."""
    fork = server.serve(control, ends_with_caller=False)
    if fork is None:
        os._exit(0)
    request: _Request = pickle.loads(fork.message)
    _group(request)
    fork.report()  # from now on it can be sent signals, as a group, too
    _take_over(request, fork.fds)
    return lambda: _run(request)


def _group(request: _Request) -> None:
    if request.new_session:
        os.setsid()
    elif request.process_group != -1:
        os.setpgid(0, request.process_group)


def _take_over(request: _Request, fds: Sequence[int]) -> None:
    """Become the process that was asked for, with nothing of the server's."""
    _servers.clear()
    high = max([*request.numbers, *fds]) + 1  # above all of them, so that none is overwritten
    moved = [os.dup2(fd, high + n) for n, fd in enumerate(fds)]
    for fd, number in zip(moved, request.numbers, strict=True):
        os.dup2(fd, number)
    kept = sorted(request.numbers)
    for low, up in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(low + 1, up)
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ.update(request.environment)
    tempfile.tempdir = None  # the server may have asked for its own


def _run(request: _Request) -> None:
    faulthandler.register(STACKS)
    if request.has_vllm and request.module != LAUNCHER:
        _fork_a_server()
    sys.path[:0] = filter(None, request.environment.get("PYTHONPATH", "").split(os.pathsep))
    if request.finds_in_cwd:
        sys.path.insert(0, request.cwd)
    sys.argv = [request.module, *request.arguments]
    importlib.import_module(request.module).main()


def _fork_a_server() -> None:
    """For this process, while it has one thread and has opened nothing."""
    global _server_below
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _server_below = os.fork()
    if _server_below == 0:
        _server_below = None
        ours.close()
        die_with_parent()
        os.setpgid(0, 0)
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nothing, number)
        _end_as_python_does(lambda: _serve(theirs)())
    theirs.close()
    _servers[True] = ours
    Launcher.start = Fork


def _end_as_python_does(program: Callable[[], None]) -> None:
    """Without the seconds that it takes to free what vLLM has made."""
    code: Any = 0
    try:
        program()
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        if _server_below is not None:
            _servers[True].close()  # so it ends
            os.waitpid(_server_below, 0)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code or 0)


def main() -> None:
    from batchkit.engines.registry import preload_engine

    control = socket.socket(fileno=int(sys.argv[1]))
    has_vllm = bool(int(sys.argv[2]))
    die_with_parent()
    for name in COMMANDS:
        importlib.import_module(name)
    if has_vllm:
        preload_engine("vllm")
        for name in MODELS:
            importlib.import_module(name)
        _configure_vllm()
        _forget_ends()
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork would lack the other threads"
    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: (
        None
    )  # vLLM calls it, and then collects eight times, when an engine is closed
    _end_as_python_does(lambda: _serve(control)())


def _forget_ends() -> None:
    """Half a second of each fork's end: PyTorch takes its operators back, and Ray imports what it never used."""
    importlib.import_module("ray.dag.compiled_dag_node")
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False


def _configure_vllm() -> None:
    """What each engine would do again, half of its start: go through all loggers, and all modules.

    Its core and workers, if they are processes, are forks, as on a GPU; on a CPU they would import vLLM again.
    """
    from transformers.models.auto.video_processing_auto import video_processor_class_from_name
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging
    from vllm.platforms import current_platform
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor
    from vllm.v1.sample import sampler

    configure_logging(LoggingConfig())  # an engine whose environment says otherwise does it again
    current_platform.register_triton_kernel_overrides()
    current_platform.register_triton_kernel_overrides = lambda: None
    for module in (multiproc_executor, utils):
        module.get_mp_context = lambda: multiprocessing.get_context("fork")
    video_processor_class_from_name("")  # imports a hundred modules on its way
    # An engine that tells logprobs would first compile these two lines, for several seconds.
    compiled = sampler.batched_count_greater_than
    sampler.batched_count_greater_than = compiled._torchdynamo_orig_callable


if __name__ == "__main__":
    # As an import of its name, so that there is one of it.
    importlib.import_module("tests.support.forks").main()
