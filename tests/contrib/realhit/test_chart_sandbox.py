"""Hostile code in a chart comes to nothing: each case alone, in the real sandbox."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from batchkit.contrib.realhit.chart import Chart, ChartScore, score_chart, score_charts
from batchkit.contrib.realhit.chart.sandbox import Sandbox

pytestmark = pytest.mark.slow

pd = pytest.importorskip("pandas")
pytest.importorskip("matplotlib")
pytest.importorskip("openpyxl")

IMPORTS = "import pandas as pd\nimport matplotlib.pyplot as plt\n"
DRAWN = "plt.bar([1, 2], [1, 2])\nplt.show()\n"
GOOD = Chart(IMPORTS + DRAWN, "BarChart", "[1, 2]", None)
SECRET = "batchkit-test-secret-5d1f"
STAT = ("st_size", "st_mtime", "st_mode")


Run = Callable[..., ChartScore]
Refused = Callable[[str], str]


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with closing(Sandbox()) as sandbox:
        assert score_chart(GOOD, sandbox, "fixed").passed
        yield sandbox


@pytest.fixture
def run(sandbox: Sandbox) -> Run:
    """The score of a chart that does ``body`` before it draws what the reference has.

    The same sandbox must score a good chart right after it.
    """

    def score(body: str, timeout_s: float | None = None) -> ChartScore:
        hostile = chart(f"{textwrap.dedent(body)}\n{DRAWN}")
        mine = sandbox if timeout_s is None else Sandbox(timeout_s)  # of the same server
        found = score_chart(hostile, mine, "fixed")
        assert score_chart(GOOD, sandbox, "fixed").passed
        return found

    return score


@pytest.fixture
def refused(run: Run) -> Refused:
    """The problem of a chart that must not run to its end."""

    def problem(body: str) -> str:
        found = run(body)
        assert not found.ecr
        assert not found.passed
        assert found.problem is not None
        return found.problem

    return problem


def chart(body: str, chart_type: str = "BarChart", reference: str = "[1, 2]") -> Chart:
    return Chart(f"{IMPORTS}{body}", chart_type, reference, None)


@pytest.fixture(scope="module", autouse=True)
def _folder_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests in another process have sandboxes, too, and theirs are none of what is left behind here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("sandboxes")))
        yield


def left_behind() -> set[str]:
    temporary = Path(tempfile.gettempdir())
    return {
        str(path)
        for folder in temporary.glob("batchkit-isolation-*")
        for path in (folder, *folder.iterdir())
    }


@pytest.fixture(autouse=True)
def _nothing_is_left(sandbox: Sandbox) -> Iterator[None]:
    us = psutil.Process()
    folders, processes = left_behind(), set(us.children(recursive=True))
    yield
    assert left_behind() == folders
    assert set(us.children(recursive=True)) == processes


# Time, memory, disk, output.


CATCHES_ALL = """\
import signal
for number in range(1, 32):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True:
    try:
        while True: pass
    except BaseException: pass
"""


@pytest.mark.parametrize(
    "body",
    [
        "while True: pass",
        CATCHES_ALL,
        "import time; time.sleep(60)",
        "while True: print('x' * 100_000)",
    ],
    ids=["loop", "catches all", "sleep", "print"],
)
def test_code_without_an_end_ends_with_its_time(run: Run, body: str) -> None:
    began = time.monotonic()
    assert run(body, 2).problem == "took longer than 2 s"
    assert time.monotonic() - began < 60


def test_threads_that_never_end_keep_nobody_waiting(run: Run) -> None:
    body = """\
    import threading
    def spin():
        while True: pass
    for _ in range(4):
        threading.Thread(target=spin).start()
    """
    found = run(body, 10)
    assert (found.ecr, found.passed) in [(True, True), (False, False)]


MANY_FILES = """\
import itertools
for number in itertools.count():
    with open(f'part{number}', 'wb') as part: part.write(bytes(2**23))
