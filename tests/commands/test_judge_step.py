"""Answers whose judge is one of the job's own steps: no other run asks a model for the scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchkit.commands.run import run_job
from batchkit.commands.score import score_run
from batchkit.commands.score.judge import FOLDER
from batchkit.config.tables import JobConfig
from batchkit.config.tables.scoring import JudgeTable
from batchkit.errors import JobError
from tests.support.chat_server import ChatServer, serving
from tests.support.command_line import batchkit
from tests.support.judge import Judge, cut_off, judged
from tests.support.scored_runs import (
    counted,
    engine,
    job,
    quiet,
    run,
    scored,
    write_job,
)


def job_with_steps(
    folder: Path, server: ChatServer, scoring: Any = None, **judge: Any
) -> JobConfig:
    """The judge is skipped for the row q1."""
    asked = {"prompt": {"user": "JUDGE {{ id }} {{ steps.draft.text }}"}, "answer": False, **judge}
    steps = [
        {"name": "draft", "prompt": {"user": "{{ say }}"}},
        {"name": "judge", "when": "{{ id != 'q1' }}", **asked},
    ]
    judged = {"scorers": ["judge"], "judge": {"step": "judge", "max_score": 10}}
    return job(
        folder,
        counted(4),
        engine=engine(server),
        prompt={"user": None},
        steps=steps,
        scoring=judged if scoring is None else scoring,
    )


def test_the_answers_of_a_step_are_the_scores(tmp_path: Path) -> None:
    said: list[str] = []
    judge = Judge({"q0": ["Well. [Score]: 7"], "q2": ["9 of 10?"], "q3": ["**Score**: 12"]})
    with serving(judge) as server:
        found = run_job(job_with_steps(tmp_path, server), say=said.append).checked()
    folder = Path(found.folder)
    assert judged(folder) == {"q0": 0.7, "q1": None, "q2": None, "q3": 1.0}
    assert any("2 of 4 answers have no score from the step judge: " in text for text in said)
    assert judge.asked == {"q0": 1, "q2": 1, "q3": 1}
    assert not (folder / FOLDER).exists()


NUMBER, REGEX = {"extract": "number"}, {"extract": "regex", "pattern": r"Verdict=(\d+)"}
CUT = {name: [cut_off(f"Score: {text}")] for name, text in (("q0", "1"), ("q2", "5/"), ("q3", "1"))}
BOTH = {"q0": ["Score: 3 so far. Verdict=8"], "q2": ["Score: 3 so far."], "q3": ["Verdict=2"]}


@pytest.mark.parametrize(
    ("its", "said", "expected"),
    [
        (NUMBER, {"q0": ["2, then 7.5"], "q2": ["none"], "q3": ["-3"]}, [0.75, None, None, 0.0]),
        ({}, CUT, [None, None, 0.5, None]),
        (NUMBER, CUT, [0.1, None, 0.5, 0.1]),
        (REGEX, BOTH, [0.8, None, None, 0.2]),
        ({"scorers": ["em"], "reference": "a"}, BOTH, [0.3, None, 0.3, None]),
    ],
    ids=["extractor", "cut off", "one digit, as max_tokens says", "pattern", "scored otherwise"],
)
def test_a_verdict_is_read_in_one_way_alone(
    tmp_path: Path, its: dict[str, Any], said: Any, expected: list[float | None]
) -> None:
    """By the step's extractor; without one as a judge's text, whatever else scores the step."""
    with serving(Judge(said)) as server:
        folder = run(job_with_steps(tmp_path, server, **its))
    assert [*judged(folder).values()] == expected


def test_a_finished_run_is_scored_by_its_steps_without_asking_again(tmp_path: Path) -> None:
    judge = Judge({"q0": ["Score: 5"]})
    with serving(judge) as server:
        made = job_with_steps(tmp_path, server, scoring={})
        folder = run(made)
        asked = judge.asked.total()
        scoring = job_with_steps(tmp_path, server).scoring
        score_run(folder, made.model_copy(update={"scoring": scoring}), say=quiet)
        assert judge.asked.total() == asked
    assert scored(folder)["q0"][1] == {"judge": 0.5}


def test_a_judge_that_does_not_fit_the_run_is_refused_and_the_run_stays_as_it_is(
    tmp_path: Path,
) -> None:
    with serving(Judge({})) as server:
        made = job_with_steps(tmp_path, server)
        folder = run(made)
        steps = [step.model_copy(update={"name": f"{step.name}2"}) for step in made.steps]
        judge = made.scoring.model_copy(update={"judge": JudgeTable(step="judge2")})
        prompt = steps[1].prompt.model_copy(update={"user": "{{ steps.draft2.text }}"})
        steps[1] = steps[1].model_copy(update={"prompt": prompt})
        write_job(tmp_path, made.model_copy(update={"steps": steps, "scoring": judge}))
        done = batchkit("score", str(folder), "--job", str(tmp_path / "job.toml"))
    assert done.exit_code == 2
    assert "scoring.judge.step: found 'judge2'" in done.stderr
    assert batchkit("score", str(folder)).exit_code == 0


@pytest.mark.parametrize(
    ("judge", "words"),
    [
        ({}, r"scoring\.judge: set engine"),
        (
            {"step": "judge", "engine": {"kind": "dry-run"}},
            r"scoring\.judge: engine and step are both set",
        ),
        ({"step": "juge"}, r"scoring\.judge\.step: found 'juge', .* draft, judge; did you mean"),
        ({"step": "draft"}, r"steps\.draft: .* answer = false"),
        ({"step": "judge", "prompt": {"user": "?"}}, r"prompt comes from steps\.judge"),
    ],
)
def test_a_judge_that_does_not_fit_is_named(
    judge: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with serving() as server, pytest.raises(JobError, match=words):
        job_with_steps(tmp_path, server, {"scorers": ["judge"], "judge": judge})
