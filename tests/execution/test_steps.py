"""``[[steps]]``: several generations for a row, one after the other."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.support.chat_server import Refused, error, serving
from tests.support.own_process import begin
from tests.support.rollouts import RUN, errors, generations, records, run, write
from tests.support.waiting import until

pytestmark = [pytest.mark.usefixtures("in_an_empty_folder"), pytest.mark.slow]

DRAFT: dict[str, Any] = {"name": "draft", "prompt": {"user": "draft {{ q }}"}}
JUDGE = {"name": "judge", "prompt": {"user": "judge {{ steps.draft.text }}"}}
REVISE = {"name": "revise", "prompt": {"user": "revise {{ steps.judge.text }}"}}
THREE = [DRAFT, JUDGE, REVISE]


def test_each_step_sees_the_answers_before_it() -> None:
    with serving(lambda text, body: f"<{text}>") as server:
        write(None, 3, server, steps=THREE)
        assert run().exit_code == 0
    assert [record["text"] for record in records()] == [
        f"<revise <judge <draft q{n}>>>" for n in range(3)
    ]
    assert [record["generations"] for record in records()] == [3, 3, 3]
    assert [*records()[0]["steps"]] == ["draft", "judge", "revise"]
    by_row = {line["index"]: line["step"] for line in generations()}
    assert by_row == dict.fromkeys(range(3), "revise")


def refuses(text: str, body: dict[str, Any]) -> str:
    if text.startswith("judge") and "q1" in text:
        raise Refused(400, error("no thanks"))
    return " " if text.startswith("revise") and "q2" in text else f"<{text}>"


@pytest.mark.parametrize(
    ("change", "failed"),
    [
        ({}, {1: "invalid_request: step judge: ", 2: "empty: step revise: "}),
        ({"when": "{{ steps.draft.json.x }}"}, dict.fromkeys(range(3), "template: step judge: ")),
        ({"prompt": {"user": "{{ x }}"}}, dict.fromkeys(range(3), "template: step judge: ")),
        ({"prompt": {"user": "judge {{ q }}", "images": ["{{ q }}.png"]}}, dict.fromkeys(range(3), "media: step judge: ")),
        ({"parse": "json"}, {0: "invalid_output: step judge: ", 1: "invalid_request: step judge: ", 2: "invalid_output: step judge: "}),
    ],
    ids=["server", "when", "template", "media", "parse"],
)  # fmt: skip
def test_a_failed_step_names_itself(change: dict[str, Any], failed: dict[int, str]) -> None:
    with serving(refuses) as server:
        steps = [DRAFT, {**JUDGE, **change}, REVISE]
        write(None, 3, server, steps=steps, run={"check_rows": 0})
        assert run().exit_code == 3
    assert {index: message[: len(failed[index])] for index, message in errors().items()} == failed
    assert all("draft" in record["steps"] for record in records())
    assert errors().keys() == failed.keys()


def test_a_retry_and_a_second_question_are_of_the_step_alone() -> None:
    asked: list[str] = []

    def unsure(text: str, body: dict[str, Any]) -> str:
        asked.append(text)
        if text.startswith("judge") and sum(one.startswith("judge") for one in asked) == 1:
            raise Refused(500, error("try again"))
        if text.startswith("judge") and "Mind the form" not in text:
            return "perhaps"
        return '{"good": 7}' if text.startswith("judge") else f"<{text}>"

    judge = {**JUDGE, "parse": "json"}
    revise = {"name": "revise", "prompt": {"user": "revise {{ steps.judge.json.good }}"}}
    retry = {"reask": 1, "reask_note": "Mind the form", "backoff_s": 0.01}
    with serving(unsure) as server:
        write(None, 1, server, steps=[DRAFT, judge, revise], retry=retry)
        assert run().exit_code == 0
    assert [one.split()[0] for one in asked] == ["draft", "judge", "judge", "judge", "revise"]
    assert records()[0]["text"] == "<revise 7>"
    assert [line["attempt"] for line in generations()] == [
        1,
        2,
        1,
    ]  # the engine itself repeats what a server refuses for now


def test_each_step_has_its_own_names_for_the_chat_template() -> None:
    seen: dict[str, Any] = {}

    def note(text: str, body: dict[str, Any]) -> None:
        seen[text.split()[0]] = body.get("chat_template_kwargs")

    draft = {**DRAFT, "prompt": {**DRAFT["prompt"], "chat_template_kwargs": {"think": False}}}
    with serving(note) as server:
        prompt = {"chat_template_kwargs": {"brief": True}}
        write(None, 1, server, steps=[draft, JUDGE], prompt=prompt)
        assert run().exit_code == 0
    assert seen == {"draft": {"brief": True, "think": False}, "judge": {"brief": True}}


def test_a_step_that_is_too_long_is_cut_and_the_others_are_not() -> None:
    with serving(
        lambda text, body: None if "judge" in text else "word " * 300, context=200
    ) as server:
        write(
            None,
            1,
            server,
            steps=[DRAFT, JUDGE],
            retry={"on_too_long": "truncate-middle"},
            sampling={"max_tokens": 20},
        )
        assert run().exit_code == 0, errors()
    draft, judge = generations()
    assert judge["usage"]["prompt_tokens"] <= 200 - 20
    assert draft["usage"]["prompt_tokens"] < 10


def test_images_of_several_steps_are_held_within_the_limit() -> None:
    """Each step has its own image; only two fit, so rows wait, and none waits for ever."""
    for n in range(12):
        Image.new("RGB", (100, 100), (n, 0, 0)).save(f"a{n}.png")
    steps = [
        {"name": name, "prompt": {"user": f"{name} {{{{ q }}}}", "images": ["a{{ n }}.png"]}}
        for name in ("first", "second", "third")
    ]
    with serving(latency_s=0.01) as server:
        write(
            None,
            [{"q": f"q{n}", "n": n} for n in range(12)],
            server,
            steps=steps,
            media={"max_memory_bytes": 2 * 4 * 100 * 100},
            run={"render_threads": 2, "max_in_flight": 12},
        )
        ended = run()
        # What is decoded exceeds the limit by at most one image for each thread.
        assert server.most <= 4
    assert ended.exit_code == 0, ended.stderr
    assert len(generations()) == 36


def test_an_interrupted_run_keeps_rows_whose_last_answer_came_and_loses_no_generation() -> None:
    with serving(latency_s=0.15) as server:
        write(None, 300, server, steps=THREE)
        with begin("run", "job.toml", cwd=Path.cwd()) as process:
            until(lambda: (RUN / "results.jsonl").exists() and len(records()) > 10)
            os.kill(process.pid, signal.SIGINT)
            process.communicate()
        assert process.returncode == 130
        last = {line["index"] for line in generations() if line["step"] == "revise"}
        assert {record["index"] for record in records()} == last
        assert len(last) < 300
        assert run().exit_code == 0
        assert server.answered.total() == len(generations()) == 900


def test_a_step_that_judges_is_never_the_rows_answer() -> None:
    """Also where the step after it is skipped, and where it is the last one."""
    judge = {**JUDGE, "answer": False}
    last = {"name": "check", "prompt": {"user": "check"}, "answer": False}
    with serving(refuses) as server:
        write(None, 1, server, steps=[DRAFT, judge, {**REVISE, "when": ""}, last])
        assert run().exit_code == 0
        (record,) = records()
        assert record["text"] == record["steps"]["draft"]["text"]
        assert record["steps"]["check"]["text"] == "<check>"
        write(None, 1, server, steps=[{**DRAFT, "when": ""}, judge | {"prompt": {"user": "x"}}])
        assert run("--fresh").exit_code == 3
    assert errors()[0] == "empty: no step gave an answer: the `when` of every step was false"
