"""Answers that a judge scores: a job over a run, whose scores are joined into those of the run."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from batchkit.commands.run import run_job
from batchkit.commands.score import score_run
from batchkit.config.loading import load_job
from batchkit.errors import BudgetError, ChangedError, JobError
from batchkit.runs.listing import runs_below
from tests.support import command_line
from tests.support.chat_server import Refused, error, serving
from tests.support.judge import Judge, judge_file, judge_of, judged
from tests.support.own_process import batchkit, begin
from tests.support.scored_runs import NUMBER, counted, engine, job, quiet, run, scored, write_job
from tests.support.waiting import until

pytestmark = pytest.mark.slow


def answered(folder: Path, count: int = 3, **tables: Any) -> Path:
    """A run whose row qN is answered N."""
    return run(job(folder, counted(count), **{"scoring": NUMBER, **tables}))


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
]


def test_a_judge_s_score_is_read_clamped_and_asked_for_again(tmp_path: Path) -> None:
    judge = Judge({f"q{n}": verdicts for n, (verdicts, _) in enumerate(VERDICTS)})
    folder = answered(tmp_path, len(VERDICTS))
    with serving(judge) as server:
        found = judge_of(folder, judge_file(tmp_path, server))
    expected = [score for _, score in VERDICTS]
    assert judged(folder) == {f"q{n}": score for n, score in enumerate(expected)}
    again = {"q4": 2, "q5": 3, "q11": 2}
    assert judge.asked == {f"q{n}": again.get(f"q{n}", 1) for n in range(len(VERDICTS))}
    assert any(prompt.startswith("JUDGE q0 0 / 0") for prompt in judge.prompts)
    overall = found.to_json()["overall"]
    known = [100 * score for score in expected if score is not None]
    assert overall["judge"] == pytest.approx(sum(known) / len(known))
    assert overall["unscored_by"] == {"judge": 1}
    assert overall["em"] == 100


def test_scores_of_a_judge_are_in_the_table_the_export_and_the_report(tmp_path: Path) -> None:
    folder, csv = answered(tmp_path), tmp_path / "rows.csv"
    with serving(Judge({"q1": ["Score: 20"]})) as server:
        table = command_line.batchkit(
            "score", str(folder), "--judge", str(judge_file(tmp_path, server))
        )
    assert "GPT_EVAL" in table.stdout
    assert command_line.batchkit("export", str(folder), str(csv)).exit_code == 0
    head, _, second, _ = csv.read_text().splitlines()
    assert dict(zip(head.split(","), second.split(","), strict=True))["scores.judge"] == "0.2"
    assert "|    40.00 |" in command_line.batchkit("report", str(folder)).stdout
    assert {*runs_below(tmp_path / "output").folders()} == {"scored:judge", "scored"}


def test_an_answer_is_judged_once(tmp_path: Path) -> None:
    judge = Judge()
    made = job(tmp_path, counted(3), scoring=NUMBER)
    folder = run(made)
    with serving(judge) as server:
        path = judge_file(tmp_path, server)
        judge_of(folder, path)
        before = judged(folder)
        judge_of(folder, path)
        score_run(folder, say=quiet)
        run(made)
        score_run(
            folder, job(tmp_path, counted(3), scoring={**NUMBER, "scorers": ["f1"]}), say=quiet
        )
        assert judged(folder) == before == {"q0": 0.5, "q1": 0.5, "q2": 0.5}
        assert scored(folder)["q2"][1].keys() == {"f1", "judge"}
        judge_of(folder, path)
    assert judge.asked == {"q0": 1, "q1": 1, "q2": 1}


def test_a_run_without_scoring_is_judged(tmp_path: Path) -> None:
    folder = run(job(tmp_path, counted(2), scoring={}))
    with serving(Judge()) as server:
        judge_of(folder, judge_file(tmp_path, server))
    assert score_run(folder, say=quiet).to_json()["overall"]["judge"] == 50
    assert judged(folder) == {"q0": 0.5, "q1": 0.5}


def test_a_judge_sees_the_columns_of_the_original_input_and_only_the_rows_that_it_asks_for(
    tmp_path: Path,
) -> None:
    rows = [
        {**row, "tone": "rude", "kind": kind} for row, kind in zip(counted(3), "aba", strict=True)
    ]
    write_job(tmp_path, job(tmp_path, rows, scoring=NUMBER))
    folder, judge = run(load_job(tmp_path / "job.toml")), Judge()
    with serving(judge) as server:
        prompt = {"user": "JUDGE {{ id }} {{ tone }} {{ scores.em }} {{ text }}"}
        judge_of(
            folder, judge_file(tmp_path, server, prompt=prompt, input={"where": {"kind": "b"}})
        )
    (asked,) = judge.prompts
    assert asked.startswith("JUDGE q1 rude 1.0 ")
    assert [scores for _, scores in scored(folder).values()] == [
        {"em": 1},
        {"em": 1, "judge": 0.5},
        {"em": 1},
    ]


def test_failed_rows_are_not_judged(tmp_path: Path) -> None:
    rows = [{"id": "bad", "a": "0"}, *counted(2)]
    folder = run(job(tmp_path, rows, scoring=NUMBER, run={"check_rows": 0}))
    judge = Judge({"q0": ["Score: 10"]})
    with serving(judge) as server:
        judge_of(folder, judge_file(tmp_path, server))
    assert judge.asked == {"q0": 1, "q1": 1}
    assert judged(folder) == {"bad": None, "q0": 0.1, "q1": 0.5}


def test_a_judgement_that_failed_is_tried_again_by_the_next_score(tmp_path: Path) -> None:
    judge = Judge({"q1": [Refused(400, error("not now")), "[Score]: 60"]})
    folder = answered(tmp_path)
    with serving(judge) as server:
        path = judge_file(tmp_path, server)
        judge_of(folder, path)
        assert judged(folder)["q1"] is None
        judge_of(folder, path)
        judge_of(folder, path)
    assert judged(folder) == {"q0": 0.5, "q1": 0.6, "q2": 0.5}
    assert judge.asked == {"q0": 1, "q1": 2, "q2": 1}


def test_judgements_that_all_fail_end_in_exit_code_3(tmp_path: Path) -> None:
    refused: list[str | Exception] = [Refused(400, error("no"))]
    folder = answered(tmp_path)
    with serving(Judge(dict.fromkeys(("q0", "q1", "q2"), refused))) as server:
        path = judge_file(tmp_path, server, run={"check_rows": 0})
        codes = [judge_of(folder, path).exit_code for _ in range(2)]
    assert codes == [3, 3]


def test_rows_that_come_and_go_keep_their_judgements(tmp_path: Path) -> None:
    judge = Judge()

    def requeue(rows: list[dict[str, Any]]) -> None:
        made = job(tmp_path, rows, scoring={"extract": "text"})
        run_job(made, on_change="requeue", say=quiet).checked()
        judge_of(folder, path)
        assert judged(folder) == {row["id"]: 0.5 for row in rows}

    with serving(judge) as server:
        path = judge_file(tmp_path, server)
        folder = run(job(tmp_path, counted(4), scoring={"extract": "text"}))
        judge_of(folder, path)
        requeue([{"id": "new", "say": "?", "a": "x", "kind": "k"}, *counted(4)])
        assert judge.asked == {"q0": 1, "q1": 1, "q2": 1, "q3": 1, "new": 1}
        requeue(counted(2))
        assert judge.asked.total() == 5


def test_another_judge_needs_another_name(tmp_path: Path) -> None:
    judge, folder = Judge(), answered(tmp_path)
    with serving(judge) as server:
        judge_of(folder, judge_file(tmp_path, server))
        other = {"prompt": {"user": "JUDGE {{ id }}"}}
        with pytest.raises(ChangedError, match=r"prompt\.user"):
            judge_of(folder, judge_file(tmp_path, server, **other))
        judge_of(folder, judge_file(tmp_path, server, name="other", **other))
        judge_of(folder, judge_file(tmp_path, server, **other), on_change="requeue")
    assert judge.asked == {"q0": 3, "q1": 3, "q2": 3}
    assert scored(folder)["q0"][1] == {"em": 1, "judge": 0.5, "other": 0.5}


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"scoring": {"extract": "score", "scorers": []}}, "gives no scores"),
        ({"name": "em"}, "already has a score 'em'"),
        ({"input": {"cross": {"x": [1, 2]}}}, "input.cross"),
    ],
)
def test_a_judge_that_does_not_fit_is_refused(
    tables: dict[str, Any], words: str, tmp_path: Path
) -> None:
    folder = answered(tmp_path)
    with serving() as server, pytest.raises(JobError, match=words):
        judge_of(folder, judge_file(tmp_path, server, **tables))


def test_each_scorer_of_a_judge_gives_a_score(tmp_path: Path) -> None:
    folder = answered(tmp_path, 1)
    both = {"scoring": {"scorers": [{"judge": {"max_score": 10}}, "reward"]}}
    with serving(Judge({"q0": ["Score: 4"]})) as server:
        judge_of(folder, judge_file(tmp_path, server, **both))
    assert scored(folder)["q0"][1] == {"em": 1, "judge.judge": 0.4, "judge.reward": 0.4}


def test_a_judge_continues_after_its_budget(tmp_path: Path) -> None:
    judge, folder = Judge(), answered(tmp_path)
    with serving(judge) as server:
        limits = {"run": {"max_in_flight": 1}, "budget": {"max_completion_tokens": 1}}
        with pytest.raises(
            BudgetError, match=r"the judge was stopped by budget\.max_completion_tokens = 1"
        ):
            judge_of(folder, judge_file(tmp_path, server, **limits))
        assert {*judged(folder).values()} == {None}
        judge_of(folder, judge_file(tmp_path, server))
    assert judge.asked == {"q0": 1, "q1": 1, "q2": 1}


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_judging_may_be_ended_and_asks_again_only_for_what_was_in_flight(
    tmp_path: Path, signum: int
) -> None:
    judge, is_killed = Judge(), signum == signal.SIGKILL

    def slowly(text: str, body: dict[str, Any]) -> str:
        time.sleep(0.1)
        return judge(text, body)

    folder = answered(tmp_path, 60)
    with serving(slowly) as server:
        slow = {**engine(server), "options": {"max_num_seqs": 2}}
        judge_file(tmp_path, server, engine=slow)
        command = "score", str(folder), "--judge", "judge.toml"
        for goal in (10, 20) if is_killed else (10,):
            process = begin(*command, cwd=tmp_path)
            until(lambda: judge.asked.total() >= goal)  # noqa: B023
            process.send_signal(signum)
            _, stderr = process.communicate(timeout=20)
            assert process.returncode == (-signum if is_killed else 128 + signum), stderr
            assert ("run the same command to continue" in stderr) == (not is_killed)
        assert {*judged(folder).values()} == {None}
        server.before = judge
        assert batchkit(*command, cwd=tmp_path).returncode == 0
    assert {*judged(folder).values()} == {0.5}
    # In flight as it stopped; of a killed one, twice, and one that was being written.
    assert 60 <= judge.asked.total() <= (66 if is_killed else 64)
