"""A template that takes for ever, or all memory, fails its row; the others are rendered as before."""

from __future__ import annotations

import copy
import datetime
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image

from batchkit.errors import EngineError, JobError, RenderTimeoutError, RowError, TemplateError
from batchkit.rendering.templates import RowTemplate
from tests.support.dry_runs import job
from tests.support.model_runs import write_job
from tests.support.own_process import batchkit
from tests.support.waiting import until

pytestmark = pytest.mark.slow

FIELDS = {
    "text": "some text",
    "xs": [{"a": "x", "b": ["p", "q"]}, {"a": "y", "b": []}],
    "wide": "%999999999d",
    "n": 3,
    "day": datetime.date(2026, 11, 22),
}
ENDLESS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ '%999999999d' % 1 }}",
    "{{ wide % 1 }}",
    "{{ lipsum(n=10**8) }}",
    "{{ xs | batch(10**9, 1) | list }}",
    "{{ 9**(9**9) }}",
    "{{ 'a' * 10**10 }}",
    "{{ '{:>9999999999}'.format(1) }}",
    "{{ text | center(10**9) }}",
    "{{ text | replace('', 'x' * 99999) | replace('x', 'y' * 99999) }}",
    "{{ range(99999) | join('x' * 999999) }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(99) }}",
    "{% set ns = namespace(x=text) %}{% for i in xs * 99 %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set n = namespace(x=1) %}{% for i in xs * 99 %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
]
HARMLESS = [
    "{{ text }}",
    "{% set a = text | upper %}{% if n == 3 %}{{ a }}{% else %}-{% endif %}",
    "{% for x in xs if x.b %}{{ loop.index }}. {{ x.a | trim }}{% if x.b %}!{% endif %}{% endfor %}",
    "{{ xs | map(attribute='a') | join(', ') }} {{ xs | tojson }}",
    "{{ ['A', 'B'][n - 2] }} {{ n + 1 }} {{ text[:4] ~ '…' }} {{ day.strftime('%d.%m.%Y') }}",
    "{{ xs[0].get('c', 'none') }} {{ text.split() | length }} {{ missing | default('no') }}",
]


def template(
    source: str, timeout_s: float = 60.0, key: str = "prompt.user", *, keeps_type: bool = False
) -> RowTemplate:
    return RowTemplate(job(run={"row_timeout_s": timeout_s}), key, source, keeps_type=keeps_type)


images = partial(template, key="prompt.images.0", keeps_type=True)


@pytest.mark.parametrize("source", ENDLESS)
def test_a_template_without_an_end_is_ended(source: str) -> None:
    with pytest.raises(RowError) as refused:
        template(source, timeout_s=0.2).text(FIELDS)
    assert refused.value.kind in ("timeout", "template")
    assert not refused.value.retryable
    if isinstance(refused.value, RenderTimeoutError):
        assert "prompt.user: not rendered within 0.2 s (run.row_timeout_s)" in str(refused.value)
    else:
        assert "memory" in str(refused.value) or "bytes" in str(refused.value)


@pytest.mark.parametrize("source", HARMLESS)
def test_what_is_bounded_by_the_row_needs_no_process(source: str) -> None:
    plain = template(source)
    assert not plain.is_apart
    before = psutil.Process().children()
    here = plain.text(FIELDS)
    assert psutil.Process().children() == before
    apart = template(MACRO + source)
    assert apart.is_apart
    assert apart.text(FIELDS) == here


MACRO = "{% macro m() %}{% endmacro %}"  # makes a template one that a process renders
LOOP = "{% for f in facts %}{{ f }}{{ n }}{% endfor %}"
ADS = {"ads": [{"copy": "Buy!"}, {"copy": "Now!"}], "none": {}}
ORDER = {"order": {"items": [1]}, "text": "a", "day": datetime.date(2026, 11, 22)}
NAMES = ("range", "dict", "namespace", "cycler", "joiner", "lipsum")
OPTIONAL = "{% if NAME is defined %}{{ NAME }}{% endif %}{{ NAME | d('-') }}"


