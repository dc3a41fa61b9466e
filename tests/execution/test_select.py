"""``[select]``: which of the ``n`` answers is the row's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomlkit

from tests.support.chat_server import serving
from tests.support.command_line import batchkit
from tests.support.dry_runs import LOG, RUN, manifest
from tests.support.jobs import with_tables
from tests.support.rows import read_jsonl
from tests.support.scripted import Script, answered, records, row, run

pytestmark = [pytest.mark.usefixtures("in_an_empty_folder"), pytest.mark.slow]

NUMBER = {"extract": "number", "reference": "a", "scorers": ["em"]}
MAJORITY, BY_STEP = {"by": "majority"}, {"by": "step", "step": "judge"}
EM = {"scorers": ["em"], "reference": "a"}
DRY = {"engine": {"kind": "dry-run"}}
SEVERAL = {"n": 3, "temperature": 1.0}
BROKEN = {"message": {"content": "8"}, "finish_reason": "abort"}


def one_row(said: list[Any], **tables: Any) -> dict[str, Any]:
    """The record of a row that is answered so, the majority of numbers by default."""
    sampling = {**SEVERAL, "n": len(said[0])}
    defaults = {"select": MAJORITY, "scoring": NUMBER, "sampling": sampling}
    return answered(Script(r=said), **{**defaults, **tables})["r"]


@pytest.mark.parametrize(
    ("said", "scoring", "selected", "votes"),
    [
        pytest.param(["so 5", "it is 7", "7.0 then"], NUMBER, 1, {"5": 1, "7": 2}, id="most"),
        pytest.param(["4", "5", "5", "4"], NUMBER, 0, {"4": 2, "5": 2}, id="of a tie the first"),
        pytest.param(["none", "x", "6"], NUMBER, 2, {"6": 1}, id="without a prediction no vote"),
        pytest.param(["none", "x", "y"], NUMBER, 0, {}, id="no prediction at all"),
        pytest.param(["1,000", "$1000", "9"], NUMBER, 0, {"1000": 2, "9": 1}, id="numbers"),
        pytest.param(["-5", "5", "5"], NUMBER, 1, {"-5": 1, "5": 2}, id="a sign"),
        pytest.param(
            ["Final Answer: no", "Final Answer: The Yes", 'Final Answer: "the  yes."', "the yes"],
            {"extract": "final-answer"},
            1,
            {"no": 1, "The Yes": 2},
            id="words",
        ),
        pytest.param(
            ["", "Oslo", "in Oslo", " oslo. "],
            {"extract": "text"},
            1,
            {"Oslo": 2, "in Oslo": 1},
            id="whole",
        ),
        pytest.param(
            ["maybe", "I say yes.", "no", "Yes", "neither yes nor no"],
            {"choices": ["yes", "no"]},
            1,
            {"I say yes.": 2, "no": 1},
            id="choices",
        ),
        pytest.param(
            [
                {"message": {"content": "8"}, "finish_reason": "error"},
                {"message": {"content": "8"}, "error": {"message": "overloaded"}},
                "9",
                {"message": {"content": "  "}},
            ],
            NUMBER,
            2,
            {"9": 1},
            id="only whole answers",
        ),
    ],
)
def test_who_votes_and_what_counts_as_the_same(
    said: list[Any], scoring: dict[str, Any], selected: int, votes: dict[str, int]
) -> None:
    record = one_row([said], scoring=scoring)
    assert (record["status"], record["selected"], record["votes"]) == ("ok", selected, votes)
    assert "choices" not in record


BY_NUMERIC = {
    "select": {"by": "scorer", "scorer": "numeric"},
    "scoring": {**NUMBER, "scorers": ["em", "numeric"]},
}
AGAIN = {"retry": {"reask": 1, "reask_note": "A number!"}}
NO_VOTES = {"selected": None, "votes": None}


@pytest.mark.parametrize(
    ("said", "tables", "expected"),
    [
        pytest.param(
            [["so 5", "it is 7", "7.0 then"]],
            {},
            {"text": "it is 7", "prediction": "7", "scores": {"em": 1.0}},
            id="all else is the chosen one's",
        ),
        pytest.param([[BROKEN] * 3], {}, {"status": "failed"}, id="all broke off"),
        pytest.param(
            [["it is 8", "none", "it is 7"]],
            BY_NUMERIC,
            {
                "text": "it is 7",
                "selected": 2,
                "scores": {"em": 1.0, "numeric": 1.0},
                "votes": None,
            },
            id="the best by a scorer",
        ),
        pytest.param(
            [["5", "7", "7"]],
            {"select": None, "scoring": None, "output": {"choices": False}},
            {"text": "5", "choices": None, **NO_VOTES},
            id="left out without a selection",
        ),
        pytest.param(
            [["x", "y", "7"], ["never", "asked", "for"]],
            AGAIN,
            {"attempt": 1, "text": "7"},
            id="not asked again, one has a prediction",
        ),
        pytest.param(
            [["x", "y", "z"], ["x", "8", "8"]],
            AGAIN,
            {"attempt": 2, "text": "8"},
            id="asked again, none has one",
        ),
        pytest.param(
            [["so 5", "so 5", '{"n": 7}', '{"n": 7, "b": 1}', '{"n": 5}']],
            {"output": {"parse": "json"}, "scoring": {"extract": {"json": {"key": "n"}}}},
            {"parsed": {"n": 7}, "selected": 2, "votes": {"7": 2, "5": 1}},
            id="what is not JSON does not vote",
        ),
    ],
)
def test_what_a_row_becomes(
    said: list[Any], tables: dict[str, Any], expected: dict[str, Any]
) -> None:
    record = one_row(said, **tables)
    assert {name: record.get(name) for name in expected} == expected


def test_all_choices_are_kept_if_asked_for() -> None:
    record = one_row([["5", "7", "7"]], output={"choices": True})
    assert [choice["text"] for choice in record["choices"]] == ["5", "7", "7"]
    assert record["text"] == record["choices"][record["selected"]]["text"] == "7"


DRAFT = {"name": "draft", "prompt": {"user": "{{ id }} {{ q }}"}}
JUDGE = {
    "name": "judge",
    "prompt": {
        "user": "judge {% for text in candidates %}{{ loop.index }}: {{ text }}; {% endfor %}"
    },
    "sampling": {"n": 1},
}


def judged(
    draft: list[Any], verdicts: list[Any], judge: dict[str, Any] = JUDGE, **tables: Any
) -> tuple[dict[str, Any], list[str]]:
    """The record of a row, and what the judge was asked."""
    script = Script(r=[draft], judge=verdicts)
    tables = {"steps": [DRAFT, judge], "select": BY_STEP, "sampling": SEVERAL, **tables}
    with serving(script) as server:
        ended = run(server, [row("r")], **tables)
    assert ended.exit_code in (0, 3), ended.stderr
    return records()["r"], script.asked["judge"]


def test_a_step_picks_one_of_the_candidates() -> None:
    record, asked = judged(["a 5", "b 6", "c 7"], ["the third, so 3"], scoring=NUMBER)
    assert asked == ["judge 1: a 5; 2: b 6; 3: c 7; "]
    assert (record["text"], record["selected"], record["generations"]) == ("c 7", 2, 2)
    assert (record["prediction"], record["scores"]) == ("7", {"em": 1.0})
    assert record["steps"]["judge"]["text"] == "the third, so 3"
    assert record["usage"]["completion_tokens"] == 8
    assert "choices" not in record
    assert "choices" not in record["steps"]["draft"]


def test_a_judge_sees_only_whole_answers() -> None:
    record, asked = judged([BROKEN, "b 6", "c 7"], ["2"], output={"choices": True})
    assert asked == ["judge 1: b 6; 2: c 7; "]
    assert (record["text"], record["selected"]) == ("c 7", 2)
    assert [choice["text"] for choice in record["choices"]] == ["8", "b 6", "c 7"]
    assert record["steps"]["draft"]["choices"] == ["8", "b 6", "c 7"]


@pytest.mark.parametrize("verdict", ["none is good", "the fourth: 4", "0", "-1", "1.5"])
def test_a_judge_that_names_none_is_asked_again_and_then_fails_its_row(verdict: str) -> None:
    failed, asked = judged(["5", "6", "7"], [verdict])
    assert (failed["status"], failed["error"]["kind"]) == ("failed", "invalid_output")
    assert "from 1 to 3" in failed["error"]["message"]
    assert "'judge'" in failed["error"]["message"]
    assert len(asked) == 2  # retry.attempts


def test_a_judge_is_asked_again_like_an_answer_that_is_not_json() -> None:
    record, asked = judged(["5", "6", "7"], ["who knows", "2"])
    assert (record["status"], record["text"], len(asked)) == ("ok", "6", 2)


def test_where_the_judge_is_skipped_the_first_candidate_is_the_rows() -> None:
    judge = {**JUDGE, "when": "{{ candidates | unique | list | length > 1 }}"}
    record, asked = judged(["6", "6", "6"], ["2"], judge)
    assert (record["text"], record["selected"], asked) == ("6", 0, [])
    assert record["steps"]["judge"] == {"skipped": True}


def test_a_judge_of_nothing_is_not_asked() -> None:
    record, asked = judged(["6"], ["2"], steps=[{**DRAFT, "when": "no"}, JUDGE])
    assert (record["error"]["kind"], asked) == ("empty", [])


def test_a_dry_run_of_a_judging_step_passes() -> None:
    ended = run(None, [row("r")], steps=[DRAFT, JUDGE], select=BY_STEP, sampling=SEVERAL)
    assert ended.exit_code == 0, ended.stderr
    assert records()["r"]["selected"] == 0


def test_steps_choose_each_by_what_it_looks_for() -> None:
    """The draft by its own number, the answer by [scoring]."""
    end = {"name": "end", "prompt": {"user": "end {{ steps.draft.text }}"}}
    script = Script(
        r=[["x 5", "x 7", "y 7"]],
        end=[["Final Answer: no", "Final Answer: yes", "Final Answer: Yes"]],
    )
    steps, scoring = [{**DRAFT, "extract": "number"}, end], {"extract": "final-answer"}
    with serving(script) as server:
        tables = {"steps": steps, "select": MAJORITY, "scoring": scoring, "sampling": SEVERAL}
        assert run(server, [row("r")], **tables).exit_code == 0
    record = records()["r"]
    assert script.asked["end"] == ["end x 7"]
    assert record["steps"]["draft"]["votes"] == {"5": 1, "7": 2}
    assert (record["text"], record["votes"]) == ("Final Answer: yes", {"no": 1, "yes": 2})
    lines = read_jsonl(RUN / "steps.jsonl")
    assert [(line["step"], line["selected"], line["text"]) for line in lines] == [
        ("draft", 1, "x 7"),
        ("end", 1, "Final Answer: yes"),
    ]


def test_only_generations_with_several_answers_need_an_extractor() -> None:
    draft = {**DRAFT, "extract": "number", "sampling": {"n": 3}}
    last = {**JUDGE, "prompt": {"user": "end"}}
    assert run(None, [row("r")], steps=[draft, last], select=MAJORITY).exit_code == 0
    assert records()["r"]["steps"]["draft"]["votes"] == {"0": 3}
    assert "votes" not in records()["r"]


@pytest.mark.parametrize(
    "select",
    [MAJORITY, {"by": "scorer", "scorer": "em"}, BY_STEP],
    ids=["majority", "scorer", "step"],
)
def test_a_row_that_was_interrupted_before_its_record_makes_the_same_choice(
    select: dict[str, Any],
) -> None:
    """Its generations are in steps.jsonl: nothing is asked again."""
    is_step = select["by"] == "step"
    draft = {**DRAFT, "parse": "json", "extract": {"json": {"key": "n"}}}
    prompt = {"user": f"judge {{{{ {'candidates' if is_step else 'steps.draft.json.n'} }}}}"}
    tables: dict[str, Any] = {
        "steps": [{**draft, "scorers": ["em"], "reference": "a"}, {**JUDGE, "prompt": prompt}],
        "scoring": {"extract": "number", "scorers": ["em"], "reference": "a"},
        "select": select,
        "sampling": {**SEVERAL, "n": 4},
    }
    script = Script(r=[["so", '{"n": 5}', '{"n": 7}', '{"n": 7.0}']], judge=["3"])
    with serving(script) as server:
        assert run(server, [row("r")], **tables).exit_code == 0
        first = records()["r"]
        LOG.write_bytes(b"")
        (RUN / "checkpoint.json").unlink()
        assert run(server, [row("r")], **tables).exit_code == 0
    assert script.calls == {"r": 1, "judge": 1}
    times = {"finished_at": "", "latency_s": 0.0}
    assert {**records()["r"], **times} == {**first, **times}
    assert first["steps"]["draft"]["text"] == ('{"n": 5}' if is_step else '{"n": 7}')
    assert first["text"] == ('{"n": 7.0}' if is_step else "3")


def test_a_change_of_a_later_step_makes_the_same_choice_by_another_runs_answers() -> None:
    """What a requeue uses again is chosen anew, with the references of ``scoring.reference_run``."""
    by_run = {"extract": "number", "scorers": ["em"], "reference_run": "output/reference"}
    tables: dict[str, Any] = {"scoring": by_run, "select": {"by": "scorer"}, "sampling": SEVERAL}
    last = {"name": "last", "prompt": {"user": "so {{ steps.draft.text }}"}, "sampling": {"n": 1}}
    changed = {**last, "prompt": {"user": "thus {{ steps.draft.text }}"}}
    script = Script(r=[["7"], ["it is 5", "it is 7", "6"]], so=["7"], thus=["7"])
    with serving(script) as server:
        run(server, [row("r")], name="reference", scoring={"extract": "number"})
        run(server, [row("r")], steps=[DRAFT, last], **tables)
        assert records()["r"]["steps"]["draft"]["text"] == "it is 7"
        run(server, [row("r")], steps=[DRAFT, changed], **tables)
        assert batchkit("run", "job.toml", "--on-change", "requeue").exit_code == 0
    assert script.calls == {"r": 2, "so": 1, "thus": 1}
    assert records()["r"]["steps"]["draft"]["text"] == "it is 7"


@pytest.mark.parametrize(
    ("select", "tables", "message"),
    [
        (MAJORITY, {}, "scoring.extract"),
        (
            {"by": "scorer"},
            {"scoring": EM | {"scorers": ["em", "f1"]}},
            "select.scorer: is missing; scoring.scorers has 2",
        ),
        (
            {"by": "scorer", "scorer": "f1"},
            {"scoring": EM},
            "select.scorer: found 'f1', expected one of scoring.scorers",
        ),
        (
            {"by": "scorer"},
            {"scoring": {"scorers": ["chart"]}},
            "found 'chart', expected one of scoring.scorers that is computed during the run",
        ),
        (
            MAJORITY,
            {"scoring": {"extract": "number"}, "sampling": {"n": 1}},
            "sampling.n: is 1, but [select] chooses",
        ),
        (
            BY_STEP,
            {"steps": [DRAFT, {**JUDGE, "sampling": {"n": 4}}], "sampling": {"n": 1}},
            "sampling.n: is 1 in each step, but [select] chooses",
        ),
        (
            BY_STEP,
            {"steps": [DRAFT, {**JUDGE, "sampling": {}}]},
            "steps.judge.sampling.n: is 3; a step that picks an answer needs n = 1",
        ),
        (
            {"by": "scorer"},
            {"steps": [{**DRAFT, "scorers": ["em"], "reference": "steps"}]},
            "steps.draft.reference: 'steps' is the name of the earlier steps' results",
        ),
        (BY_STEP, {}, "select.step: found 'judge', expected"),
        (MAJORITY | {"step": "x"}, {"scoring": NUMBER}, 'select.step: is for select.by = "step"'),
        (
            MAJORITY,
            {"scoring": {"extract": "number"}, "rollout": {"function": "a:b"}},
            "[select]: has no effect with [rollout]",
        ),
    ],
    ids=str,
)
def test_a_selection_that_does_not_fit_is_refused(
    select: dict[str, Any], tables: dict[str, Any], message: str
) -> None:
    prompt = {"user": "" if "steps" in tables else "?"}
    job = {"name": "a", **DRY, "prompt": prompt, "sampling": {"n": 3}, "select": select}
    Path("job.toml").write_text(tomlkit.dumps(with_tables(job, tables)))
    ended = batchkit("validate", "job.toml")
    assert ended.exit_code == 2
    assert message in ended.stderr, ended.stderr


@pytest.mark.parametrize(
    ("select", "changed"),
    [(MAJORITY, {"choices": ["5"]}), ({"by": "scorer"}, {**NUMBER, "scorers": ["numeric"]})],
    ids=["what votes", "the only scorer"],
)
def test_what_decides_the_choice_is_part_of_the_runs_identity(
    select: dict[str, Any], changed: dict[str, Any]
) -> None:
    one_row([["5", "7", "7"]], select=select)
    ended = run(None, [row("r")], select=select, scoring=changed, sampling=SEVERAL)
    assert ended.exit_code == 2
    assert "select.scoring" in ended.stderr
    assert manifest()["identity"]["job"]["select.by"] == select["by"]