"""


# Files and secrets.


@pytest.mark.parametrize(
    "reading",
    [
        "open({path!r}).read()",
        "import os; os.open({path!r}, os.O_RDONLY)",
        "import pathlib; pathlib.Path({path!r}).read_bytes()",
        "import ctypes; assert ctypes.CDLL(None).open({path!r}.encode(), 0) >= 0",
    ],
)
def test_file_outside_is_not_read(refused: Refused, tmp_path: Path, reading: str) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text(SECRET)
    assert SECRET not in refused(reading.format(path=str(secret)))


@pytest.mark.parametrize(
    "path",
    [
        "~",
        "/",
        "/etc/shadow",
        "/etc/passwd",
        "/proc/self/environ",
        "/proc/1/environ",
        "/proc/{parent}/environ",
        "/proc/{parent}/mem",
        "{here}",
        "/dev/mem",
    ],
)
def test_home_and_system_are_not_read(refused: Refused, path: str) -> None:
    name = path.format(parent=os.getpid(), here=Path(__file__)).replace("~", str(Path.home()))
    body = f"import os\nos.listdir({name!r}) if os.path.isdir({name!r}) else open({name!r}).read(1)"
    problem = refused(body)
    assert "PermissionError" in problem or "FileNotFoundError" in problem


@pytest.mark.parametrize(
    "writing",
    [
        "open({path!r}, 'w')",
        "import os; os.open({path!r}, os.O_RDONLY | os.O_TRUNC)",
        "import os; os.truncate({path!r}, 0)",
        "import os; os.remove({path!r})",
        "import os; os.rename({path!r}, 'here')",
        "import os; os.link({path!r}, 'here')",
        "import os; os.chmod({path!r}, 0o777)",
        "import os; os.utime({path!r})",
        "import shutil; shutil.rmtree({path!r} + '/..')",
    ],
)
def test_files_outside_and_of_python_are_not_changed(
    refused: Refused, tmp_path: Path, writing: str
) -> None:
    kept = tmp_path / "kept.txt"
    kept.write_text("kept")
    python = Path(textwrap.__file__)  # may be read, so only the write is in question
    before = [getattr(python.stat(), name) for name in STAT]
    for path in (kept, python):
        refused(writing.format(path=str(path)))
    assert kept.read_text() == "kept"
    assert [getattr(python.stat(), name) for name in STAT] == before


def test_table_outlives_the_chart_that_removes_it(sandbox: Sandbox, tmp_path: Path) -> None:
    table = tmp_path / "health-table01.xlsx"
    pd.DataFrame({"v": [1, 2]}).to_excel(table, index=False)
    read = "df = pd.read_excel('table.xlsx')\nassert list(df['v']) == [1, 2]\n"
    ends = ("import os; os.remove('table.xlsx')\n", "open('table.xlsx', 'wb')\n", "")
    charts = [Chart(IMPORTS + read + end + DRAWN, "BarChart", "[1, 2]", table) for end in ends]
    found = [score_chart(chart, sandbox, "fixed") for chart in charts]
    assert [chart.passed for chart in found] == [False, False, True]
    assert list(pd.read_excel(table)["v"]) == [1, 2]


def test_environment_holds_no_secrets(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, SECRET)
    problem = refused("import os; raise ValueError(sorted(os.environ.items()))")
    assert "ValueError" in problem
    assert SECRET not in problem
    assert "TOKEN" not in problem


OF_LIBC = """\
import ctypes
libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_char_p
assert libc.getenv(b'HF_TOKEN') is None
"""


@pytest.mark.parametrize(
    "body", [OF_LIBC, "import os\nfor _ in range(1000): os.write(1, b'x' * 65536)"]
)
def test_what_is_below_python_holds_no_secret_and_goes_nowhere(
    run: Run, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    assert run(body).passed


# What must not run to its end: memory, files, processes, system calls, the way back.

WRITE_EVERYWHERE = """\
import os
for fd in range(64):
    try: os.write(fd, {data})
    except OSError: pass
