"""The scorer ``judge`` (GPT_EVAL): a second model gives each answer a score.

Judging is an ordinary run that can be resumed and retried. Each of its rows is a question to the judge: the texts that
the judge's prompt needs for one answer. The row's id is a hash of these texts, so a stored judgement is found again
even if the answer's row changes.

Each judge (its model, prompt, and other settings that decide its answers) has a separate run folder. So trying another
judge does not affect the first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from batchkit.commands import Say
from batchkit.commands.trial import tried
from batchkit.config.loading import resolve_paths
from batchkit.config.tables import JobConfig, JudgeTable, ScoringTable
from batchkit.errors import BudgetError
from batchkit.execution.start import StartOptions
from batchkit.execution.stop import StopRequest
from batchkit.rendering.templates.prompt import constant_files, names_in
from batchkit.scoring import Scoring
from batchkit.scoring.deferred import Answered
from batchkit.scoring.values import numbers_in
from batchkit.sources.input import Input
from batchkit.sources.rowhash import input_hash
from batchkit.storage.checkpoint import check_log
from batchkit.storage.identity import hash_of, identity
from batchkit.storage.job_toml import without_masked
from batchkit.storage.lines import failure_kind
from batchkit.storage.log import RESULTS
from batchkit.storage.newest_lines import read_newest
from batchkit.storage.runfolder import claim, is_run
from batchkit.types import Row

FOLDER = "judge"  # in a run folder; has one folder for each judge
NAMES = ("prediction", "reference", "text")
# The number after the last `[Score]:` or `Score:`, bold or not. A slash ends it: "85/100" is 85. Only a plain minus
# is accepted as sign: with another dash, "−5" is requested again instead of being read as 5.
_PATTERN = r"Score[\]*_]*\s*:[^\w.+\-\u2010-\u2015\u2212]*([+-]?(?:\d+(?:\.\d+)?|\.\d+))"
_READ: dict[str, Any] = {"extract": "regex", "pattern": _PATTERN}
_NOTE = "Answer with one line in this format alone: [Score]: xx/100"


def judge(
    job: JobConfig,
    table: JudgeTable,
    answers: Sequence[Answered],
    folder: Path,
    stop: StopRequest,
    say: Say,
) -> dict[int, float | None]:
    """Return the judge's score of each answer, from 0 to 1, by row index; None if the judge gave none.

    ``folder``: stores the judgements. The judge is asked only for those that are missing or failed.

    Raises:
        BatchkitError, Interrupted: The judge's run stopped. The next call resumes it.
    """
    judging, names = _job(job, table, folder), names_read(job, table)
    key_of: dict[int, str] = {}
    questions: dict[str, Mapping[str, Any]] = {}
    for answer in answers:
        shown = _shown(answer, names, job.vars)
        key_of[answer.index] = key = input_hash(shown)
        questions[key] = shown
    with claim(folder):  # no other process may judge at the same time
        _ask(judging, questions, stop)
        judged = _records(judging)
    failed = [judged[key] for key in questions if failure_kind(judged[key]) is not None]
    if failed:
        error = failed[0].get("error") or {}
        say(
            f"{len(failed):,} of {len(questions):,} judgements failed, the first with"
            f" {failure_kind(failed[0])}: {error.get('message', 'no answer')}; `batchkit score`"
            " retries them"
        )
    scores = {
        key: _score(_unless_cut(judged[key].get("prediction"), judged[key]), table)
        for key in questions
    }
    return {index: scores[key] for index, key in key_of.items()}


def _ask(judging: JobConfig, questions: Mapping[str, Mapping[str, Any]], stop: StopRequest) -> None:
    """Ask the judge the questions that have no judgement, or a failed one.

    A question keeps its row index in the judge's run.
    """
    known = _records(judging)
    new = count(1 + max((record["index"] for record in known.values()), default=-1))
    rows, attempts = list[Row](), dict[int, int]()
    for key, shown in questions.items():
        record = known.get(key) or {"index": next(new), "attempt": 0}
        if key not in known or failure_kind(record) is not None:
            rows.append(Row(record["index"], key, shown))
            attempts[record["index"]] = record["attempt"]
    if not rows:
        return

    def read(skip: Callable[[int], bool]) -> Iterator[Row]:
        return (row for row in rows if not skip(row.index))

    size = next(new)
    # An empty list: new questions must not count as a changed input.
    source = Input(files=[], read=read, everything=read, size=lambda: size, has_ids=True)
    options = StartOptions(attempts=attempts, command="score")
    summary = tried(judging, source, options, stop=stop)
    if summary.stopped_by:
        raise BudgetError(
            f"{judging.folder}: {summary.stopped_by} stopped the judge. All rows are answered, and finished"
            " judgements are kept; `batchkit score` continues, but a budget of tokens or money must be increased first"
        )


def _records(judging: JobConfig) -> dict[str, dict[str, Any]]:
    """Return the newest record of every question that the judge was asked, by question id."""
    if not is_run(judging.folder):
        return {}
    check_log(judging.folder)
    return {record["id"]: record for record in read_newest(judging.folder / RESULTS)}


def names_read(job: JobConfig, table: JudgeTable) -> set[str]:
    """Return the names that the judge's prompt uses: fields of the row, some of ``NAMES``, or names in ``[vars]``.

    A name in ``[vars]`` is used if the row has no such field.
    """
    column = table.sampling.sampling_column
    names = names_in(job.model_copy(update={"vars": {}}), table.prompt, ())
    return names | (set() if column is None else {column})


def _job(job: JobConfig, table: JudgeTable, folder: Path) -> JobConfig:
    """Return the job of the judge's run. Its name contains the model and a hash of all settings that decide the
    judgements.

    It has only the ``[vars]`` that its prompt uses, so that other variables don't change the hash.
    """
    job = resolve_paths(job, Path.cwd())
    read = names_read(job, table)
    made = JobConfig.model_validate(
        {
            "vars": {name: value for name, value in job.vars.items() if name in read},
            "prompt": table.prompt,
            "media": job.media,
            "engine": table.engine,
            "sampling": table.sampling,
            "run": job.run.of_part(),
            "retry": {
                "attempts": job.retry.attempts,
                "on_too_long": "truncate-middle",
                "reask": 2,
                "reask_note": _NOTE,
            },
            "output": {"dir": str(folder)},
            "scoring": _READ,
        }
    )
    made = resolve_paths(without_masked(made), Path.cwd())
    model = re.sub(r"[^A-Za-z0-9]+", "-", Path(made.engine.model).name)[:40].strip("-")
    decides = hash_of(identity(made, constant_files(made)))
    return made.model_copy(update={"name": f"{model or FOLDER}-{decides[:8]}"})


def _shown(answer: Answered, names: set[str], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that the judge's prompt uses for this answer: those of its ``names`` that differ from row to
    row. Equal values get an equal judgement, so the values identify it. ``known``: the job's ``[vars]``."""
    own = {
        "prediction": answer.known.prediction or "",
        "reference": answer.reference or "",
        "text": answer.text,
    }
    return {
        name: value
        for name, value in {**answer.fields, **own}.items()
        if name in names
        and not (value is None and name in known)  # drop null fields of a row that lacks the name
    }


