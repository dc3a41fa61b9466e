"""GPT_EVAL: a second model gives each answer a score.

Judging is an ordinary run, which resumes, retries and loses nothing. Its rows are the questions: what the
judge is shown of an answer, identified by a hash. So a judgement that was paid for is found again
whatever happens to the answer's row; and each judge (its model, prompt and all that decides its answers)
has its own run folder, so trying another one does not affect the first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from batchkit.commands import Say
from batchkit.commands.trial import tried
from batchkit.config.loading import resolve_paths
from batchkit.config.tables import JobConfig, JudgeTable, ScoringTable
from batchkit.errors import BudgetError
from batchkit.execution.start import Options
from batchkit.execution.stop import StopRequest
from batchkit.rendering.templates.prompt import constant_files, names_in
from batchkit.scoring import Scored, Scoring
from batchkit.scoring.values import numbers_in
from batchkit.sources.input import Input
from batchkit.sources.rowhash import input_hash
from batchkit.storage.checkpoint import check_log
from batchkit.storage.identity import hash_of, identity
from batchkit.storage.job_toml import without_masked
from batchkit.storage.lines import failure_kind
from batchkit.storage.log import RESULTS
from batchkit.storage.newest import read_newest
from batchkit.storage.runfolder import claim, is_run
from batchkit.types import Row

FOLDER = "judge"  # of a run: holds a folder for each judge
NAMES = ("prediction", "reference", "text")
# The number after the last `[Score]:` or `Score:`, bold or not; a slash ends it: "85/100" is 85. A
# sign that is not a plain minus hides it, so that "−5" is asked again instead of read as 5.
_PATTERN = r"Score[\]*_]*\s*:[^\w.+\-\u2010-\u2015\u2212]*([+-]?(?:\d+(?:\.\d+)?|\.\d+))"
_READ: dict[str, Any] = {"extract": "regex", "pattern": _PATTERN}
_NOTE = "Answer with one line in this format alone: [Score]: xx/100"


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer, the fields of its row, and the scores that could be computed at once; ``steps``: what
    each of the row's ``[[steps]]`` answered, as in its record."""

    index: int
    id: str
    fields: Mapping[str, Any]
    text: str
    known: Scored
    steps: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def judge(
    job: JobConfig,
    scoring: Scoring,
    table: JudgeTable,
    answers: Sequence[Answered],
    folder: Path,
    stop: StopRequest,
    say: Say,
) -> dict[int, float | None]:
    """Each answer's score by its index, from 0 to 1; None if the judge gave none.

    ``folder`` keeps the judgements: only those that are missing or failed are requested.

    Raises:
        BatchkitError, Interrupted: the judge's run stopped; the next call continues it.
    """
    judging, names = _job(job, table, folder), names_read(job, table)
    key_of: dict[int, str] = {}
    questions: dict[str, Mapping[str, Any]] = {}
    for answer in answers:
        shown = _shown(answer, scoring.reference(answer.fields, answer.id), names, job.vars)
        key_of[answer.index] = key = input_hash(shown)
        questions[key] = shown
    with claim(folder):  # no other process may judge meanwhile
        _ask(judging, questions, stop)
        judged = _records(judging)
    failed = [judged[key] for key in questions if failure_kind(judged[key]) is not None]
    if failed:
        error = failed[0].get("error") or {}
        say(
            f"{len(failed):,} of {len(questions):,} judgements failed, the first with"
            f" {failure_kind(failed[0])}: {error.get('message', 'no answer')}; `batchkit score`"
            " tries them again"
        )
    scores = {
        key: _score(_unless_cut(judged[key].get("prediction"), judged[key]), table)
        for key in questions
    }
    return {index: scores[key] for index, key in key_of.items()}


def _ask(judging: JobConfig, questions: Mapping[str, Mapping[str, Any]], stop: StopRequest) -> None:
    """Those that have no answer yet. Each keeps the index at which it was first asked."""
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
    # No files: other questions are not a change of the input.
    source = Input(files=[], read=read, everything=read, size=lambda: size, has_ids=True)
    options = Options(attempts=attempts, command="score")
    summary = tried(judging, source, options, stop=stop)
    if summary.stopped_by:
        raise BudgetError(
            f"{judging.folder}: the judge was stopped by {summary.stopped_by}; all rows are answered, and"
            " every judgement that was made is kept. `batchkit score` continues, with a larger budget"
            " unless it is that of a start"
        )


def _records(judging: JobConfig) -> dict[str, dict[str, Any]]:
    """The newest record of every question that was ever asked."""
    if not is_run(judging.folder):
        return {}
    check_log(judging.folder)
    return {record["id"]: record for record in read_newest(judging.folder / RESULTS)}


def names_read(job: JobConfig, table: JudgeTable) -> set[str]:
    """The names that the judge's prompt needs: fields of the row, some of ``NAMES``, or ``[vars]``,
    which count where the row has no field of that name."""
    column = table.sampling.sampling_column
    names = names_in(job.model_copy(update={"vars": {}}), table.prompt, ())
    return names | (set() if column is None else {column})


def _job(job: JobConfig, table: JudgeTable, folder: Path) -> JobConfig:
    """The judge's run, named after its model and a hash of all that decides what it answers.

    It contains only the vars that its prompt reads, so that other vars don't change the judge.
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


def _shown(
    answer: Answered, reference: str | None, names: set[str], known: Mapping[str, Any]
) -> dict[str, Any]:
    """Only what the judge is shown, besides what all rows have (``known``): if that is equal, so is the
    judgement."""
    own = {
        "prediction": answer.known.prediction or "",
        "reference": reference or "",
        "text": answer.text,
    }
    return {
        name: value
        for name, value in {**answer.fields, **own}.items()
        if name in names and not (value is None and name in known)  # kept of a row that lacks it
    }


def judged_by_step(
    job: JobConfig, table: JudgeTable, answers: Sequence[Answered], say: Say
) -> dict[int, float | None]:
    """As ``judge``, from what the step ``table.step`` of each row answered: the first number of its
    prediction, if it has an extractor of its own, else the same score as in a judge's text."""
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
    """``found``, or None if the answer was cut off behind it: a number may have had more digits."""
    if found is None or answer.get("finish_reason") != "length":
        return found
    return None if (answer.get("text") or "").removesuffix(".").endswith(found) else found


def _score(found: str | float | None, table: JudgeTable) -> float | None:
    return None if found is None else min(max(float(found) / table.max_score, 0.0), 1.0)
