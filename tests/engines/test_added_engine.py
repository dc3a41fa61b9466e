"""Engines of another package that lose requests or return them twice."""

from __future__ import annotations

import os
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.support import own_process
from tests.support.dry_runs import prepare, records
from tests.support.paths import ROOT

pytestmark = [pytest.mark.usefixtures("in_an_empty_folder"), pytest.mark.slow]

MODULE = '''
import queue
import threading
import time

from batchkit.engines.base import EngineLoad, RenderedPrompt
from batchkit.types import Choice, Completion, Usage


class OurEngine:
    """Answers in a thread, after a while. Makes a mistake with row 3."""

    max_num_seqs = 4
    limits = {"max_num_seqs": 4}
    versions = {}

    def __init__(self, options):
        self.latency_s, self.mistake = options.get("latency_s", 0), options.get("mistake")
        self.waiting, self.done = queue.SimpleQueue(), queue.SimpleQueue()
        self.open = {}
        threading.Thread(target=self.work, daemon=True).start()

    def work(self):
        while True:
            request = self.waiting.get()
            time.sleep(self.latency_s)
            mistake = self.mistake if request.row.index == 3 else None
            for _ in range({"loses": 0, "repeats": 2}.get(mistake, 1)):
                self.done.put(Completion(request, [Choice("tea", "stop")], Usage(1, 1)))
            del self.open[request.key]

    def submit(self, request):
        self.open[request.key] = request
        self.waiting.put(request)

    def poll(self, timeout_s):
        try:
            return [self.done.get(timeout=timeout_s)]
        except queue.Empty:
            return []

    def abort(self, requests):
        pass

    def load(self):
        return EngineLoad(len(self.open), 0, 0.0, 0)

    def close(self):
        pass


class OurPreflight:
    def render(self, request):
        return RenderedPrompt("", 1)


def open_engine(job):
    return OurEngine(job.engine.options)


def open_preflight(job):
    return OurPreflight()
'''


@pytest.fixture(autouse=True)
def package(in_an_empty_folder: None) -> None:
    about = Path("site/ours-1.0.dist-info")
    about.mkdir(parents=True)
    Path("site/our_engine.py").write_text(MODULE)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: ours\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[batchkit.engines]\nours = our_engine\n")


def run() -> CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(Path("site").resolve())])
    return own_process.batchkit("run", "job.toml", cwd=Path(), timeout_s=60, PYTHONPATH=path)


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("loses", 'engine.kind = "ours": row 3 (id 3) never came back'),
        ("repeats", 'engine.kind = "ours": row 3 (id 3) came back twice'),
    ],
)
def test_a_request_that_an_engine_loses_or_repeats_stops_the_run(mistake: str, said: str) -> None:
    prepare(20, engine={"kind": "ours", "options": {"mistake": mistake}})
    ended = run()
    assert ended.returncode == 1
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_slow_engine_loses_nothing() -> None:
    prepare(3, engine={"kind": "ours", "options": {"latency_s": 0.7}})
    ended = run()
    assert ended.returncode == 0, ended.stderr
    assert len(records()) == 3