def judged_by_step(
    job: JobConfig, table: JudgeTable, answers: Sequence[Answered], say: Say
) -> dict[int, float | None]:
    """Return the score that the row's step ``table.step`` gave each answer, by row index.

    It is the first number in the step's prediction if the step has an extractor. Otherwise it is read from the step's
    text as from a judge's answer.
    """
    found: dict[int, float | None] = {}
    name, reading = table.step or "", Scoring(ScoringTable(**_READ), say=say)
    extracts = {step.extract for step in job.steps if step.name == name} - {None, "text"}
    for answer in answers:
        verdict = answer.steps.get(name, {})
        score: str | float | None
        if extracts:
            score = next(iter(numbers_in(verdict.get("prediction") or "")), None)
        else:
            score = _unless_cut(reading.found(verdict.get("text", ""), {}, answer.id), verdict)
        found[answer.index] = _score(score, table)
    if missing := sum(score is None for score in found.values()):
        where = "number that its extract finds" if extracts else "line [Score]: x in its text"
        say(
            f"{missing:,} of {len(found):,} answers have no score from the step {name}: it was skipped, or"
            f" there is no {where}"
        )
    return found


def _unless_cut(found: str | None, answer: Mapping[str, Any]) -> str | None:
    """Return the score ``found``. Return None if the answer was cut off right after it, since it may have had more
    digits."""
    if found is None or answer.get("finish_reason") != "length":
        return found
    return None if (answer.get("text") or "").removesuffix(".").endswith(found) else found


def _score(found: str | float | None, table: JudgeTable) -> float | None:
    return None if found is None else min(max(float(found) / table.max_score, 0.0), 1.0)
