"""``retry.reask``: a row whose answer lacks what is looked for is asked again, and how that ends."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from batchkit.config.loading import make_job
from batchkit.config.tables import JobConfig
from batchkit.errors import ChangedError, JobError
from batchkit.execution.processor import ProductionBatchProcessor
from batchkit.storage.log import RESULTS
from batchkit.storage.newest import read_newest
from tests.support.chat_server import MODEL, ChatServer, Refused, error, serving
from tests.support.own_process import begin
from tests.support.paths import ROOT
from tests.support.rows import write_jsonl
from tests.support.waiting import until

pytestmark = pytest.mark.slow

VECTORS = ROOT.parent / "shared/realhit/metric_vectors.json"
NOTE = "Mind the form."
SHORT = {"max_tokens": 10}
FOUND = "so [Final Answer]: 7"


class Script:
    """What the server says to each row, one answer after another; the last one is repeated.

    A row is known by the first word of its prompt. ``asked`` keeps each row's prompts in order.
    """

    def __init__(self, **answers: list[str | Exception]) -> None:
        self.answers = answers
        self.asked: dict[str, list[str]] = defaultdict(list)
        self.bodies: dict[str, list[dict[str, Any]]] = defaultdict(list)

    def __call__(self, text: str, body: dict[str, Any]) -> str:
        name = text.split()[0]
        if name not in self.answers:
            return "the engine asks whether anybody is there"
        self.asked[name].append(text)
        self.bodies[name].append(body)
        answers = self.answers[name]
        answer = answers[min(len(self.asked[name]), len(answers)) - 1]
        if isinstance(answer, Exception):
            raise answer
        if "messages" not in body:
            return answer
        choices = [
            {"index": n, "message": {"content": answer}, "finish_reason": "stop"}
            for n in range(body.get("n", 1))
        ]
        usage = {"prompt_tokens": 1, "completion_tokens": 1}
        raise Refused(200, {"choices": choices, "usage": usage})  # to the letter, spaces and all

    @property
    def calls(self) -> dict[str, int]:
        return {name: len(prompts) for name, prompts in self.asked.items()}


def job(server: ChatServer, folder: Path, rows: list[dict[str, Any]], **tables: Any) -> JobConfig:
    made: dict[str, Any] = {
        "name": "reask",
        "input": {"path": str(write_jsonl(folder / "rows.jsonl", rows)), "id": "id"},
        "prompt": {"user": "{{ id }} {{ q }}"},
        "media": {"root": str(folder)},
        "engine": {"kind": "openai-server", "model": MODEL, "base_url": server.url},
        "output": {"dir": str(folder / "output")},
        "retry": {"reask": 2, "reask_note": NOTE},
        "scoring": {"extract": "final-answer", "reference": "a", "scorers": ["em"]},
    }
    for name, value in tables.items():
        made[name] = {**made.get(name, {}), **value} if value is not None else {}
    return make_job(made, "test")


def run(made: JobConfig) -> dict[str, dict[str, Any]]:
    """The newest records by id."""
    summary = ProductionBatchProcessor(made, quiet=True).process()
    return {record["id"]: record for record in summary.records()}


def row(name: str, **more: Any) -> dict[str, Any]:
    return {"id": name, "q": "?", "a": "7", **more}


def asked(script: Script, folder: Path, **tables: Any) -> dict[str, dict[str, Any]]:
    """The newest records, by id, of a row for each name in the script."""
    with serving(script) as server:
        return run(job(server, folder, [*map(row, script.answers)], **tables))


def test_only_a_row_without_an_answer_is_asked_again_and_its_note_stands_once(
    tmp_path: Path,
) -> None:
    script = Script(one=[FOUND], two=["hm", FOUND], three=["x", "y", "z", "never asked"])
    records = asked(script, tmp_path)
    assert script.calls == {"one": 1, "two": 2, "three": 3}
    assert script.asked["three"] == ["three ?", f"three ?\n{NOTE}", f"three ?\n{NOTE}"]
    outcomes = {name: (r["prediction"], r["scores"], r["attempt"]) for name, r in records.items()}
    assert outcomes == {
        "one": ("7", {"em": 1.0}, 1),
        "two": ("7", {"em": 1.0}, 2),
        "three": ("z", {"em": 0.0}, 3),
    }
    assert (tmp_path / "output/reask" / RESULTS).read_bytes().count(b"\n") == 3


def official() -> list[Any]:
    if not VECTORS.exists():
        return [pytest.param({}, marks=pytest.mark.skip(f"{VECTORS} is not on this machine"))]
    return list(json.loads(VECTORS.read_text())["parse"])


@pytest.mark.parametrize("vector", official())
def test_predictions_and_calls_are_those_of_the_official_code(
    tmp_path: Path, vector: dict[str, Any]
) -> None:
    script = Script(r=vector["responses"])
    note = vector["appended_on_last_call"].strip() or NOTE
    records = asked(script, tmp_path, retry={"reask_note": note})
    assert records["r"]["prediction"] == vector["prediction"]
    assert script.calls["r"] == vector["calls"]
    if vector["appended_on_last_call"]:
        assert script.asked["r"][-1] == "r ?" + vector["appended_on_last_call"]


def test_each_attempt_has_its_temperature(tmp_path: Path) -> None:
    script = Script(r=["x", "y", "z"])
    asked(script, tmp_path, retry={"temperatures": [0.1, 0.8]})
    assert [body["temperature"] for body in script.bodies["r"]] == [0.1, 0.8, 0.8]


@pytest.mark.parametrize(
    "refusal",
    [
        Refused(400, error("no more")),
        Refused(500, error("over this row")),
        Refused(400, error("too long", "exceed_context_size_error", n_prompt_tokens=9, n_ctx=5)),
        "   ",
    ],
)
def test_an_ask_that_fails_leaves_the_answer_before_it(
    tmp_path: Path, refusal: str | Exception
) -> None:
    script = Script(r=["an answer of sorts", refusal], other=[FOUND])
    records = asked(script, tmp_path)
    assert records["r"]["status"] == "ok"
    assert (records["r"]["text"], records["r"]["attempt"]) == ("an answer of sorts", 1)
    assert records["r"]["error"] is None


def test_an_ask_that_takes_too_long_leaves_the_answer_before_it(tmp_path: Path) -> None:
    def slow(text: str, body: dict[str, Any]) -> str:
        if NOTE in text:
            time.sleep(1.0)
        return "hm"

    with serving(slow) as server:
        made = job(server, tmp_path, [row("r")], run={"row_timeout_s": 0.2}, retry={"attempts": 1})
        records = run(made)
    assert (records["r"]["status"], records["r"]["text"]) == ("ok", "hm")


def test_a_row_whose_note_is_empty_is_asked_once(tmp_path: Path) -> None:
    script = Script(chart=["x"], other=["x"])
    note = "{% if kind != 'chart' %} \n Mind {{ kind }}.{% endif %}"
    rows = [row("chart", kind="chart"), row("other", kind="text")]
    with serving(script) as server:
        run(job(server, tmp_path, rows, retry={"reask_note": note}))
    assert script.calls == {"chart": 1, "other": 3}
    assert script.asked["other"][-1] == "other ?\nMind text."


def test_a_note_that_misses_a_name_fails_its_row_before_anything_is_paid(tmp_path: Path) -> None:
    script = Script(r=["x"])
    records = asked(script, tmp_path, retry={"reask_note": "{{ knid }}"})
    assert records["r"]["error"]["kind"] == "template"
    assert "'knid' is undefined" in records["r"]["error"]["message"]
    assert script.calls == {}


class Fickle:
    """A value that is text once, as its row's prompt is checked, and then no more."""

    def __init__(self) -> None:
        self.times = 0

    def __str__(self) -> str:
        self.times += 1
        if self.times > 1:
            raise OSError("the disk is gone")
        return "kind"