"""
FLOOD = "while True:\n" + textwrap.indent(WRITE_EVERYWHERE.format(data="b'x' * 65536"), "  ")
TOO_MUCH = {
    "held = bytearray(10 * 2**30)": "(?i)memory",
    "import numpy; held = numpy.ones(10 * 2**27)": "(?i)memory",
    "held = []\nwhile True: held.append(bytearray(2**24))": "(?i)memory",
    "import mmap; held = mmap.mmap(-1, 10 * 2**30)": "(?i)memory",
    "open('big', 'wb').write(bytes(2**30 // 4))": "(?i)too large",
    MANY_FILES: "wrote",
}
FORBIDDEN = [
    "import os\nwhile True: os.fork()",
    "import os; os.system('touch escaped') and [][1]",
    "import subprocess; subprocess.run(['true'])",
    "import os; os.execv('/bin/true', ['true'])",
    "import os; os.posix_spawn('/bin/true', ['true'], {})",
    "import multiprocessing as m; p = m.Process(target=print); p.start()",
    "import os; os.kill(os.getppid(), 9)",
    "import os; os.kill(-1, 9)",
    "import os; os.kill(1, 0)",
    "import os; os.killpg(0, 9)",
    "import os; os.setsid()",
    "import os; os.memfd_create('x')",
    "import os; os.mkfifo('x')",
    "import os; os.symlink('/', 'x')",
    "import os; os.chroot('/')",
    "import os; os.setuid(0)",
    "import os; os.pidfd_open(os.getppid())",
    "import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1))",
    *(
        f"import socket; socket.socket(socket.{family}, socket.SOCK_DGRAM)"
        for family in ("AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK")
    ),
]
ENDS_ITSELF = {
    "import sys; sys.exit()": "^SystemExit",
    "raise KeyboardInterrupt": "^KeyboardInterrupt",
    "import os; os._exit(0)": "^the code ended its process with exit code 0",
    "import os; os._exit(7)": "^the code ended its process with exit code 7",
    "import os; os.abort()": "^killed by SIGABRT",
    "import signal; signal.raise_signal(40)": "^killed by signal 40",
    "import ctypes; ctypes.string_at(0)": "^killed by SIGSEGV",
    FLOOD: "result",
    "import os; os.closerange(0, 64)": "result",
}
NOT_ALLOWED = "PermissionError|Errno 1|IndexError|not allowed"


@pytest.mark.parametrize(
    ("body", "problem"),
    [*TOO_MUCH.items(), *((body, NOT_ALLOWED) for body in FORBIDDEN), *ENDS_ITSELF.items()],
    ids=lambda text: text[:30],
)
def test_code_that_needs_too_much_or_reaches_out_did_not_run(
    refused: Refused, body: str, problem: str
) -> None:
    assert re.search(problem, refused(body))


SYSTEM_CALLS = {
    "ptrace": 101, "mount": 165, "unshare": 272, "setns": 308, "bpf": 321, "io_uring_setup": 425, "keyctl": 250,
    "add_key": 248, "userfaultfd": 323, "process_vm_readv": 310, "process_vm_writev": 311, "perf_event_open": 298,
    "socketpair": 53, "vfork": 58, "execveat": 322, "init_module": 175, "reboot": 169, "open_by_handle_at": 304,
    "pidfd_getfd": 438, "clone3": 435, "fork as x32": 0x40000000 + 57,
}  # fmt: skip


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers are those of x86_64")
def test_system_calls_are_refused(run: Run) -> None:
    body = f"""\
    import ctypes, errno
    libc = ctypes.CDLL(None, use_errno=True)
    for name, number in {SYSTEM_CALLS}.items():
        assert libc.syscall(number, 0, 0, 0, 0, 0) == -1, name
        assert ctypes.get_errno() in (errno.EPERM, errno.ENOSYS), name
    """
    found = run(body)
    assert found.passed, found.problem


def test_listener_on_this_machine_hears_nothing(refused: Refused) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        port = listener.getsockname()[1]
        refused(f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)")
        refused(f"pd.read_csv('http://127.0.0.1:{port}/x.csv')")
        with pytest.raises(TimeoutError):
            listener.accept()


# The way back.


@pytest.mark.parametrize(
    "data",
    [
        "b'garbage'",
        "b'[' * 60000",
        "b'\\xff\\xfe'",
        "b'null'",
        "b'{}'",
        """b'{"problem": null, "y": [{"a": 1}]}'""",
        """b'{"problem": 5, "y": "x"}'""",
        """b'{"unconfined": "no"}'""",
    ],
)
@pytest.mark.parametrize("then", ["", "os._exit(0)"])
def test_garbage_on_the_way_back_is_no_score(refused: Refused, data: str, then: str) -> None:
    problem = refused(WRITE_EVERYWHERE.format(data=data) + then)
    assert "result" in problem


def test_values_as_large_as_they_come_are_no_score(sandbox: Sandbox) -> None:
    large = chart("plt.plot(range(300_000))\nplt.show()", "LineChart", "[[1]]")
    found = score_chart(large, sandbox, "fixed")
    assert (found.ecr, found.passed) == (True, False)
    assert found.problem is not None
    assert len(found.y) < 2**20


def test_what_comes_back_can_be_printed_and_stored(refused: Refused, sandbox: Sandbox) -> None:
    assert refused("raise ValueError('\\x1b[2J\\ud800')") == "ValueError: ?[2J?"
    found = score_chart(chart(f"print('\\ud800')\n{DRAWN}"), sandbox, "official")
    assert (found.ecr, found.passed) == (True, False)
    assert found.y.encode()


def test_evil_objects_in_the_chart_do_not_leave_it(sandbox: Sandbox) -> None:
    body = """\
    class Evil(float):
        def __repr__(self): return '__import__("os").getpid()'
    line, = plt.plot([1], [1])
    line.get_ydata = lambda *_: [Evil(1)]
    """
    evil = chart(f"{textwrap.dedent(body)}plt.show()", "LineChart", "[[2]]")
    assert not score_chart(evil, sandbox, "fixed").passed


# What is left.


def test_many_charts_leave_nothing_behind() -> None:
    fds = psutil.Process().num_fds()
    found = list(score_charts([GOOD] * 20, mode="fixed", workers=2))
    assert all(chart.passed for chart in found)
    assert psutil.Process().num_fds() == fds
    # the fixture looks for processes and folders


def test_charts_not_waited_for_leave_nothing_behind() -> None:
    endless = chart("while True: pass\nplt.show()")
    scores = score_charts([GOOD, endless, endless], mode="fixed", workers=2)
    assert next(scores).passed
    began = time.monotonic()
    scores.close()
    assert time.monotonic() - began < 12  # and not the 20 s that the charts have


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)}


SCORER = """\
import sys
from batchkit.contrib.realhit.chart import Chart, score_charts
code = "import pandas as pd\\nopen('began', 'w')\\nwhile True: pass\\nplt.show()"
list(score_charts([Chart(code, "BarChart", "[1]", None)], mode="fixed", workers=1))
"""


def test_killed_run_leaves_nothing_behind(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", SCORER], env=environment(tmp_path)) as scorer:
        deadline = time.monotonic() + 30
        while not list(tmp_path.rglob("began")) and time.monotonic() < deadline:
            time.sleep(0.05)
        started = psutil.Process(scorer.pid).children(recursive=True)
        assert len(started) >= 2
        scorer.kill()
    _, alive = psutil.wait_procs(started, timeout=10)
    assert not alive
    while list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not list(tmp_path.iterdir())


KILLED = """\
import psutil
from batchkit.contrib.realhit.chart import Chart, score_charts
good = Chart("import pandas as pd\\nplt.bar([1], [1])\\nplt.show()", "BarChart", "[1]", None)
scores = score_charts(iter([good, good]), mode="fixed", workers=1)
assert next(scores).passed
server, = psutil.Process().children()
assert "batchkit.contrib.realhit.chart.child" in server.cmdline()
server.kill()
assert next(scores).passed
scores.close()
"""


def test_killed_server_is_started_again(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED], env=environment(tmp_path), check=True)
    assert not list(tmp_path.iterdir())


WITHOUT_LANDLOCK = """\
import ctypes, struct, sys
from batchkit.contrib.realhit.chart import Chart, score_charts
from batchkit.contrib.realhit.chart.sandbox import SandboxError
def step(code, constant, true=0, false=0): return struct.pack("@HBBI", code, true, false, constant)
program = step(0x20, 0) + step(0x15, 444, 0, 1) + step(0x06, 0x50000 | 38) + step(0x06, 0x7FFF0000)
held = ctypes.create_string_buffer(program)
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, struct.pack("@HP", 4, ctypes.addressof(held)), 0, 0) == 0
def charts():
    raise AssertionError("a chart was taken")
    yield
try:
    score_charts(charts(), mode="fixed")
except SandboxError as error:
    print(error)
"""


def test_where_code_can_not_be_confined_none_is_run(tmp_path: Path) -> None:
    """A kernel without Landlock, by a filter that says so."""
    command = [sys.executable, "-c", WITHOUT_LANDLOCK]
    refusal = subprocess.check_output(command, env=environment(tmp_path), text=True)
    assert "no Landlock" in refusal
    assert "stay unscored" in refusal