@pytest.mark.parametrize("before", ["", MACRO])
@pytest.mark.parametrize(
    ("source", "fields", "expected"),
    [
        ("{{ order['items'] }}", ORDER, "[1]"),
        ("{{ ads | map(attribute='copy') | join(' ') }}", ADS, "Buy! Now!"),
        ("{{ ads[0].copy()['copy'] | upper }}", ADS, "BUY!"),
        ("{{ none['copy'] | default('-') }}", ADS, "-"),
        ("{{ a | indent }} {{ b | indent }}", {"a": ["a"], "b": "a\nb"}, "['a'] a\n    b"),
        ("{% for i in range(3) %}{{ i }}{% endfor %}", {"n": 1}, "012"),
        *(("{{ " + name + " }}", {name: "10-20"}, "10-20") for name in NAMES),
        *((LOOP + "{{ " + name + " }}", {name: "x", "facts": [], "n": 1}, "x") for name in NAMES),
        *((OPTIONAL.replace("NAME", name), {"n": 1}, "-") for name in NAMES),
    ],
)
def test_a_value_is_the_same_from_a_process(
    source: str, fields: dict[str, Any], expected: str, before: str
) -> None:
    """A key in brackets is no method; a field called like a function of Jinja's is the field; and no filter
    changes what the row holds."""
    as_it_was = copy.deepcopy(fields)
    assert template(before + source).text(fields) == expected
    assert fields == as_it_was


@pytest.mark.parametrize("before", ["", MACRO])
@pytest.mark.parametrize(
    ("source", "fields", "words"),
    [
        ("{{ nowhere }}", {"text": "a", "n": 1}, "'nowhere' is undefined; the row has text, n"),
        ("{{ text.nowhere }}", ORDER, "no attribute 'nowhere'"),
        ("{{ n // 0 }}", {"n": 1}, "ZeroDivisionError"),
        ("{{ text.__class__.__mro__ }}", ORDER, "unsafe"),
        ("{{ order.items }}", ORDER, r"a method of dict; .* write \['items'\]"),
        ("{{ text.title }}", ORDER, r"a method of str; .* write \['title'\]"),
        ("{{ day.ctime }}", ORDER, "a method of date"),
        ("{{ none['copy'] | upper }}", ADS, "no attribute 'copy'"),
        *(("{{ " + its + " }}", {"n": 1}, f"'{its}' is undefined; the row has n") for its in NAMES),
    ],
)
def test_an_error_is_the_same_from_a_process(
    source: str, fields: dict[str, Any], words: str, before: str
) -> None:
    """Jinja finds a method where a row has a field of that name, or lacks one; its text is an address."""
    with pytest.raises(TemplateError, match=words):
        template(before + source).text(fields)


@pytest.mark.parametrize("keeps_type", [False, True])
def test_a_field_called_self_is_refused(keeps_type: bool) -> None:
    """Jinja would fill in an object of its own, in every row."""
    with pytest.raises(JobError, match=r"prompt\.user: .*self is a reserved name of Jinja"):
        template("{{ self }}", keeps_type=keeps_type)


def test_an_image_expression_from_a_process_keeps_its_type() -> None:
    source = images("{{ [image] * n }}")
    assert source.value({"image": b"\x89PNG", "n": 2}) == [b"\x89PNG", b"\x89PNG"]


def test_a_path_template_without_an_end_is_ended() -> None:
    with pytest.raises(RenderTimeoutError, match=r"scoring\.table"):
        template("{{ lipsum(n=10**8) }}", 0.2, "scoring.table").text({})


def test_validate_and_dry_run_end_an_endless_row(tmp_path: Path) -> None:
    prompt, engine = {"user": "{{ 'a' * n }}"}, {"kind": "dry-run"}
    rows = [{"n": 10**10}, {"n": 1}]
    write_job(tmp_path, rows, prompt=prompt, engine=engine, run={"row_timeout_s": 5})
    for command in (["validate"], ["run", "--dry-run"]):
        shown = batchkit(*command, "job.toml", cwd=tmp_path)
        assert "GiB of memory" in shown.stdout + shown.stderr
        assert (shown.returncode == 0) == (command[0] == "run")


def test_the_process_of_a_thread_ends_with_it() -> None:
    thread = threading.Thread(target=template("{{ lipsum() }}").text, args=({},))
    before = psutil.Process().children()
    thread.start()
    thread.join()
    until(lambda: psutil.Process().children() == before)