def of_python(rows: list[dict[str, Any]], folder: Path, **tables: Any) -> list[str]:
    """The texts that a server which never has an answer gives to rows of a program."""
    with serving(lambda text, body: "none", context=60) as server:
        # The check of the first rows would render them once more.
        own = {"input": None, "prompt": {"user": "{{ q }}"}, "run": {"check_rows": 0}}
        made = job(server, folder, [], **own, sampling={"max_tokens": 5}, **tables)
        summary = ProductionBatchProcessor(made, quiet=True).process(rows)
    return [record["text"] for record in summary.records()]


def test_a_note_is_rendered_with_the_prompt_and_never_again(tmp_path: Path) -> None:
    fickle = Fickle()
    rows = [{"q": "r", "a": "7", "kind": fickle}, {"q": "s", "a": "7", "kind": "it"}]
    assert of_python(rows, tmp_path, retry={"reask_note": "Mind {{ kind }}."}) == ["none", "none"]
    assert fickle.times == 1


def test_a_cut_prompt_keeps_the_note_that_was_rendered(tmp_path: Path) -> None:
    fickle = Fickle()
    rows = [{"q": "r " + "w " * 45, "a": "7", "kind": fickle}]
    retry = {"on_too_long": "truncate-middle", "reask_note": "{{ kind }} " + "it " * 20}
    assert of_python(rows, tmp_path, retry=retry) == ["none"]
    assert fickle.times == 1


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"retry": {"reask_note": " "}}, "reask needs a reask_note"),
        ({"scoring": {"extract": "text"}}, r"\n  retry\.reask: no answer lacks"),
    ],
)
def test_asking_again_without_a_note_or_for_nothing_is_refused(
    tables: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with serving() as server, pytest.raises(JobError, match=message):
        job(server, tmp_path, [], **tables)


def test_a_default_stands_in_only_once_all_asking_was_in_vain(tmp_path: Path) -> None:
    script = Script(r=["no number", "Score: 7"], never=["none"])
    scoring = {"extract": "reward", "scorers": ["reward"], "default_reward": 5.0}
    records = asked(script, tmp_path, scoring=scoring)
    assert script.calls == {"r": 2, "never": 3}
    assert records["r"]["scores"] == {"reward": 7}
    assert records["never"]["scores"] == {"reward": 5}


def test_of_several_choices_the_first_decides_and_all_are_kept(tmp_path: Path) -> None:
    script = Script(r=["x", FOUND])
    records = asked(script, tmp_path, sampling={"n": 2})
    assert script.calls == {"r": 2}
    assert [choice["text"] for choice in records["r"]["choices"]] == [FOUND, FOUND]


def test_a_prompt_without_chat_is_asked_again_as_plain_text(tmp_path: Path) -> None:
    script = Script(r=["x", FOUND])
    records = asked(script, tmp_path, prompt={"chat": False})
    assert [body["prompt"] for body in script.bodies["r"]] == ["r ?", f"r ?\n{NOTE}"]
    assert records["r"]["prediction"] == "7"


@pytest.mark.parametrize(
    ("messages", "asked"),
    [
        (
            [{"role": "system", "content": "s"}, {"role": "user", "content": "r ?"}],
            ["s", f"r ?\n{NOTE}"],
        ),
        (
            [{"role": "user", "content": "r ?"}, {"role": "assistant", "content": "Well,"}],
            [f"r ?\n{NOTE}", "Well,"],
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "r ?"}]}],
            [[{"type": "text", "text": "r ?"}, {"type": "text", "text": f"\n{NOTE}"}]],
        ),
    ],
)
def test_in_a_row_s_own_messages_the_note_stands_behind_the_user_s_last(
    tmp_path: Path, messages: list[dict[str, Any]], asked: list[Any]
) -> None:
    bodies: list[dict[str, Any]] = []

    def before(text: str, body: dict[str, Any]) -> str:
        bodies.append(body)
        return "x" if len(bodies) == 1 else FOUND

    with serving(before) as server:
        made = job(server, tmp_path, [{"id": "r", "messages": messages}], prompt=None)
        records = run(made)
    assert records["r"]["prediction"] == "7"
    assert [message["content"] for message in bodies[0]["messages"]] == [
        message["content"] for message in messages
    ]
    assert [message["content"] for message in bodies[1]["messages"]] == asked


