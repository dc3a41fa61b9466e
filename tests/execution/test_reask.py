"""``retry.reask``: a row whose answer lacks what is looked for is asked again, and how that ends."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from batchkit.config.loading import make_job
from batchkit.errors import JobError
from batchkit.storage.newest_lines import read_newest
from tests.support import scripted
from tests.support.chat_server import ChatServer, Refused, error, serving
from tests.support.command_line import Ended, batchkit
from tests.support.dry_runs import LOG
from tests.support.own_process import begin
from tests.support.realhit import vectors
from tests.support.scripted import Script, answered, records, row
from tests.support.waiting import until

pytestmark = [pytest.mark.usefixtures("in_an_empty_folder"), pytest.mark.slow]

NOTE = "Mind the form."
FOUND = "so [Final Answer]: 7"
RETRY = {"reask": 2, "reask_note": NOTE}
SCORING = {"extract": "final-answer", "reference": "a", "scorers": ["em"]}


def with_defaults(**tables: Any) -> dict[str, Any]:
    retry = {**RETRY, **tables.pop("retry", {})}
    return {"scoring": SCORING, **tables, "retry": retry}


def asked(script: Script, **tables: Any) -> dict[str, dict[str, Any]]:
    """The records, by id, of a row for each name in the script."""
    return answered(script, **with_defaults(**tables))


def run(server: ChatServer, rows: list[dict[str, Any]], **tables: Any) -> Ended:
    return scripted.run(server, rows, **with_defaults(**tables))


def test_only_a_row_without_an_answer_is_asked_again_and_its_note_stands_once() -> None:
    script = Script(one=[FOUND], two=["hm", FOUND], three=["x", "y", "z", "never asked"])
    found = asked(script)
    assert script.calls == {"one": 1, "two": 2, "three": 3}
    assert script.asked["three"] == ["three ?", f"three ?\n{NOTE}", f"three ?\n{NOTE}"]
    outcomes = {name: (r["prediction"], r["scores"], r["attempt"]) for name, r in found.items()}
    assert outcomes == {
        "one": ("7", {"em": 1.0}, 1),
        "two": ("7", {"em": 1.0}, 2),
        "three": ("z", {"em": 0.0}, 3),
    }
    assert LOG.read_bytes().count(b"\n") == 3


@pytest.mark.parametrize("vector", vectors("parse"))
def test_predictions_and_calls_are_those_of_the_official_code(vector: dict[str, Any]) -> None:
    script = Script(r=vector["responses"])
    note = vector["appended_on_last_call"].strip() or NOTE
    found = asked(script, retry={"reask_note": note})
    assert found["r"]["prediction"] == vector["prediction"]
    assert script.calls["r"] == vector["calls"]
    if vector["appended_on_last_call"]:
        assert script.asked["r"][-1] == "r ?" + vector["appended_on_last_call"]


def test_each_attempt_has_its_temperature() -> None:
    script = Script(r=["x", "y", "z"])
    asked(script, retry={"temperatures": [0.1, 0.8]})
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
def test_an_ask_that_fails_leaves_the_answer_before_it(refusal: str | Exception) -> None:
    record = asked(Script(r=["an answer of sorts", refusal], other=[FOUND]))["r"]
    assert (record["status"], record["error"]) == ("ok", None)
    assert (record["text"], record["attempt"]) == ("an answer of sorts", 1)
    was_paid_for = not isinstance(refusal, Exception)  # beside the answer that is kept
    assert (record.get("earlier_usage") is not None) == was_paid_for


def test_each_ask_has_as_many_tries_as_the_first() -> None:
    script = Script(r=["   ", "hm", "   ", FOUND])
    retry = {"attempts": 2, "backoff_s": 0.01, "temperatures": [0.5]}
    record = asked(script, retry=retry)["r"]
    assert (record["prediction"], script.calls["r"]) == ("7", 4)


def test_a_row_whose_note_is_empty_is_asked_once() -> None:
    script = Script(chart=["x"], other=["x"])
    note = "{% if id != 'chart' %} \n Mind {{ id }}.{% endif %}"
    asked(script, retry={"reask_note": note})
    assert script.calls == {"chart": 1, "other": 3}
    assert script.asked["other"][-1] == "other ?\nMind other."


def test_a_note_that_misses_a_name_fails_its_row_before_anything_is_paid() -> None:
    script = Script(r=["x"])
    failed = asked(script, retry={"reask_note": "{{ knid }}"})["r"]["error"]
    assert failed["kind"] == "template"
    assert "'knid' is undefined" in failed["message"]
    assert script.calls == {}


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"retry": {"reask_note": " "}}, "reask needs a reask_note"),
        ({"scoring": {"extract": "text"}}, r"\n  retry\.reask: has no effect"),
    ],
)
def test_asking_again_without_a_note_or_for_nothing_is_refused(
    tables: dict[str, Any], message: str
) -> None:
    with pytest.raises(JobError, match=message):
        make_job({"engine": {"kind": "dry-run"}, **with_defaults(**tables)}, "test")


def test_a_default_stands_in_only_once_all_asking_was_in_vain() -> None:
    script = Script(r=["no number", "Score: 7"], never=["none"])
    scoring = {"extract": {"reward": {"default": 5.0}}, "scorers": ["reward"]}
    found = asked(script, scoring=scoring)
    assert script.calls == {"r": 2, "never": 3}
    assert [found[name]["scores"] for name in ("r", "never")] == [{"reward": 7}, {"reward": 5}]


def test_of_several_choices_the_first_decides_and_all_are_kept() -> None:
    script = Script(r=["x", FOUND])
    found = asked(script, sampling={"n": 2})
    assert script.calls == {"r": 2}
    assert [choice["text"] for choice in found["r"]["choices"]] == [FOUND, FOUND]


def test_a_prompt_without_chat_is_asked_again_as_plain_text() -> None:
    script = Script(r=["x", FOUND])
    found = asked(script, prompt={"chat": False})
    assert [body["prompt"] for body in script.bodies["r"]] == ["r ?", f"r ?\n{NOTE}"]
    assert found["r"]["prediction"] == "7"


TEXT = {"type": "text", "text": "r ?"}


@pytest.mark.parametrize(
    ("messages", "then"),
    [
        (
            [{"role": "user", "content": "r ?"}, {"role": "assistant", "content": "Well,"}],
            [f"r ?\n{NOTE}", "Well,"],
        ),
        (
            [{"role": "system", "content": "r s"}, {"role": "user", "content": "?"}],
            ["r s", f"?\n{NOTE}"],
        ),
        ([{"role": "user", "content": [TEXT]}], [[TEXT, {**TEXT, "text": f"\n{NOTE}"}]]),
    ],
)
def test_in_a_row_s_own_messages_the_note_stands_behind_the_user_s_last(
    messages: list[dict[str, Any]], then: list[Any]
) -> None:
    script = Script(r=["x", FOUND])
    with serving(script) as server:
        run(server, [{"id": "r", "a": "7", "messages": messages}], prompt=None)
    assert records()["r"]["prediction"] == "7"
    first, second = (body["messages"] for body in script.bodies["r"])
    assert [message["content"] for message in first] == [it["content"] for it in messages]
    assert [message["content"] for message in second] == then


@pytest.mark.parametrize("user", ["{{ id }} {{ q }}", "{{ id }} {{ q }}{{ image }}"])
def test_the_images_are_sent_again(user: str) -> None:
    Image.new("RGB", (40, 40), "red").save("r.png")
    script = Script(r=["x", FOUND])
    assert asked(script, prompt={"user": user, "images": ["{{ id }}.png"]})["r"]["attempt"] == 2
    first, second = (
        [part for part in body["messages"][0]["content"] if part["type"] == "image_url"]
        for body in script.bodies["r"]
    )
    assert first == second
    assert len(first) == 1


@pytest.mark.parametrize("n_words", [95, 400], ids=["cut for the note", "cut before"])
def test_a_prompt_that_is_too_long_is_cut_and_keeps_the_note(n_words: int) -> None:
    """One that was cut already is asked again as it was cut."""
    q = " ".join(f"w{n}" for n in range(n_words))
    note = "Mind " + "it " * 20 + "END" if n_words == 95 else NOTE

    def before(text: str, body: dict[str, Any]) -> str:
        return FOUND if text.endswith(note) else "x"

    with serving(before, context=100) as server:
        retry = {"on_too_long": "truncate-middle", "reask_note": note}
        run(server, [row("r", q=q)], retry=retry, sampling={"max_tokens": 10})
        first, second = server.answered
    record = records()["r"]
    assert (record["prediction"], record["attempt"]) == ("7", 2)
    assert second.startswith("r w0 ")
    assert " […] " in second
    assert second.endswith(f"w{n_words - 1}\n{note}")
    if n_words == 95:
        assert first == f"r {q}"
    else:
        assert second == f"{first}\n{note}"
        assert record["truncated_tokens"] > 300


def test_asking_again_is_a_part_of_what_the_run_is_and_scoring_alone_is_not() -> None:
    script = Script(r=[FOUND])
    with serving(script) as server:
        for scoring in (SCORING, {**SCORING, "scorers": ["f1"], "reference": "q"}):
            assert run(server, [row("r")], scoring=scoring).exit_code == 0
        for change in (
            {"retry": {"reask": 1}},
            {"retry": {"reask_note": "Other."}},
            {"scoring": {**SCORING, "extract": "number"}},
            {"scoring": {**SCORING, "rules": [{"where": {"id": "r"}, "extract": "number"}]}},
        ):
            ended = run(server, [row("r")], **change)
            assert (ended.exit_code, "retry.reask: " in ended.stderr) == (2, True)
    assert script.calls == {"r": 1}


def test_retry_failed_counts_on_from_the_last_attempt() -> None:
    script = Script(r=[Refused(400, error("not now")), "x", FOUND])
    with serving(script) as server:
        assert run(server, [row("r")]).exit_code == 3
        assert batchkit("retry-failed").exit_code == 0
    assert (records()["r"]["prediction"], records()["r"]["attempt"]) == ("7", 3)
    assert script.asked["r"] == ["r ?", "r ?", f"r ?\n{NOTE}"]


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_ends_between_two_asks_loses_nothing_finished(signum: int) -> None:
    """Rows that were between two asks start again; the others are not asked again."""

    def before(text: str, body: dict[str, Any]) -> str:
        time.sleep(0.005)
        return FOUND if NOTE in text else "x"

    rows = [row(f"r{n}") for n in range(200)]
    with serving(before) as server:
        tables = with_defaults(engine={"options": {"max_num_seqs": 4}})
        scripted.write_job(server, rows, **tables)
        process = begin("run", "job.toml", cwd=Path.cwd())
        until(lambda: LOG.exists() and LOG.read_bytes().count(b"\n") > 20)
        process.send_signal(signum)
        process.communicate(timeout=20)
        assert process.returncode == (-signum if signum == signal.SIGKILL else 128 + signum)
        finished = {r["index"]: r for r in read_newest(LOG)}
        assert 20 < len(finished) < 200
        assert {r["prediction"] for r in finished.values()} == {"7"}
        asked_before = server.answered.copy()
        summary = batchkit("run", "job.toml").json
        assert (summary["total"], summary["ok"], summary["exit"]) == (200, 200, 0)
        asked_again = {t.split()[0] for t in server.answered - asked_before}
    assert not asked_again & {r["id"] for r in finished.values()}
    now = {r["index"]: r for r in read_newest(LOG)}
    assert {index: now[index] for index in finished} == finished
    assert {(r["prediction"], r["attempt"]) for r in now.values()} == {("7", 2)}
