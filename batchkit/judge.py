"""GPT_EVAL: a second model gives each answer a score.

Judging is a batchkit run of its own, in the folder ``judge`` of the run that it judges: it resumes,
retries and loses nothing, and a judgement that was paid for is not asked for again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchkit.config import JobConfig, JudgeTable
from batchkit.ledger import RESULTS, read_newest
from batchkit.manifest import without_masked
from batchkit.processor import ProductionBatchProcessor
from batchkit.prompts import names_in
from batchkit.stopping import Interrupted, StopRequest

FOLDER = "judge"
NAMES = ("prediction", "reference", "text")
# What follows the last `[Score]:` or `Score:`, up to a slash: "[Score]: 85/100" is 85.
_PATTERN = r"Score\]?\s*:\W*(\d+(?:\.\d+)?)"
_NOTE = "Answer with one line in this format alone: [Score]: xx/100"


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer to be judged; ``fields`` are its row's."""

    index: int
    id: str
    fields: Mapping[str, Any]
    text: str
    prediction: str | None
    reference: str | None


def judge(
    job: JobConfig, table: JudgeTable, answers: Sequence[Answer], folder: Path, stop: StopRequest
) -> dict[int, float | None]:
    """Each answer's score by its index, from 0 to 1; None where the judge gave none.

    A judgement that failed at an earlier call is tried again.

    Raises:
        BatchkitError, Interrupted: the judge's run stopped; asked again, it goes on from there.
    """
    if not answers:
        return {}
    judges = ProductionBatchProcessor(
        _job(job, table, folder), on_change="requeue", stop=stop, command="score"
    )
    names = names_read(job, table)
    rows = [_row(answer, names) for answer in answers]
    failed_before = {record["id"] for record in _failed(folder / FOLDER)}
    judged = judges.process(rows)
    again = [record for record in _failed(folder / FOLDER) if record["id"] in failed_before]
    if again and judged.exit < 128:
        judged = judges.retry({r["index"]: r["attempt"] for r in again}, rows=rows)
    if judged.exit >= 128:
        raise Interrupted(judged.exit - 128)
    found = {record["id"]: record.get("prediction") for record in judged.records()}
    return {answer.index: _score(found.get(str(answer.index)), table) for answer in answers}


def names_read(job: JobConfig, table: JudgeTable) -> set[str]:
    """What the judge is to know of an answer: the row's fields, or of ``NAMES``."""
    column = table.sampling.sampling_column
    return names_in(job, table.prompt, ()) | (set() if column is None else {column})


def _job(job: JobConfig, table: JudgeTable, folder: Path) -> JobConfig:
    """Keyed by the row's index, as text: ids need not be unique."""
    made = JobConfig.model_validate(
        {
            "name": FOLDER,
            "input": {"id": "_index"},
            "vars": job.vars,
            "prompt": table.prompt,
            "media": job.media,
            "engine": table.engine,
            "sampling": table.sampling,
            "run": job.run.model_copy(update={"fail_on_error": False}),
            "retry": {
                "attempts": job.retry.attempts,
                "on_too_long": "truncate-middle",
                "reask": 2,
                "reask_note": _NOTE,
            },
            "output": {"dir": str(folder)},
            "scoring": {"extract": "regex", "pattern": _PATTERN},
        }
    )
    return made.model_copy(update={"engine": without_masked(made).engine})


def _row(answer: Answer, names: set[str]) -> dict[str, Any]:
    """What the judge is shown and no more: where that is the same, so is its judgement."""
    own = {
        "prediction": answer.prediction or "",
        "reference": answer.reference or "",
        "text": answer.text,
    }
    shown = {name: value for name, value in {**answer.fields, **own}.items() if name in names}
    return {**shown, "_index": str(answer.index)}


def _failed(folder: Path) -> Iterator[dict[str, Any]]:
    """The records of the judgements that failed."""
    return (record for record in read_newest(folder / RESULTS) if record["status"] == "failed")


def _score(found: str | None, table: JudgeTable) -> float | None:
    return None if found is None else min(float(found) / table.max_score, 1.0)