@pytest.mark.parametrize("order", ["images-first", "text-first"])
def test_the_images_are_sent_again(tmp_path: Path, order: str) -> None:
    Image.new("RGB", (40, 40), "red").save(tmp_path / "r.png")
    script = Script(r=["x", FOUND])
    prompt = {"images": ["{{ id }}.png"], "order": order}
    records = asked(script, tmp_path, prompt=prompt)
    assert records["r"]["prediction"] == "7"
    first, second = (
        [part for part in body["messages"][0]["content"] if part["type"] == "image_url"]
        for body in script.bodies["r"]
    )
    assert first == second
    assert len(first) == 1


def test_a_prompt_that_the_note_makes_too_long_is_cut_and_keeps_the_note(tmp_path: Path) -> None:
    q = " ".join(f"w{n}" for n in range(95))
    prompts: list[str] = []

    def before(text: str, body: dict[str, Any]) -> str | None:
        prompts.append(text)
        return "x" if text.split()[-1] != "END" else FOUND

    with serving(before, context=100) as server:
        note = "Mind " + "it " * 20 + "END"
        retry = {"on_too_long": "truncate-middle", "reask_note": note}
        records = run(job(server, tmp_path, [row("r", q=q)], retry=retry, sampling=SHORT))
        answered = list(server.answered)
    assert answered[0].endswith("w94")
    assert answered[-1].startswith("r w0 ")
    assert " […] " in answered[-1]
    assert answered[-1].endswith(f"w94\n{note}")
    assert (records["r"]["prediction"], records["r"]["attempt"]) == ("7", 2)
    assert len(answered) == 2


