"""Answers that are judged by a model: once, only where asked for, and never lost."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from batchkit.commands.run import run_job
from batchkit.commands.score import score_run
from batchkit.commands.score.predictions import score_predictions
from batchkit.errors import BatchkitError
from tests.support.chat_server import Refused, error, serving
from tests.support.judge import Judge, cut_off, judged, judged_job
from tests.support.own_process import batchkit, begin
from tests.support.rows import write_jsonl
from tests.support.scored_runs import (
    NUMBER,
    counted,
    engine,
    job,
    quiet,
    run,
    scored,
    write_job,
)
from tests.support.waiting import until

pytestmark = pytest.mark.slow

NO_MODEL = {"kind": "openai-server", "model": "typo"}


VERDICTS: list[tuple[list[str | Exception], float | None]] = [
    (["[Score]: 80/100"], 0.8),
    (["Score: 7"], 0.07),
    (["I'd say [Score]: 90 / 100."], 0.9),
    (["**[Score]:** 250/100"], 1.0),
    (["hard to tell", "[Score]: 12.5"], 0.125),
    (["no idea"], None),
    (["**Score**: 85"], 0.85),
    (["**[Score]**: 86/100"], 0.86),
    (["Score: -5"], 0.0),
    (["Score: .5"], 0.005),
    (["[Score]: 3\nno, rather\n**[Score]: 4**"], 0.04),
    (["Score: \u22125", "[Score]: 5"], 0.05),
    ([cut_off("[Score]: 8")], None),
    ([cut_off("[Score]: 85/100\nThe reason is that 1")], 0.85),
]


def test_a_judge_s_score_is_read_clamped_and_asked_for_again(tmp_path: Path) -> None:
    judge = Judge({f"q{n}": verdicts for n, (verdicts, _) in enumerate(VERDICTS)})
    with serving(judge) as server:
        folder = run(judged_job(tmp_path, server, counted(len(VERDICTS))))
    expected = [score for _, score in VERDICTS]
    assert judged(folder) == {f"q{n}": score for n, score in enumerate(expected)}
    again = {"q4": 2, "q5": 3, "q11": 2}
    assert judge.asked == {f"q{n}": again.get(f"q{n}", 1) for n in range(len(VERDICTS))}
    assert any(prompt.startswith("JUDGE q0 0 / 0") for prompt in judge.prompts)
    overall = score_run(folder, say=quiet).to_json()["overall"]
    known = [100 * score for score in expected if score is not None]
    assert overall["judge"] == pytest.approx(sum(known) / len(known))
    assert overall["unscored_by"] == {"judge": 2}


def test_a_blank_answer_is_not_judged(tmp_path: Path) -> None:
    judge = Judge({})

    def before(text: str, body: dict[str, Any]) -> str:
        if text.startswith("JUDGE "):
            return judge(text, body)
        choices = [{"index": n, "message": {"content": said}} for n, said in enumerate(["", "1"])]
        raise Refused(200, {"choices": choices})

    with serving(before) as server:
        folder = run(judged_job(tmp_path, server, engine=engine(server), sampling={"n": 2}))
    assert scored(folder) == {f"q{n}": (None, {"em": None, "judge": None}) for n in range(3)}
    assert not judge.asked


def test_a_judgement_is_paid_for_once(tmp_path: Path) -> None:
    judge = Judge({})
    keep = {"keep": ["id", "a"]}
    with serving(judge) as server:
        made = judged_job(tmp_path, server, output=keep)
        folder = run(made)
        before = judged(folder)
        assert judge.asked.total() == 3
        score_run(folder, say=quiet)
        run(made)
        more = {"scorers": ["em", "f1", "judge"], "group_by": "kind"}
        made = judged_job(tmp_path, server, scoring=more, output=keep)
        run(made)  # it needs more of the row than was kept; the judge does not
        assert judge.asked.total() == 3
        number = {"extract": "regex", "pattern": r"row (\d)"}
        score_run(folder, judged_job(tmp_path, server, scoring=number, output=keep), say=quiet)
        assert judge.asked.total() == 3  # the same predictions, read in another way
        assert judged(folder) == before
        other = {"extract": "regex", "pattern": r"row ([01])"}
        score_run(folder, judged_job(tmp_path, server, scoring=other, output=keep), say=quiet)
    assert judge.asked == {"q0": 1, "q1": 1, "q2": 2}


def test_a_judge_that_is_away_costs_nothing_and_is_asked_later(tmp_path: Path) -> None:
    with serving(Judge({})) as server:
        port = server.port
        made = judged_job(tmp_path, server)
    write_job(tmp_path, made)
    done = batchkit("run", "job.toml", cwd=tmp_path)
    assert done.returncode == 1
    assert f"127.0.0.1:{port}/v1: no answer" in done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["ok"], summary["exit"]) == (3, 1)
    folder = tmp_path / "output/scored"
    assert scored(folder)["q2"] == ("2", {"em": 1.0, "judge": None})
    judge = Judge({})
    with serving(judge, port=port):
        done = batchkit("run", "job.toml", cwd=tmp_path)
    assert done.returncode == 0
    assert scored(folder)["q2"] == ("2", {"judge": 0.5, "em": 1.0})
    assert judge.asked.total() == 3


def test_a_judge_has_the_budget_of_tokens_for_itself_and_no_price(tmp_path: Path) -> None:
    judge = Judge({})

    def wordy(text: str, body: dict[str, Any]) -> str:
        try:
            return judge(text, body)
        except Refused as answer:
            answer.body["usage"]["completion_tokens"] = 20
            raise

    prices = {"max_price": 40.0, "price_per_million_tokens": [0.0, 2e6]}
    tables = {"max_in_flight": 1, "sample": 3, **prices}
    with serving(wordy) as server:
        made = judged_job(tmp_path, server, run={"max_completion_tokens": 19, **tables})
        stopped = run_job(made, say=quiet)
        assert (stopped.summary.ok, stopped.summary.exit) == (3, 1)
        assert "run.max_completion_tokens = 19 stopped the judge" in str(stopped.error)
        assert judge.asked.total() == 1
        run(judged_job(tmp_path, server, run={"max_completion_tokens": 99, **tables}))
    assert judge.asked == {"q0": 1, "q1": 1, "q2": 1}


def test_a_judgement_that_failed_is_tried_again_by_the_next_score(tmp_path: Path) -> None:
    judge = Judge({"q1": [Refused(400, error("not now")), "[Score]: 60"]})
    with serving(judge) as server:
        folder = run(judged_job(tmp_path, server))
        assert judged(folder)["q1"] is None
        score_run(folder, say=quiet)
        score_run(folder, say=quiet)
    assert judged(folder) == {"q0": 0.5, "q1": 0.6, "q2": 0.5}
    assert judge.asked == {"q0": 1, "q1": 2, "q2": 1}


def test_judgements_that_all_fail_end_in_exit_code_3(tmp_path: Path) -> None:
    refused: list[str | Exception] = [Refused(400, error("no"))]
    with serving(Judge(dict.fromkeys(("q0", "q1", "q2"), refused))) as server:
        write_job(tmp_path, judged_job(tmp_path, server))
        codes = [
            batchkit(command, "job.toml", cwd=tmp_path).returncode for command in ("run", "score")
        ]
    assert codes == [3, 3]


def test_judgements_outlive_whatever_is_tried_in_between(tmp_path: Path) -> None:
    """Another model, another prompt, another reference; and back."""
    judge, said = Judge({}), list[str]()
    with serving(judge) as server:
        made = judged_job(tmp_path, server, counted(3, b="7"))
        folder = run(made)
        before = scored(folder)
        elsewhere = {"engine": NO_MODEL | {"base_url": server.url}}
        away = judged_job(tmp_path, server, counted(3, b="7"), judge=elsewhere)
        with pytest.raises(BatchkitError, match="typo"):
            score_run(folder, away, say=quiet)
        misspelt = {"prompt": {"user": "JUDGE {{ id }} {{ predicton }}"}}
        other = judged_job(tmp_path, server, counted(3, b="7"), judge=misspelt)
        score_run(folder, other, say=said.append)
        assert judge.asked.total() == 3
        score_run(folder, made, say=quiet)
        assert judge.asked.total() == 3
        assert scored(folder) == before
        reference = made.scoring.model_copy(update={"reference": "b"})
        score_run(folder, made.model_copy(update={"scoring": reference}), say=quiet)
        assert judge.asked.total() == 6  # it is shown another reference: that is another question
        score_run(folder, made, say=quiet)
        score_run(folder, made.model_copy(update={"scoring": reference}), say=quiet)
    assert judge.asked.total() == 6
    assert any(
        t.startswith("3 of 3 judgements failed, the first with template: ") and "'predicton'" in t
        for t in said
    )


def test_rows_that_come_and_go_keep_their_judgements(tmp_path: Path) -> None:
    judge = Judge({})

    def requeue(rows: list[dict[str, Any]]) -> None:
        made = judged_job(tmp_path, server, rows, engine={"kind": "dry-run"}, scoring=text)
        run_job(made, on_change="requeue", say=quiet).checked()

    text = {"extract": "regex", "pattern": "^."}  # dry-run's answers name their rows' indexes
    with serving(judge) as server:
        folder = run(judged_job(tmp_path, server, counted(4), scoring=text))
        requeue([{"id": "new", "say": "?", "a": "x", "kind": "k"}, *counted(4)])
        assert judge.asked == {"q0": 1, "q1": 1, "q2": 1, "q3": 1, "new": 1}
        requeue(counted(2))
        requeue(counted(4)[::-1])
        assert judge.asked.total() == 5
    assert {*judged(folder).values()} == {0.5}


def test_answers_that_show_a_judge_the_same_are_judged_once(tmp_path: Path) -> None:
    judge = Judge({})
    prompt = {"user": "JUDGE all {{ reference }}"}
    with serving(judge) as server:
        rows = [{**row, "a": "same"} for row in counted(5)]
        folder = run(judged_job(tmp_path, server, rows, judge={"prompt": prompt}))
    assert judge.asked == {"all": 1}
    assert [*judged(folder).values()] == [0.5] * 5


@pytest.mark.parametrize(
    ("keep", "is_there", "tone"),
    [(["a"], True, "rude"), (["a", "id", "tone"], False, "rude"), (["a", "id"], False, "kind")],
    ids=["from the input", "as it was kept", "not known any more"],
)
def test_a_judge_sees_the_rows_own_value_of_a_name_that_vars_has(
    keep: list[str], is_there: bool, tone: str, tmp_path: Path
) -> None:
    judge, (first, second) = Judge({}), counted(2)
    rows = [first, {**second, "tone": "rude"}]
    made = {
        "vars": {"tone": "kind", "reference": "none", "unread": 1},
        "output": {"keep": keep},
        "judge": {"prompt": {"user": "JUDGE {{ id }} {{ tone }} {{ reference }}"}},
    }
    with serving(judge) as server:
        folder = run(judged_job(tmp_path, server, rows, scoring={"scorers": ["em"]}, **made))
        asked = judged_job(tmp_path, server, rows, **made)
        if not is_there:
            (tmp_path / "rows.jsonl").unlink()
        score_run(folder, asked, say=quiet)
    assert sorted(judge.prompts) == ["JUDGE q0 kind 0", f"JUDGE q1 {tone} 1"]


def test_a_judge_with_another_file_in_its_prompt_is_another_judge(tmp_path: Path) -> None:
    """A secret that it does not read is no part of it: that is masked in job.toml."""
    judge, rules = Judge({}), tmp_path / "rules.txt"
    prompt = {
        "user": "JUDGE {{ id }} {{ rules }} {{ prediction }}",
        "texts": {"rules": "rules.txt"},
    }
    tables = {"media": {"root": str(tmp_path)}, "vars": {"api_key": "sk-secret"}}
    with serving(judge) as server:
        rules.write_text("kind")
        folder = run(judged_job(tmp_path, server, judge={"prompt": prompt}, **tables))
        score_run(folder, say=quiet)
        assert judge.asked.total() == 3
        rules.write_text("strict")
        score_run(folder, say=quiet)
    assert judge.asked.total() == 6
    assert {prompt.split()[2] for prompt in judge.prompts} == {"kind", "strict"}


@pytest.mark.parametrize(
    ("command", "signum"),
    [("score", signal.SIGINT), ("run", signal.SIGTERM), ("run", signal.SIGKILL)],
)
def test_judging_may_be_ended_and_pays_again_only_for_what_was_in_flight(
    tmp_path: Path, command: str, signum: int
) -> None:
    judge, is_killed = Judge({}), signum == signal.SIGKILL

    def slowly(text: str, body: dict[str, Any]) -> str:
        time.sleep(0.1)
        return judge(text, body)

    with serving(slowly) as server:
        slow = {**engine(server), "options": {"max_num_seqs": 2}}
        made = judged_job(tmp_path, server, counted(60), judge={"engine": slow})
        if command == "score":
            plain = made.scoring.model_copy(update={"scorers": ["em"]})
            run(made.model_copy(update={"scoring": plain}))
        write_job(tmp_path, made)
        for goal in (10, 20) if is_killed else (10,):
            process = begin(command, "job.toml", cwd=tmp_path)
            until(lambda: judge.asked.total() >= goal)  # noqa: B023
            process.send_signal(signum)
            stdout, stderr = process.communicate(timeout=20)
            assert process.returncode == (-signum if is_killed else 128 + signum), stderr
            assert ("run the same command to continue" in stderr) == (not is_killed)
        if signum == signal.SIGTERM:
            summary = json.loads(stdout.splitlines()[-1])
            assert (summary["ok"], summary["exit"]) == (60, 128 + signum)
        assert {scores["em"] for _, scores in scored(made.folder).values()} == {1.0}
        assert {*judged(made.folder).values()} == {None}
        server.before = judge
        assert batchkit(command, "job.toml", cwd=tmp_path).returncode == 0
    assert {*judged(made.folder).values()} == {0.5}
    # What was in flight as it stopped; of a killed one, twice, and one that was being written.
    assert 60 <= judge.asked.total() <= (66 if is_killed else 64)


def test_only_the_rows_of_a_rule_are_judged_with_their_texts_and_images(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("TABLE 1", encoding="utf-8")
    Image.new("RGB", (40, 40), "red").save(tmp_path / "q1.png")
    kinds_and_rows = zip("aba", counted(3, params={"max_tokens": 9}), strict=True)
    rows = [{**row, "kind": kind} for kind, row in kinds_and_rows]
    judge = Judge({})
    with serving(judge) as server:
        made = judged_job(
            tmp_path,
            server,
            rows,
            scoring={"scorers": ["em"], "rules": [{"where": {"kind": "b"}, "scorers": ["judge"]}]},
            judge={
                "prompt": {
                    "user": "JUDGE {{ id }} {{ table }}",
                    "texts": {"table": "t.txt"},
                    "images": ["{{ id }}.png"],
                },
                "sampling": {"sampling_column": "params"},
            },
            output={"keep": ["id", "a", "kind"]},
        )
        folder = run(made)
        kinds = [part["type"] for part in server.bodies[-1]["messages"][0]["content"]]
        score_run(folder, say=quiet)
    assert judge.prompts == ["JUDGE q1 TABLE 1"]
    assert kinds == ["image_url", "text"]
    assert server.bodies[-1]["max_tokens"] == 9
    assert [scores for _, scores in scored(folder).values()] == [
        {"em": 1},
        {"judge": 0.5},
        {"em": 1},
    ]


def test_without_a_judge_its_rows_are_unscored_and_that_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    scoring = {**NUMBER, "scorers": ["em", "judge"]}
    run_job(job(tmp_path, counted(2), scoring=scoring), say=said.append).checked()
    assert "2 answers are not judged: set a model or a step in [scoring.judge]" in said
    assert "| 100.00 |" in said[-1]


def test_judgements_of_predictions_from_elsewhere_are_kept_beside_them(tmp_path: Path) -> None:
    judge = Judge({})
    made_elsewhere = [{"id": f"q{n}", "prediction": str(n)} for n in range(3)]
    path = write_jsonl(tmp_path / "made.jsonl", made_elsewhere)

    def dies_after_two(text: str, body: dict[str, Any]) -> str:
        if judge.asked.total() == 2:
            raise Refused(401, error("Incorrect API key provided"))
        return judge(text, body)

    with serving(dies_after_two) as server:
        one = {**engine(server), "options": {"max_num_seqs": 1}}
        made = judged_job(tmp_path, server, judge={"engine": one})
        with pytest.raises(BatchkitError):
            score_predictions(made, path, quiet)
        server.before = judge
        for _ in range(2):
            found, _ = score_predictions(made, path, quiet)
            overall = {"n": 3, "em": 100, "judge": 50, "unscored": 0, "failed": 0}
            assert found.to_json()["overall"] == overall
    assert not (tmp_path / "output").exists()
    assert judge.asked == {"q0": 1, "q1": 1, "q2": 1}
    assert (tmp_path / "made.jsonl.judge").is_dir()