def test_a_killed_run_leaves_no_process_behind(tmp_path: Path) -> None:
    program = (
        "from batchkit import JobConfig\n"
        "from batchkit.rendering.templates import RowTemplate\n"
        "job = JobConfig(engine={'kind': 'dry-run'})\n"
        "RowTemplate(job, 'k', '{{ lipsum() }}').text({})\n"
        "print('up', flush=True)\n"
        "RowTemplate(job, 'k', '{{ 9**(9**9) }}').text({})\n"
    )
    run = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert run.stdout.readline() == "up\n"
    (child,) = psutil.Process(run.pid).children()
    time.sleep(0.2)
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    run.stdout.close()
    until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_a_process_that_dies_while_it_answers_fails_the_row_alone() -> None:
    dies = InTheProcess(
        "import os, signal\nfrom multiprocessing.connection import Connection\n"
        "def half(self, sent):\n"
        "    os.write(self.fileno(), bytes(sent)[:len(sent) - 3])\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "Connection._send = half"
    )
    apart = template("{{ lipsum(1) }}{{ dies }}")
    with pytest.raises(TemplateError, match="died twice"):
        apart.text({"dies": dies})
    assert apart.text({"dies": 1})


def test_a_process_that_dies_as_it_starts_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\n[ -e {tmp_path}/tried ] && exec {sys.executable} "$@"\n'
        f"touch {tmp_path}/tried\nkill -9 $$\n"
    )
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert _in_a_thread(lambda: template("{{ lipsum(1) }}{{ n }}").text({"n": 7})).endswith("7")


def test_no_process_for_want_of_open_files_is_the_machines_error() -> None:
    apart, (soft, hard) = template("{{ lipsum(1) }}"), resource.getrlimit(resource.RLIMIT_NOFILE)

    def without_files() -> str:
        with open(os.devnull) as lowest:
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest.fileno(), hard))
            try:
                apart.text({})
            except EngineError as error:
                return str(error)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return "no error"

    assert "Too many open files" in _in_a_thread(without_files)


@pytest.mark.parametrize(
    "source",
    [
        "{{ q | tojson(indent=2) }}",
        "{{ q | replace('', '0123456789abcdef') | replace('', '0123456789abcdef') }}",
        "{{ q.replace('', '0123456789abcdef') }}",
        "{{ 'aaaaaaaaaaaaaaaa'" + " | replace('a', 'aaaaaaaaaaaaaaaa')" * 8 + " }}",
        "{{ q | unique | list | length }}",
    ],
)
def test_what_grows_without_bound_needs_a_process(source: str) -> None:
    assert template(source).is_apart


def test_an_image_expression_gives_the_rows_own_pictures() -> None:
    one, two = Image.new("RGB", (4, 2), "red"), Image.new("RGB", (4, 4), "blue")
    row = {"a": [one], "b": [two], "one": one, "raw": b"\x89PNG"}
    for expression, expected in (
        ("a + b", [one, two]),
        ("a[:1] + b[:1]", [one, two]),
        ("[one] + [raw]", [one, row["raw"]]),
    ):
        found = images("{{ " + expression + " }}").value(row)
        assert [*map(id, found)] == [*map(id, expected)]


def test_a_picture_does_not_leave_the_process() -> None:
    with pytest.raises(TemplateError, match=r"of type Image, .* that only names a field"):
        images("{{ [one] * 2 }}").value({"one": Image.new("RGB", (2, 2))})


def test_no_more_processes_render_at_once_than_there_are_cores(tmp_path: Path) -> None:
    busy = InTheProcess(
        "import os, time\nbegan = time.monotonic()\ntime.sleep(0.2)\n"
        f"open('{tmp_path}/' + str(os.getpid()), 'a').write(f'{{began}} {{time.monotonic()}}\\n')"
    )
    apart, count = template("{{ lipsum(1) }}{{ busy }}"), len(os.sched_getaffinity(0))
    threads = [
        threading.Thread(target=apart.text, args=({"busy": busy},)) for _ in range(2 * count + 2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans = [tuple(map(float, line.split())) for p in tmp_path.iterdir() for line in p.open()]
    assert len(spans) == len(threads)
    assert max(sum(a <= began < b for a, b in spans) for began, _ in spans) <= count


class InTheProcess:
    """Runs ``code`` in the process that it is sent to; there it is None."""

    def __init__(self, code: str) -> None:
        self._code = code

    def __reduce__(self) -> Any:
        return exec, (self._code, {})


def _in_a_thread(call: Callable[[], str]) -> str:
    """What ``call`` gives in a thread that has no process yet."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(call).result()