def test_a_prompt_that_was_cut_is_asked_again_as_it_was_cut(tmp_path: Path) -> None:
    q = " ".join(f"w{n}" for n in range(400))
    with serving(lambda text, body: FOUND if NOTE in text else "x", context=100) as server:
        retry = {"on_too_long": "truncate-middle"}
        records = run(job(server, tmp_path, [row("r", q=q)], retry=retry, sampling=SHORT))
        first, second = server.answered
    assert second == f"{first}\n{NOTE}"
    assert records["r"]["truncated_tokens"] > 300


def test_asking_again_is_a_part_of_what_the_run_is_and_scoring_alone_is_not(tmp_path: Path) -> None:
    script = Script(r=[FOUND])

    def again(**tables: Any) -> JobConfig:
        return job(server, tmp_path, [row("r")], **tables)

    with serving(script) as server:
        run(again())
        run(again(scoring={"scorers": ["f1"], "reference": "q", "group_by": "id"}))
        for change in (
            {"retry": {"reask": 1}},
            {"retry": {"reask_note": "Other."}},
            {"scoring": {"extract": "number"}},
            {"scoring": {"rules": [{"where": {"id": "r"}, "extract": "number"}]}},
        ):
            with pytest.raises(ChangedError, match=r"retry\.reask: "):
                run(again(**change))
    assert script.calls == {"r": 1}


def test_retry_failed_counts_on_from_the_last_attempt(tmp_path: Path) -> None:
    script = Script(r=[Refused(400, error("not now")), "x", FOUND])
    with serving(script) as server:
        made = job(server, tmp_path, [row("r")])
        assert run(made)["r"]["status"] == "failed"
        ProductionBatchProcessor(made, quiet=True).retry({0: 1})
    (record,) = read_newest(made.folder / RESULTS)
    assert (record["prediction"], record["attempt"]) == ("7", 3)
    assert script.asked["r"] == ["r ?", "r ?", f"r ?\n{NOTE}"]


# Interrupted between two asks


def started(folder: Path, server: ChatServer, n_rows: int) -> subprocess.Popen[str]:
    write_jsonl(folder / "rows.jsonl", [row(f"r{n}") for n in range(n_rows)])
    (folder / "job.toml").write_text(
        f'name = "reask"\n[input]\npath = "rows.jsonl"\nid = "id"\n'
        f'[prompt]\nuser = "{{{{ id }}}} ?"\n'
        f'[engine]\nkind = "openai-server"\nmodel = "{MODEL}"\nbase_url = "{server.url}"\n'
        f"options = {{ max_num_seqs = 4 }}\n"
        f'[retry]\nreask = 2\nreask_note = "{NOTE}"\n'
        f'[scoring]\nextract = "final-answer"\nreference = "a"\nscorers = ["em"]\n',
        encoding="utf-8",
    )
    return begin("run", "job.toml", cwd=folder)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_run_that_ends_between_two_asks_loses_nothing_finished(
    tmp_path: Path, signum: int
) -> None:
    """Rows that were between two asks start again; the others are not asked again."""
    log = tmp_path / "output/reask" / RESULTS

    def before(text: str, body: dict[str, Any]) -> str:
        time.sleep(0.005)
        return FOUND if NOTE in text else "x"

    with serving(before) as server:
        process = started(tmp_path, server, n_rows=200)
        until(lambda: log.exists() and log.read_bytes().count(b"\n") > 20)
        process.send_signal(signum)
        process.communicate(timeout=20)
        assert process.returncode == (-signum if signum == signal.SIGKILL else 128 + signum)
        finished = {r["index"]: r for r in read_newest(log)}
        assert 20 < len(finished) < 200
        assert {r["prediction"] for r in finished.values()} == {"7"}
        asked_before = server.answered.copy()
        process = started(tmp_path, server, n_rows=200)
        stdout, _ = process.communicate(timeout=30)
        summary = json.loads(stdout.splitlines()[-1])
        assert (summary["total"], summary["ok"], summary["exit"]) == (200, 200, 0)
        asked_again = {t.split()[0] for t in server.answered - asked_before}
    assert not asked_again & {r["id"] for r in finished.values()}
    now = {r["index"]: r for r in read_newest(log)}
    assert {index: now[index] for index in finished} == finished
    assert {(r["prediction"], r["attempt"]) for r in now.values()} == {("7", 2)}
