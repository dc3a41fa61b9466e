"""``[select]``: which of the ``n`` answers is the row's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomlkit

from tests.support.chat_server import MODEL, ChatServer, Refused, serving
from tests.support.command_line import Ended, batchkit
from tests.support.dry_runs import LOG, RUN, manifest
from tests.support.jobs import with_tables
from tests.support.rows import read_jsonl, write_jsonl

pytestmark = [pytest.mark.usefixtures("in_an_empty_folder"), pytest.mark.slow]

NUMBER = {"extract": "number", "reference": "a", "scorers": ["em"]}
MAJORITY, BY_STEP = {"by": "majority"}, {"by": "step", "step": "judge"}
EM = {"scorers": ["em"], "reference": "a"}
DRY = {"engine": {"kind": "dry-run"}}
Said = str | dict[str, Any]


def answering(said: dict[str, list[list[Said]]]) -> Callable[[str, dict[str, Any]], None]:
    """A prompt that begins with a name is answered with that name's choices, call after call; the last
    ones are repeated. A choice is a text, or what is not as always in OpenAI's object."""
    calls = dict.fromkeys(said, 0)

    def before(text: str, body: dict[str, Any]) -> None:
        name = text.split()[0]
        if name in said:
            found = said[name][min(calls[name], len(said[name]) - 1)]
            calls[name] += 1
            raise Refused(200, {"choices": [*map(_choice, range(len(found)), found)], **_USAGE})

    return before


_USAGE = {"usage": {"prompt_tokens": 1, "completion_tokens": 5}}


def _choice(number: int, said: Said) -> dict[str, Any]:
    more = {"message": {"content": said}} if isinstance(said, str) else said
    return {"index": number, "finish_reason": "stop", **more}


def run(server: ChatServer, rows: list[dict[str, Any]], **tables: Any) -> Ended:
    write_jsonl(Path("rows.jsonl"), rows)
    job: dict[str, Any] = {
        "name": "a",
        "input": {"path": "rows.jsonl", "id": "id"},
        "engine": {"kind": "openai-server", "model": MODEL, "base_url": server.url},
        "prompt": {"user": "{{ id }} {{ q }}"},
        "sampling": {"n": 3, "temperature": 1.0},
    }
    if "steps" in tables:
        del job["prompt"]
    made = with_tables(job, tables)
    Path("job.toml").write_text(tomlkit.dumps(made))
    return batchkit("run", "job.toml")


def records() -> dict[str, dict[str, Any]]:
    """The newest by id."""
    return {record["id"]: record for record in read_jsonl(LOG)}


def one_row(said: list[list[Said]], *, a: str = "7", **tables: Any) -> dict[str, Any]:
    """The record of a row that is answered so."""
    with serving(answering({"r": said})) as server:
        ended = run(server, [{"id": "r", "q": "?", "a": a}], **tables)
    assert ended.exit_code in (0, 3), ended.stderr
    return records()["r"]


def test_the_answer_that_most_agree_with_is_the_rows() -> None:
    record = one_row([["so 5", "it is 7", "7.0 then"]], select=MAJORITY, scoring=NUMBER)
    assert (record["text"], record["prediction"], record["scores"]) == ("it is 7", "7", {"em": 1.0})
    assert (record["selected"], record["votes"]) == (1, {"5": 1, "7": 2})
    assert "choices" not in record


