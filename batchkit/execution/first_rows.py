"""Checks on the first rows before the model is loaded. They find many mistakes in a job within seconds."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from batchkit.config.loading import prompt_columns
from batchkit.config.seams import DEFERRED, SCORERS
from batchkit.config.suggest import did_you_mean
from batchkit.config.tables import JobConfig, ScoringTable
from batchkit.errors import InputError, JobError, MediaError, RequestError, RowError, WrongTaskError
from batchkit.rendering.body import endpoint_of
from batchkit.rendering.steps import CANDIDATES, Renderer, render_or_fail
from batchkit.rendering.templates import ROW
from batchkit.rendering.templates.prompt import PromptTemplates, names_in
from batchkit.rendering.templates.sandbox import fields_read, names_printed
from batchkit.scoring import fields_of
from batchkit.scoring.values import numbers_in
from batchkit.sources.where import is_blank
from batchkit.storage.schema import error_of
from batchkit.types import Completion, Counted, ErrorInfo, Row

_LOOKED_AT, _LOOK_S = 10_000, 2.0  # most rows and seconds to look for empty cells
_FEWEST = 3  # fewer failed rows may be an accident
_NEED_NO_REFERENCE = {"reward", "judge"}


def check_first_rows(
    rows: Iterable[Row], job: JobConfig, renderer: Renderer, all_rows: Iterable[Row]
) -> None:
    """Render the first rows, and raise JobError if all of them fail for the same reason.

    This stops at the first row that succeeds or fails for another reason, or after ``run.check_rows``. Usually only one
    row is rendered. With workers on Ray, media errors are ignored, because workers may see files that this process
    can't see. Rollouts are not checked, because their requests are known only while they run.

    ``all_rows``: the input again from its beginning, if it can be read twice. In a batch file, lines for other tasks
    may come before lines that the job can answer.
    """
    failed: list[tuple[Row, RowError]] = []
    for row in islice(rows, job.run.check_rows if job.rollout is None else 0):
        rendered = render_or_fail(renderer, row)
        error = rendered.error if isinstance(rendered, Completion) else None
        if error is None or (failed and _reason(error) != _reason(failed[0][1])):
            return
        failed.append((row, error))
    if not failed:
        return
    row, first = failed[0]
    is_for_another = isinstance(first, WrongTaskError)
    if is_for_another and _has_line_for(job, all_rows):
        return
    is_elsewhere = job.workers.count is not None and isinstance(first, MediaError)
    is_enough = len(failed) >= min(_FEWEST, job.run.check_rows) or is_for_another
    if is_enough and not is_elsewhere:
        raise _all_fail(row.index, row.id, error_of(first), len(failed), "the model was not loaded")


def _has_line_for(job: JobConfig, rows: Iterable[Row]) -> bool:
    """Return whether one of ``rows`` is a batch line for the job's task. Reads for at most two seconds."""
    until = time.monotonic() + _LOOK_S
    with suppress(InputError):  # a broken line stops the run later, when the run reads it
        for row in rows:
            with suppress(RequestError):
                if row.error is None and endpoint_of(row.fields.get("url"), job.task):
                    return True
            if time.monotonic() > until:
                break
    return False


