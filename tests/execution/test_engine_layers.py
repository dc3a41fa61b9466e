"""Engine layers of another package: one file and its entry points, installed beside batchkit."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from subprocess import CompletedProcess, Popen
from typing import Any

import pytest

from tests.support import own_process
from tests.support.dry_runs import LOG, RUN, manifest, prepare, records, write_job, write_rows
from tests.support.plugin import installed
from tests.support.waiting import until

pytestmark = [pytest.mark.usefixtures("in_an_empty_folder"), pytest.mark.slow]

MODULE = '''
from msgspec.structs import replace

from batchkit.execution.engine_layer import EngineLayer, asked_again
from batchkit.types import Choice, Completion, Usage


class Counting(EngineLayer):
    """Counts what goes down and what comes back."""

    n_down = n_up = 0

    def submit(self, request):
        self.n_down += 1
        super().submit(request)

    def poll(self, timeout_s):
        done = super().poll(timeout_s)
        self.n_up += len(done)
        return done

    def close(self):
        with open("counted.txt", "a") as file:
            file.write(f"{self.n_down} {self.n_up}\\n")
        super().close()


class FromDictionary(EngineLayer):
    """Answers some rows without the engine."""

    def __init__(self, below, *, answers: dict[str, str] = {}):
        super().__init__(below)
        self.answers, self.ready = answers, []

    def submit(self, request):
        text = self.answers.get(request.row.id)
        if text is None:
            super().submit(request)
        else:
            self.ready.append(Completion(request, [Choice(text, "stop")], Usage(0, 0)))

    def poll(self, timeout_s):
        ready, self.ready = self.ready, []
        return [*ready, *super().poll(0 if ready else timeout_s)]


class Again(EngineLayer):
    """Asks a second time for each answer, with another temperature."""

    def __init__(self, below, *, temperature: float):
        super().__init__(below)
        self.temperature, self.asked, self.first = temperature, set(), {}

    def poll(self, timeout_s):
        done = []
        for completion in super().poll(timeout_s):
            request = completion.request
            if request.key in self.asked:
                self.asked.remove(request.key)
                first = self.first.pop(request.key)
                done.append(replace(completion, earlier_usage=first))
            else:
                self.asked.add(request.key)
                sampling = {**request.sampling, "temperature": self.temperature}
                self.first[request.key] = completion.usage
                self.below.submit(asked_again(request, sampling))
        return done


class Faulty(EngineLayer):
    """Makes a mistake."""

    def __init__(self, below, *, mistake: str):
        super().__init__(below)
        self.mistake = mistake

    def submit(self, request):
        if self.mistake != "drops" or request.row.id != "3":
            super().submit(request)

    def poll(self, timeout_s):
        done = super().poll(timeout_s)
        if done and self.mistake == "raises":
            raise KeyError("nothing there")
        if self.mistake == "repeats":
            return [*done, *done]
        return [one for one in done if self.mistake == "drops" or one.request.row.id != "3"]


class Late(EngineLayer):
    """Returns answers only after the engine has been idle for some polls."""

    def __init__(self, below):
        super().__init__(below)
        self.ready, self.n_idle = [], 0

    @property
    def unanswered(self):
        return super().unanswered + len(self.ready)

    def poll(self, timeout_s):
        done = super().poll(timeout_s)
        self.ready += done
        self.n_idle = 0 if done else self.n_idle + 1
        if self.n_idle < 3:
            return []
        ready, self.ready = self.ready, []
        return ready
'''


POINTS = """[batchkit.layers]
counting = our_layers:Counting
known = our_layers:FromDictionary
again = our_layers:Again
faulty = our_layers:Faulty
late = our_layers:Late
"""


def begin(*args: str) -> Popen[str]:
    path = installed(POINTS, our_layers=MODULE)
    return own_process.begin(*args, cwd=Path(), PYTHONPATH=path)


def run(*args: str) -> CompletedProcess[str]:
    with begin("run", "job.toml", *args) as process:
        stdout, stderr = process.communicate(timeout=60)
    return CompletedProcess(process.args, process.returncode, stdout, stderr)


def test_a_layer_counts_the_requests_of_a_run() -> None:
    prepare(300, engine={"layers": ["counting"]})
    ended = run()
    assert ended.returncode == 0, ended.stderr
    assert len(records()) == 300
    assert Path("counted.txt").read_text() == "300 300\n"


def test_a_layer_answers_from_a_dictionary_and_the_engine_answers_the_others() -> None:
    known = {"known": {"answers": {"1": "from the dictionary", "7": "this, too"}}}
    prepare(10, engine={"layers": [known, "counting"]})
    ended = run()
    assert ended.returncode == 0, ended.stderr
    texts = {record["id"]: record["text"] for record in records()}
    assert (texts["1"], texts["7"], len(texts)) == ("from the dictionary", "this, too", 10)
    assert Path("counted.txt").read_text() == "8 8\n", "the layer below gets the others"


def test_a_layer_that_asks_again_works_with_steps_and_is_continued_after_a_kill() -> None:
    steps = [
        {"name": "a", "prompt": {"user": "{{ q }}"}},
        {"name": "b", "prompt": {"user": "more"}},
    ]
    options: dict[str, Any] = {"latency_s": 0.1}
    layers = ["counting", {"again": {"temperature": 0.5}}]
    write_rows(20)
    engine = {"layers": layers, "options": options}
    write_job(engine=engine, steps=steps, prompt=None, run={"max_in_flight": 2})
    process = begin("run", "job.toml")
    until(lambda: LOG.exists() and LOG.read_bytes().count(b"\n") >= 4)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    ended = run()
    assert ended.returncode == 0, ended.stderr
    assert sorted(record["index"] for record in records()) == [*range(20)]
    assert {record["generations"] for record in records()} == {2}


def test_the_tokens_of_an_answer_that_a_layer_dropped_are_counted_also_after_a_retry() -> None:
    retry = {"reask": 1, "reask_note": "Once more."}
    extract = {"regex": {"pattern": "nothing like this (.*)"}}
    engine = {"layers": [{"again": {"temperature": 0.5}}]}
    scoring = {"extract": extract, "reference": "q", "scorers": ["em"]}
    prepare(3, engine=engine, retry=retry, scoring=scoring)
    ended = run()
    assert ended.returncode == 0, ended.stderr
    of_answer = records()[0]["usage"]["completion_tokens"]
    assert of_answer > 0
    for record in records():
        assert record["earlier_usage"]["completion_tokens"] == 3 * of_answer


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("raises", "engine.layers.faulty: KeyError: 'nothing there'; run.log has the traceback"),
        ("repeats", "engine.layers.faulty: row 0 (id 0) came back twice; correct the code"),
        ("loses", "engine.layers.faulty: row 3 (id 3) never came back; correct the code"),
        ("drops", "engine.layers.faulty: row 3 (id 3) never came back; correct the code"),
    ],
)
def test_a_mistake_of_a_layer_stops_the_run_and_names_it(mistake: str, said: str) -> None:
    layers = ["counting", {"faulty": {"mistake": mistake}}, "late"]
    prepare(5, engine={"layers": layers})
    ended = run()
    assert ended.returncode == 1
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
    assert ("our_layers.py" in (RUN / "run.log").read_text()) == (mistake == "raises")


def test_a_layer_may_hold_answers_while_the_engine_is_idle_if_it_counts_them() -> None:
    prepare(5, engine={"layers": ["late"]})
    ended = run()
    assert ended.returncode == 0, ended.stderr
    assert len(records()) == 5


def test_layers_belong_to_the_identity_of_a_run() -> None:
    prepare(2, engine={"layers": ["counting"]})
    run()
    assert manifest()["identity"]["job"]["engine.layers"] == {"counting": {}}
    write_job()
    ended = run()
    assert ended.returncode == 2
    assert "engine.layers" in ended.stderr
    assert json.loads((RUN / "manifest.json").read_text())["identity"]["job"]["engine.layers"]


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        (
            ["counted"],
            'engine.layers: found "counted", expected "counting", "known", "again", "faulty" or "late"',
        ),
        (["again"], "engine.layers.again.temperature: this key is missing"),
        ([{"counting": {"n": 3}}], "engine.layers.counting.n: unknown key"),
    ],
    ids=str,
)
def test_wrong_layers_are_named(layers: Any, said: str) -> None:
    prepare(2, engine={"layers": layers})
    ended = run()
    assert ended.returncode == 2
    assert said in ended.stderr


def test_without_a_package_no_layer_is_known() -> None:
    prepare(2, engine={"layers": ["counting"]})
    ended = own_process.batchkit("run", "job.toml", cwd=Path())
    assert ended.returncode == 2
    said = 'engine.layers: found "counting", but no installed package has a name for this key'
    assert said in ended.stderr