@pytest.mark.parametrize(
    ("said", "scoring", "selected", "votes"),
    [
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
    said: list[Said], scoring: dict[str, Any], selected: int, votes: dict[str, int]
) -> None:
    record = one_row([said], select=MAJORITY, scoring=scoring, sampling={"n": len(said)})
    assert record["status"] == "ok"
    assert (record["selected"], record["votes"]) == (selected, votes)


def test_a_row_whose_answers_all_broke_off_fails() -> None:
    broken: Said = {"message": {"content": "8"}, "finish_reason": "abort"}
    record = one_row([[broken] * 3], select=MAJORITY, scoring=NUMBER)
    assert (record["status"], record["error"]["kind"]) == ("failed", "server")


def test_the_best_by_a_scorer() -> None:
    scoring = {"extract": "number", "reference": "a", "scorers": ["em", "numeric"]}
    select = {"by": "scorer", "scorer": "numeric"}
    record = one_row([["it is 8", "none", "it is 7"]], select=select, scoring=scoring)
    assert (record["text"], record["selected"]) == ("it is 7", 2)
    assert record["scores"] == {"em": 1.0, "numeric": 1.0}
    assert "votes" not in record


def test_all_choices_are_kept_if_asked_for() -> None:
    kept = {"choices": True}
    record = one_row([["5", "7", "7"]], select=MAJORITY, scoring=NUMBER, output=kept)
    assert [choice["text"] for choice in record["choices"]] == ["5", "7", "7"]
    assert record["text"] == record["choices"][record["selected"]]["text"] == "7"


def test_choices_can_be_left_out_without_a_selection() -> None:
    record = one_row([["5", "7", "7"]], output={"choices": False})
    assert record["text"] == "5"
    assert not {"choices", "selected", "votes"} & record.keys()


@pytest.mark.parametrize(
    ("said", "attempt", "text"),
    [
        ([["x", "y", "7"], ["never", "asked", "for"]], 1, "7"),
        ([["x", "y", "z"], ["x", "8", "8"]], 2, "8"),
    ],
    ids=["one has it", "none has it"],
)
def test_a_row_is_asked_again_only_if_no_answer_has_a_prediction(
    said: list[list[Said]], attempt: int, text: str
) -> None:
    again = {"reask": 1, "reask_note": "A number!"}
    record = one_row(said, select=MAJORITY, scoring=NUMBER, retry=again)
    assert (record["attempt"], record["text"]) == (attempt, text)


def test_answers_that_are_not_json_do_not_vote() -> None:
    said: list[Said] = ["so 5", "so 5", '{"n": 7}', '{"n": 7, "b": 1}', '{"n": 5}']
    tables = {"output": {"parse": "json"}, "sampling": {"n": 5}}
    scoring = {"extract": "json", "key": "n"}
    record = one_row([said], select=MAJORITY, scoring=scoring, **tables)
    assert (record["parsed"], record["selected"]) == ({"n": 7}, 2)
    assert record["votes"] == {"7": 2, "5": 1}


DRAFT = {"name": "draft", "prompt": {"user": "{{ id }} {{ q }}"}}
JUDGE = {
    "name": "judge",
    "prompt": {
        "user": "judge{{ id }} {% for text in candidates %}{{ loop.index }}: {{ text }}; {% endfor %}"
    },
    "sampling": {"n": 1},
}


def judged(
    draft: list[Said], verdicts: list[list[Said]], judge: dict[str, Any] = JUDGE, **tables: Any
) -> tuple[dict[str, Any], list[str]]:
    """The record of a row, and what the judge was asked."""
    with serving(answering({"r": [draft], "judger": verdicts})) as server:
        rows = [{"id": "r", "q": "?", "a": "7"}]
        ended = run(server, rows, steps=[DRAFT, judge], select=BY_STEP, **tables)
        asked = [body["messages"][0]["content"] for body in server.bodies]
    assert ended.exit_code in (0, 3), ended.stderr
    return records()["r"], [text for text in asked if text.startswith("judge")]


def test_a_step_picks_one_of_the_candidates() -> None:
    record, asked = judged(["a 5", "b 6", "c 7"], [["the third, so 3"]], scoring=NUMBER)
    assert asked == ["judger 1: a 5; 2: b 6; 3: c 7; "]
    assert (record["text"], record["selected"], record["generations"]) == ("c 7", 2, 2)
    assert (record["prediction"], record["scores"]) == ("7", {"em": 1.0})
    assert record["steps"]["judge"]["text"] == "the third, so 3"
    assert record["usage"]["completion_tokens"] == 10
    assert "choices" not in record
    assert "choices" not in record["steps"]["draft"]


def test_a_judge_sees_only_whole_answers() -> None:
    broken: Said = {"message": {"content": "8"}, "finish_reason": "abort"}
    record, asked = judged([broken, "b 6", "c 7"], [["2"]], output={"choices": True})
    assert asked == ["judger 1: b 6; 2: c 7; "]
    assert (record["text"], record["selected"]) == ("c 7", 2)
    assert [choice["text"] for choice in record["choices"]] == ["8", "b 6", "c 7"]
    assert record["steps"]["draft"]["choices"] == ["8", "b 6", "c 7"]


@pytest.mark.parametrize("verdict", ["none is good", "the fourth: 4", "0", "-1", "1.5"])
def test_a_judge_that_names_none_is_asked_again_and_then_fails_its_row(verdict: str) -> None:
    failed, asked = judged(["5", "6", "7"], [[verdict]])
    assert (failed["status"], failed["error"]["kind"]) == ("failed", "invalid_output")
    assert "from 1 to 3" in failed["error"]["message"]
    assert "'judge'" in failed["error"]["message"]
    assert len(asked) == 2  # retry.attempts


def test_a_judge_is_asked_again_like_an_answer_that_is_not_json() -> None:
    record, asked = judged(["5", "6", "7"], [["who knows"], ["2"]])
    assert (record["status"], record["text"], len(asked)) == ("ok", "6", 2)


def test_where_the_judge_is_skipped_the_first_candidate_is_the_rows() -> None:
    judge = {**JUDGE, "when": "{{ candidates | unique | list | length > 1 }}"}
    record, asked = judged(["6", "6", "6"], [["2"]], judge)
    assert (record["text"], record["selected"], asked) == ("6", 0, [])
    assert record["steps"]["judge"] == {"skipped": True}


def test_a_judge_of_nothing_is_not_asked() -> None:
    with serving() as server:
        steps = [{**DRAFT, "when": "no"}, {**JUDGE, "prompt": {"user": "judger"}}]
        ended = run(server, [{"id": "r", "q": "?"}], steps=steps, select=BY_STEP)
        assert ended.exit_code == 3
        assert not [body for body in server.bodies if body["messages"][0]["content"] == "judger"]
    record = records()["r"]
    assert record["error"]["kind"] == "empty"


def test_steps_choose_each_by_what_it_looks_for() -> None:
    """The draft by its own number, the answer by [scoring]."""
    steps = [
        {**DRAFT, "extract": "number"},
        {"name": "end", "prompt": {"user": "end {{ steps.draft.text }}"}},
    ]
    said: dict[str, list[list[Said]]] = {
        "r": [["x 5", "x 7", "y 7"]],
        "end": [["Final Answer: no", "Final Answer: yes", "Final Answer: Yes"]],
    }
    with serving(answering(said)) as server:
        scoring = {"extract": "final-answer"}
        rows = [{"id": "r", "q": "?"}]
        ended = run(server, rows, steps=steps, select=MAJORITY, scoring=scoring)
        asked = [body["messages"][0]["content"] for body in server.bodies][-1]
    assert ended.exit_code == 0, ended.stderr
    record = records()["r"]
    assert asked == "end x 7"
    assert record["steps"]["draft"]["votes"] == {"5": 1, "7": 2}
    assert (record["text"], record["votes"]) == ("Final Answer: yes", {"no": 1, "yes": 2})
    lines = read_jsonl(RUN / "steps.jsonl")
    assert [(line["step"], line["selected"], line["text"]) for line in lines] == [
        ("draft", 1, "x 7"),
        ("end", 1, "Final Answer: yes"),
    ]


def test_only_generations_with_several_answers_need_an_extractor() -> None:
    draft = {**DRAFT, "extract": "number", "sampling": {"n": 3}}
    job = {"name": "a", "input": {"path": "rows.jsonl"}, "select": MAJORITY, **DRY}
    write_jsonl(Path("rows.jsonl"), [{"id": "r", "q": "?"}])
    steps = [draft, {**JUDGE, "prompt": {"user": "end"}}]
    Path("job.toml").write_text(tomlkit.dumps(job | {"steps": steps}))
    assert batchkit("run", "job.toml").exit_code == 0
    (record,) = read_jsonl(LOG)
    assert record["steps"]["draft"]["votes"] == {"0": 3}
    assert "votes" not in record


@pytest.mark.parametrize(
    "select",
    [MAJORITY, {"by": "scorer", "scorer": "em"}, BY_STEP],
    ids=["majority", "scorer", "step"],
)
def test_a_row_that_was_interrupted_before_its_record_makes_the_same_choice(
    select: dict[str, Any],
) -> None:
    """Its generations are in steps.jsonl: nothing is asked again."""
    drafts: list[Said] = ["so", '{"n": 5}', '{"n": 7}', '{"n": 7.0}']
    said: dict[str, list[list[Said]]] = {"r": [drafts], "judger": [["3"]]}
    draft = {**DRAFT, "parse": "json", "extract": "json", "key": "n"}
    last = {**JUDGE, "prompt": {"user": "judger {{ candidates }}"}}
    if select["by"] != "step":
        last["prompt"] = {"user": "judger {{ steps.draft.json.n }}"}
    tables: dict[str, Any] = {
        "steps": [{**draft, "scorers": ["em"], "reference": "a"}, last],
        "scoring": {"extract": "number", "scorers": ["em"], "reference": "a"},
        "select": select,
        "sampling": {"n": 4},
    }
    row = {"id": "r", "q": "?", "a": "7"}
    with serving(answering(said)) as server:
        assert run(server, [row], **tables).exit_code == 0
        first = records()["r"]
        LOG.write_bytes(b"")
        (RUN / "checkpoint.json").unlink()
        asked = len(server.bodies)
        assert run(server, [row], **tables).exit_code == 0
        assert len(server.bodies) == asked
    again = records()["r"]
    times = {"finished_at": "", "latency_s": 0.0}
    assert {**again, **times} == {**first, **times}
    assert first["steps"]["draft"]["text"] == ('{"n": 5}' if select["by"] == "step" else '{"n": 7}')
    assert first["text"] == ('{"n": 7.0}' if select["by"] == "step" else "3")


def test_a_change_of_a_later_step_makes_the_same_choice_by_another_runs_answers() -> None:
    """What a requeue uses again is chosen anew, with the references of ``scoring.reference_run``."""
    row = {"id": "r", "q": "?"}
    by_run = {"extract": "number", "scorers": ["em"], "reference_run": "output/reference"}
    tables: dict[str, Any] = {"scoring": by_run, "select": {"by": "scorer"}}
    last = {"name": "last", "prompt": {"user": "so {{ steps.draft.text }}"}, "sampling": {"n": 1}}
    changed = {**last, "prompt": {"user": "thus {{ steps.draft.text }}"}}
    said: dict[str, list[list[Said]]] = {"r": [["7"], ["it is 5", "it is 7", "6"]]}
    with serving(answering({**said, "so": [["7"]], "thus": [["7"]]})) as server:
        run(server, [row], name="reference", sampling={"n": 1}, scoring={"extract": "number"})
        run(server, [row], steps=[DRAFT, last], **tables)
        assert records()["r"]["steps"]["draft"]["text"] == "it is 7"
        run(server, [row], steps=[DRAFT, changed], **tables)
        assert batchkit("run", "job.toml", "--on-change", "requeue").exit_code == 0
        assert len(server.bodies) == 4
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
            {"scoring": {"scorers": ["judge"], "judge": DRY | {"prompt": {"user": "?"}}}},
            "found 'judge', expected one of scoring.scorers that is computed as rows finish",
        ),
        (
            MAJORITY,
            {"scoring": {"extract": "number"}, "sampling": {"n": 1}},
            "sampling.n: is 1; [select] chooses",
        ),
        (
            BY_STEP,
            {"steps": [DRAFT, {**JUDGE, "sampling": {"n": 4}}], "sampling": {"n": 1}},
            "sampling.n: is 1 in each step; [select] chooses",
        ),
        (
            BY_STEP,
            {"steps": [DRAFT, {**JUDGE, "sampling": {}}]},
            "steps.judge.sampling.n: is 3; a step that picks an answer needs n = 1",
        ),
        (
            {"by": "scorer"},
            {"steps": [{**DRAFT, "scorers": ["em"], "reference": "steps"}]},
            "steps.draft.reference: 'steps' are the answers of [[steps]]",
        ),
        (BY_STEP, {}, "select.step: found 'judge', expected"),
        (MAJORITY | {"step": "x"}, {"scoring": NUMBER}, 'select.step: is for by = "step"'),
        (
            MAJORITY,
            {"scoring": {"extract": "number"}, "rollout": {"function": "a:b"}},
            "[select]: a function does that itself",
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


def test_a_dry_run_of_a_judging_step_passes() -> None:
    write_jsonl(Path("rows.jsonl"), [{"id": "r", "q": "?"}])
    sampling = {"n": 3, "temperature": 1.0}
    job = {"name": "a", "input": {"path": "rows.jsonl", "id": "id"}, "sampling": sampling, **DRY}
    Path("job.toml").write_text(tomlkit.dumps(job | {"steps": [DRAFT, JUDGE], "select": BY_STEP}))
    ended = batchkit("run", "job.toml")
    assert ended.exit_code == 0, ended.stderr
    assert records()["r"]["selected"] == 0


@pytest.mark.parametrize(
    ("select", "changed"),
    [(MAJORITY, {"choices": ["5"]}), ({"by": "scorer"}, {**NUMBER, "scorers": ["numeric"]})],
    ids=["what votes", "the only scorer"],
)
def test_what_decides_the_choice_is_part_of_the_runs_identity(
    select: dict[str, Any], changed: dict[str, Any]
) -> None:
    one_row([["5", "7", "7"]], select=select, scoring=NUMBER)
    with serving() as server:
        ended = run(server, [{"id": "r", "q": "?", "a": "7"}], select=select, scoring=changed)
    assert ended.exit_code == 2
    assert "select.scoring" in ended.stderr
    assert manifest()["identity"]["select.by"] == select["by"]