class FirstFailures:
    """A check whether all first rows of a run fail for the same reason, which no retry can remove.

    The check is made only in runs that have no answer yet. ``most``: number of rows to check; 0 turns the check off.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._first = set[int]()
        self._failed = list[Counted]()
        self._reasons = set[tuple[str, str]]()

    def noting(self, rows: Iterator[Row]) -> Iterator[Row]:
        """Yield ``rows`` unchanged, and remember which rows are the first."""
        for row in islice(rows, self._most):
            self._first.add(row.index)
            yield row
        yield from rows

    def note(self, record: Counted) -> None:
        """Take the record of a settled row into account. An answer, or a failure for another reason, ends the check."""
        if (error := record.error) is None:
            self._most = 0
        elif error.type == WrongTaskError.__name__:
            self._most = 0  # later lines of the file may be for the job's task
        elif record.index in self._first:
            self._failed.append(record)
            self._reasons.add(_reason(error))
            if error.retryable or len(self._reasons) > 1:
                self._most = 0

    def check(self, *, is_end: bool = False) -> None:
        """Raise JobError if all first rows have failed for the same reason. ``is_end``: True if there are no more
        rows."""
        count = len(self._failed)
        if self._most and (count == self._most or (is_end and count >= _FEWEST)):
            first = self._failed[0]
            assert first.error is not None
            raise _all_fail(first.index, first.id, first.error, count, "the run was stopped")


def _all_fail(index: int, row_id: str, error: ErrorInfo, count: int, so: str) -> JobError:
    return JobError(
        f"row {index} (id {row_id}): {error.kind}: {error.message}\nAll of the first {count} rows fail like"
        f" this, so {so}. Correct the job or its input and run the same command again; if other rows are"
        " good, --set run.check_rows=0 runs them"
    )


def check_uses_a_column(job: JobConfig, row: Row) -> None:
    """Raise JobError if no prompt uses a column of the row, or if a key for images or clips contains a plain column
    name.

    Such a key needs a template, for example ``{{ image }}``.
    """
    for place, its in job.of_each_step():
        for kind in ("images", "videos", "audios"):
            for template in getattr(its.prompt, kind):
                name = template.strip(" {$}")
                if name in row.fields and "{{" not in template:
                    raise JobError(
                        f"{place}prompt.{kind}: {name} is a column: write {{{{ {name} }}}}"
                    )
    if job.rollout is not None or row.error is not None:
        return
    _check_names(job, row.fields)
    if job.prompt.allow_constant:
        return
    texts, names = list[str](), set[str]()
    for _, its in job.of_each_step():
        made = PromptTemplates(its)
        if made.user is None and not isinstance(its.pair.query, str):
            return  # the row's own prompt, messages or body is sent
        texts += [part.source for part in made.all]
        names |= {name for part in made.all for name in part.names} - its.vars.keys()
    has_own = job.sampling.sampling_column is not None or job.sampling.templates
    if names - {"steps", CANDIDATES} or has_own:
        return
    raise JobError(
        f"prompt: no column is used, so the prompts of all rows are equal{_meant(texts, row.fields)};"
        " to send the same prompt for all rows, set prompt.allow_constant = true"
    )


def _check_names(job: JobConfig, fields: Mapping[str, Any]) -> None:
    """Raise JobError if a template uses a step's name as a column, or if no template uses a key of ``input.cross``.

    Keys of ``input.cross`` are not checked if rows have their own prompts, or if a template uses the whole row.
    """
    read, steps = set[str | None](), {step.name for step in job.steps}
    whens = {f"steps.{step.name}.": step.when or "" for step in job.steps}
    for place, its in job.of_each_step():
        made = PromptTemplates(its)
        parts = [*made.all, *made.sampling.values(), *filter(None, [made.lora])]
        names = {name for part in parts for name in part.names}
        names |= fields_read(whens.get(place, ""))
        if wrong := sorted(names & steps - fields.keys() - job.vars.keys()):
            raise JobError(
                f"{place[:-1]}: {wrong[0]} is a step, not a column: write {{{{ steps.{wrong[0]}.text }}}}"
            )
        read |= {*names, its.sampling.sampling_column, ROW if made.user is None else None}
    for name in job.input.cross.keys() - read if ROW not in read else ():
        raise JobError(
            f"input.cross.{name}: no template reads this key, so rows would only repeat: write {{{{ {name} }}}} in the"
            " prompt or in [sampling]; for several answers to one prompt set sampling.n"
        )


def _meant(texts: Sequence[str], fields: Mapping[str, Any]) -> str:
    """Return advice for a prompt that uses no column, as the end of an error message: what its author probably
    meant."""
    for text in texts:
        if (file := Path(text.strip().removeprefix("@"))).suffix and file.is_file():
            return f"; to send the text of this file, set prompt.user_file = {str(file)!r}"
        for found in re.finditer(r"\$?\{\s*([^{}]+?)\s*\}", text):
            if found[1] in fields:
                return f"; write {{{{ {found[1]} }}}} instead of {found[0]}"
    longest = max(fields, key=lambda name: len(str(fields[name])), default="column")
    return f"; write {{{{ {longest} }}}} where the value of this column belongs"


def check_columns(rows: Iterable[Row], job: JobConfig) -> None:
    """Check that the first rows have the fields that the job names outside its prompts.

    This stops at the first row that has all of them, or after ``run.check_rows``.

    Raises:
        JobError: all of these rows lack the same field.
    """
    lacking, fields, n_rows = _fields_named(job), dict[str, None](), 0
    for row in islice(rows, job.run.check_rows if lacking else 0):
        n_rows += 1
        if row.error is None:
            fields |= dict.fromkeys(row.fields)
            if not (lacking := [pair for pair in lacking if pair[1] not in row.fields]):
                return
    if fields and lacking:
        raise JobError(
            "\n".join(
                f"{key}: the rows have no field {name!r}{did_you_mean(name, map(str, fields))}; the first"
                f" {n_rows:,} have {', '.join(map(str, fields))}"
                for key, name in lacking
            )
        )


def blanks_in(rows: Iterable[Row], job: JobConfig) -> Iterator[str]:
    """Yield a line for each prompt column that is null or blank in some of the first ``rows``.

    Reads for at most two seconds and 10,000 rows.
    """
    columns, n_rows, blank = prompt_columns(job), 0, Counter[str]()
    if not columns:
        return
    until, first = time.monotonic() + _LOOK_S, ""
    with suppress(InputError):  # a broken line stops the run later, when the run reads it
        for row in rows:
            n_rows += 1
            blank.update(
                name for name in columns if name in row.fields and is_blank(row.fields[name])
            )
            if n_rows == _LOOKED_AT or time.monotonic() > until:
                first = "first "
                break
    then = {
        "keep": 'these rows are sent anyway; input.empty = "skip" leaves them out',
        "skip": "these rows are left out",
        "fail": "these rows fail",
    }[job.input.empty]
    for name, count in blank.items():
        yield f"{name} is empty in {count:,} of the {first}{n_rows:,} rows; {then}"


def _fields_named(job: JobConfig) -> list[tuple[str, str]]:
    """Return the fields of rows that the job names outside its prompts, as pairs of key and field:
    ``("output.keep", "title")``."""
    keep = () if job.output.keep == "*" else job.output.keep
    named = [("output.keep", name) for name in keep]
    for key, table in _scorings(job):
        named += [(key, name) for name in sorted(fields_of(table))]
    return named


def _scorings(job: JobConfig) -> list[tuple[str, ScoringTable]]:
    of_steps = [(f"steps.{step.name}", step.scoring) for step in job.steps]
    return [(key, table) for key, table in [("scoring", job.scoring), *of_steps] if table.is_on]


def _reason(error: RowError | ErrorInfo) -> tuple[str, str]:
    """Return a value that is equal for errors with the same reason: numbers, files and lines in the message are
    ignored."""
    message = error.message if isinstance(error, ErrorInfo) else str(error)
    return error.kind, re.sub(r"\d+", "0", message.partition(": ")[2] or message)


def hints(job: JobConfig, first: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each likely mistake in token limits, scoring, or the templates of steps.

    ``first``: the fields of one row.
    """
    for place, its in job.of_each_step():
        yield from (place + hint for hint in _of_generation(its, first))
    yield from _of_steps(job, first)
    for key, table in _scorings(job):
        yield from scoring_hints(table, first, key)


def _of_generation(job: JobConfig, first: Mapping[str, Any]) -> Iterator[str]:
    most, wanted = job.engine.options.get("max_model_len"), job.sampling.max_tokens
    if (
        job.task == "generate"
        and isinstance(most, int)
        and isinstance(wanted, int)
        and wanted >= most
    ):
        yield (
            f"sampling.max_tokens: {wanted} leaves no room for a prompt: engine.options.max_model_len is {most},"
            " for prompt and answer together; an answer ends when both together reach this limit"
        )
    yield from _prompt_hints(job, first)
    if (column := job.sampling.sampling_column) is not None:
        yield from _absent("sampling.sampling_column", [column], first)


def _prompt_hints(job: JobConfig, first: Mapping[str, Any]) -> Iterator[str]:
    """Yield a hint for each likely mistake in prompts and answers.

    For example: a literal ``\\n``, a dict or bytes in Python's notation, messages that end with the assistant's turn, a
    reference that is not among the possible answers. ``first``: the fields of the first row.
    """
    made = PromptTemplates(job)
    for part in filter(None, (made.system, made.user)):
        if "\\n" in part.source and "\n" not in part.source:
            yield f"{part.key}: contains \\n as two characters; for a line break write $'…\\n…' in the shell"
        for name in dict.fromkeys(names_printed(part.source)):
            if name not in part.marks and isinstance(value := first.get(name), dict | list | bytes):
                kind = type(value).__name__
                fix = f"write {{{{ {name} | tojson }}}}" if kind != "bytes" else "store it as text"
                yield f"{name} of the first row is {kind}, which the prompt shows in Python's notation; {fix}"
    match first.get("messages"):
        case [*_, {"role": "assistant"}] if made.user is None:
            yield "messages of the first row end with the assistant's turn: leave this turn out to get a new answer"
    answers = (job.params().get("structured_outputs") or {}).get("choice") or job.scoring.choices
    right = first.get(job.scoring.reference or "")
    if answers and right is not None and str(right) not in answers:
        yield (
            f"scoring.reference: is {str(right)[:40]!r} in the first row, but the possible answers are"
            f" {', '.join(answers)}"
        )


def _of_steps(job: JobConfig, first: Mapping[str, Any]) -> Iterator[str]:
    ours = {"steps", CANDIDATES} if job.select.step is not None else {"steps"}
    for name in ours & first.keys() if job.steps else ():
        yield f"[[steps]]: rows have a field {name!r}; templates get batchkit's value of that name instead"
    for n, step in enumerate(job.steps):
        # The first step's prompt was checked by rendering it.
        key, prompt = f"steps.{step.name}", step.prompt if n else None
        when = [] if step.when is None else [step.when]
        names = names_in(job.of_step(step), prompt, when) - ours - {ROW}
        yield from _absent(key, sorted(names), first)


def scoring_hints(
    table: ScoringTable, first: Mapping[str, Any] | None, key: str = "scoring"
) -> Iterator[str]:
    """Yield a line for each likely mistake in the scoring ``table``.

    - ``first``: the fields of one row, if known.
    - ``key``: where the table is in the job, for example ``scoring``.
    """
    for name, value in _without_number(table, first or {}):
        yield (
            f'{key}: the scorer "numeric" compares numbers, but {name} of the first row is {value[:40]!r}: rows'
            ' without a number there are unscored; the scorers "em" and "choice" compare words'
        )
    if lost := _without_reference(table):
        need = "needs" if len(lost) == 1 else "need"
        or_run = " or scoring.reference_run" * (key == "scoring")
        yield (
            f"{key}: {', '.join(lost)} {need} a right answer to compare with: set {key}.reference{or_run}"
        )


def _absent(key: str, names: Iterable[str], first: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each of ``names`` (from the job's ``key``) that the row ``first`` lacks. The name may be
    misspelled."""
    for name in names:
        if name not in first:
            hint = did_you_mean(name, map(str, first))
            yield f"{key}: the first row has no field {name!r}{hint}"


def _without_number(table: ScoringTable, first: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each reference field for the scorer ``numeric`` in which the first row has no number, and the field's
    text."""
    for each in table.tables:
        name = each.reference
        if name is None or name not in first or "numeric" not in each.scorers:
            continue
        if not numbers_in(text := str(first[name])):
            yield name, text


def _without_reference(table: ScoringTable) -> list[str]:
    """Return the scorers that need a reference answer but have none, because their part of ``[scoring]`` names none.

    Only built-in scorers are checked, because scorers of other packages may need no reference answer.
    """
    if table.reference_run is not None:
        return []
    found = {name for each in table.tables if each.reference is None for name in each.scorers}
    known = {*SCORERS.built_in, *DEFERRED.built_in}
    return sorted(found & known - _NEED_NO_REFERENCE)
