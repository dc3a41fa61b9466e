"""The pending rows of one start, and counts of what happened to them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Any

from batchkit.config.tables import JobConfig
from batchkit.errors import BrokenInputError, ChangedInputError, InputError, StoreError
from batchkit.execution.engine_turns import Turns
from batchkit.execution.first_rows import (
    FirstFailures,
    blanks_in,
    check_columns,
    check_first_rows,
    check_uses_a_column,
)
from batchkit.execution.resume import OpenRun
from batchkit.execution.start import Start
from batchkit.rendering.answer_lengths import AnswerLengths
from batchkit.rendering.global_order import (
    first_block,
    ordered_in_memory,
    ordered_on_disk,
    worth_ordering,
)
from batchkit.rendering.ordering import until_broken, well_ordered
from batchkit.rendering.templates.prompt import constant_files
from batchkit.sources import never, read_rows
from batchkit.sources.formats import ROWS_ARE_FILES
from batchkit.sources.input import Input, Total, check_unchanged, distrusted, from_job, watched
from batchkit.sources.reader import is_fallback
from batchkit.sources.rowhash import input_hash
from batchkit.storage.answers import INPUT_HASH, SeenHashes
from batchkit.storage.checkpoint import check_log
from batchkit.storage.forecast_json import LENGTHS, lengths_in, update_forecast
from batchkit.storage.identity import CHANGING
from batchkit.storage.index_set import IndexSet
from batchkit.storage.lines import failure_kind, record_of
from batchkit.storage.log import RESULTS
from batchkit.storage.manifest import read_manifest
from batchkit.storage.newest_lines import NewestLog, read_newest
from batchkit.types import Counted, Row, Task

_LEAST_SAVED = 256  # lengths
_COUNTED_WITHIN_S = 10.0


class Tasks:
    """The pending rows of one start, in the order in which they will run, and counts of their outcomes.

    Pending rows are the rows of ``source`` without a record; in a retry, the rows to retry.

    - ``say``: writes a line to the log.
    - ``elsewhere``: number of rows that were skipped because another run has answered them.
    - ``settled``, ``failed``: numbers of rows in this start.
    - ``lengths``: the lengths of answers so far.
    - ``first_failures``: the check of the first rows of a run without answers.
    """

    def __init__(
        self, start: Start, run: OpenRun, source: Input, say: Callable[[str], None]
    ) -> None:
        self._start, self._run, self.input = start, run, WatchedInput(start, run, source)
        self._total, self._say = Total(source), say
        self.turns = Turns(start.job, say)
        self.lengths = AnswerLengths(lengths_in(run.folder))
        self._n_saved = self.lengths.n_rows
        self._attempts = _still_due(run, start.options.attempts)
        totals = run.ledger.totals
        again = sum(map(totals.is_settled, self._attempts))
        self.resumed = totals.ok + totals.failed - again
        self._rows: Iterator[Row] = iter(())
        self.elsewhere = run.starts.history.skipped_elsewhere if start.is_retry else 0
        self.settled = self.failed = 0
        looks = not (start.is_retry or totals.ok)
        self.first_failures = FirstFailures(start.job.run.check_rows if looks else 0)

    def first(self) -> Row | None:
        """Return the first pending row, or None if there is none. The row stays pending."""
        if self._start.is_retry:
            self._run.ledger.steps.recall(self._attempts)
            rows = self._only(self._attempts)
        else:
            # Without --skip-from, this start also runs the rows that an earlier start skipped.
            self._run.starts.learn(skipped_elsewhere=0)
            self._run.starts.save()
            rows = self._without_records()
        self._rows = self.first_failures.noting(rows)
        return next(self._ahead(), None)

    def check_first_rows(self) -> None:
        """Check and render the first rows of a run without answers.

        Raises:
            JobError: all of them lack a field that the job names, or fail for the same reason.
        """
        if self.may_wait or self._start.is_retry or self._run.ledger.totals.ok:
            return
        job, renderer = self._start.job, self._start.renderer
        if (first := next(self._ahead(), None)) is not None:
            check_uses_a_column(renderer.job, first)
        check_first_rows(self._ahead(), job, renderer, self._read_again())
        check_columns(self._ahead(), job)
        for line in blanks_in(self._read_again(), job):
            self._say(line)

    def _ahead(self) -> Iterator[Row]:
        """Yield the next rows without taking them: they stay pending."""
        rows, seen = self._rows, list[Row]()
        self._rows = chain(seen, rows)
        for row in rows:
            seen.append(row)
            yield row

    def _read_again(self) -> Iterator[Row]:
        """Yield the rows of the input again, including rows that ``input.empty`` skips. Empty unless the input is in
        local files."""
        table, source = self._start.job.input, self.input.source
        if source.files is None or any("://" in file.path for file in source.files):
            return
        yield from read_rows(table.with_filled(frozenset())) if table.filled else source.read(never)

    def of_each_turn(self) -> Iterator[Sequence[str]]:
        """Yield the names of the engines to load next, until no row is paused."""
        starts, turns = self._run.starts, self.turns
        engines = turns.first(None if self._start.is_retry else starts.history.turn)
        while True:
            if turns.are_several:
                starts.learn(turn=engines[0])
                starts.save()
            yield engines
            if not turns.n_paused:
                break
            engines, due = turns.next()
            self._rows = self._only(due)
        starts.learn(turn=None)

    def of_turn(self) -> Iterator[Task]:
        """Return the tasks to run with the loaded engines, in the order of ``run.order``."""
        yield from (self._task(row, group) for row, group in self._ordered())

    def _ordered(self) -> Iterator[tuple[Row, int]]:
        """Yield the rows of a turn in the order of ``run.order``, each with the number of its group, 0 if unknown. An
        error from reading is raised after all rows read before it were yielded."""
        # An iterator may give its rows slowly.
        if self._start.job.run.order == "input" or self.may_wait:
            yield from ((row, 0) for row in self._rows)
            return
        broken: list[Exception] = []
        yield from self._reordered(until_broken(self._rows, broken), broken)
        if broken:
            raise broken[0]

    def _reordered(self, rows: Iterator[Row], broken: list[Exception]) -> Iterator[tuple[Row, int]]:
        run, hint, expect = self._start.job.run, self._start.renderer.hint, self.lengths.expected
        if run.order == "window":
            return well_ordered(rows, hint, run.look_ahead, expect)
        block = first_block(rows, hint)
        if block.is_all:
            return ordered_in_memory(block.rows, block.hints, expect)
        self.total(_COUNTED_WITHIN_S)
        is_worth_it = worth_ordering(block, self.left, run.look_ahead)
        rows = chain(block.rows, rows)
        if run.order == "auto" and not is_worth_it:
            return well_ordered(rows, hint, run.look_ahead, expect)
        self._say(
            "reading all rows first, to run rows with the same beginning together (run.order)"
        )
        return ordered_on_disk(
            rows, lambda parts: until_broken(self._only(parts), broken), hint, expect
        )

    def _task(self, row: Row, group: int) -> Task:
        hint = self._start.renderer.hint
        self.lengths.begin(row, hint)
        attempt, tokens = self._attempts.get(row.index, 0) + 1, 1.0
        if self._start.job.workers.count is not None:  # leases are shared by expected tokens
            tokens += self.lengths.expected(hint(row))
        return Task(row, attempt, group, self.known(row.index), tokens)

    def known(self, index: int) -> Sequence[Mapping[str, Any]]:
        """Return the generations of the row that are in the ledger."""
        return self._run.ledger.steps.known(index)

    @property
    def may_wait(self) -> bool:
        """True if reading the next row may block, and rows can be read only once."""
        return self.input.source.files is None

    def count(self, record: Counted) -> None:
        """Count a row whose record is about to be written."""
        self.settled += 1
        self.lengths.end(record)
        self.failed += record.status == "failed"
        self.first_failures.note(record)

    def save_lengths(self) -> None:
        """Store the lengths of answers for the next start, unless there are few. The run continues if writing fails,
        because the next start can learn them again."""
        if self.lengths.n_rows > max(self._n_saved, _LEAST_SAVED):
            self._n_saved = self.lengths.n_rows
            with suppress(StoreError):
                update_forecast(self._run.folder, {LENGTHS: self.lengths.known})

    def total(self, timeout_s: float | None = 0) -> int | None:
        """Return the number of rows of the whole job; None if it is still unknown after ``timeout_s`` (None: no limit).

        A thread counts the rows.
        """
        return self._total.now() if timeout_s == 0 else self._total.wait(timeout_s)

    @property
    def left(self) -> int | None:
        """The number of this start's rows that have no record yet; None if the total is unknown."""
        if self._start.is_retry:
            return len(self._attempts) - self.settled
        total = self._total.now()
        done = self.elsewhere + self.resumed + self.settled + self.turns.n_paused
        return None if total is None else total - done

    def some_remain(self) -> bool:
        """Return whether some rows of the whole job have no record.

        This reads the input, because counts can't tell: rows beyond ``input.limit`` may have records.
        """
        pending = self.input.source.read(self._run.ledger.totals.is_settled)
        return next(islice(pending, self.elsewhere, None), None) is not None

    def some_are_left(self) -> bool:
        """Return whether some rows of this start have no record."""
        if self._start.is_retry:
            return len(self._attempts) > self.settled
        return self.may_wait or self.some_remain()

    def check_complete(self) -> None:
        """Check, after all rows were read, that each has a record and that no prompt file changed.

        Raises:
            BrokenInputError: a row has no record, or its prompt may have changed.
        """
        self.input.check_late_files()
        if self._start.is_retry:
            missing = len(self._attempts) - self.settled
        else:
            total, totals = self._total.wait(), self._run.ledger.totals
            missing = 0 if total is None else total - self.elsewhere - totals.ok - totals.failed
        if missing > 0 and self._start.is_retry:
            raise BrokenInputError(
                f"{missing:,} of the {len(self._attempts):,} rows to retry are not in the input. Every finished row is"
                " on disk; check the row indexes, or restore the complete input, then retry again"
            )
        if missing > 0:
            raise BrokenInputError(
                f"{missing:,} rows have no record: the input had fewer rows when the run read it than when it was"
                " counted. Every finished row is on disk; restore the complete input, then run the same command again"
            )

    def _without_records(self) -> Iterator[Row]:
        """Yield rows that have neither a record in this run nor an answer in the run of ``--skip-from``.

        Rows that a run in ``run.reuse`` has answered come last, so that the engine begins with the others at once.
        """
        skip_from, source = self._start.options.skip_from, self.input.source
        is_done = None if skip_from is None else done_in(skip_from, self._start.job, source)
        rows = source.read(self._run.ledger.totals.is_settled)
        answered, later = self._answered_elsewhere(), IndexSet()
        for row in self.input.watched(rows):
            if is_done is not None and row.error is None and is_done(row):
                self.elsewhere += 1
            elif answered is not None and input_hash(row.fields) in answered:
                later.add(row.index)
            else:
                yield row
        if later:
            yield from self._only(later)

    def _answered_elsewhere(self) -> SeenHashes | None:
        """Return the input hashes of rows that the runs in ``run.reuse`` have answered. Return None without such runs, or
        if the rows can be read only once."""
        if not self._run.reused or self.may_wait:
            return None
        answered = SeenHashes()
        for folder in self._run.reused:
            answered.add_answers_of(folder / RESULTS, INPUT_HASH)
        return answered

    def _only(self, indexes: Container[int] | IndexSet) -> Iterator[Row]:
        return self.input.watched(self.input.source.everything(lambda index: index not in indexes))


class WatchedInput:
    """The input ``source`` and the files that every prompt includes, watched for changes during the run.

    A change is noted in the run's history. The next start then compares rows with their records.
    """

    def __init__(self, start: Start, run: OpenRun, source: Input) -> None:
        self._start, self._run = start, run
        self.source = source._replace(
            changes=lambda thorough: {**source.changes(thorough), **self._changed_prompts()}
        )
        self._all_read = False

    def watched(self, rows: Iterator[Row]) -> Iterator[Row]:
        """Yield ``rows`` of the source and check the input for changes.

        Raises:
            InputError: the rows can't be read.
            BrokenInputError: the rows can't be read, but some were answered; fix the input to continue.
            ChangedInputError: the input has changed.
        """
        ledger = self._run.ledger
        begun = ledger.totals.records > 0 or ledger.steps.spent.generations > 0
        try:
            for row in watched(rows, self.source):
                begun = True
                yield row
            self._all_read = True
        except ChangedInputError as error:
            self._distrust(error.paths)
            raise
        except InputError as error:
            if not begun:
                raise
            raise BrokenInputError(str(error)) from error

    def check_late_files(self) -> None:
        """Raise ChangedInputError if a file changed that is opened again after the last row was read.

        Such files are included in all prompts, or are rows themselves.
        """
        changed = self._changed_prompts()
        if files := self._files_that_are_rows():
            try:
                found = self.source.changes(True)
            except InputError as error:
                raise BrokenInputError(str(error)) from error
            # Ignores new files.
            changed |= {path: how for path, how in found.items() if path in files}
        self._distrust(changed.keys())
        check_unchanged(changed)

    def note_changes(self) -> None:
        """Mark changed files in the run's history at the end of the start, so that the next start checks their rows."""
        is_over = self._all_read and not self._files_that_are_rows()
        changed = self._changed_prompts() if is_over else self.source.changes(False)
        self._distrust(changed.keys())

    def _files_that_are_rows(self) -> set[str]:
        """Return the files that are rows, or whose pages are rows. Rendering such a row opens its file again."""
        files = self.source.files or ()
        return {file.path for file in files if file.read_as.partition(": ")[0] in ROWS_ARE_FILES}

    def _changed_prompts(self) -> dict[str, str]:
        """Return the changes of files that the prompts of all rows include, by key.

        They are compared at the end of a start, too, because some rows are rendered after the last row was read.
        """
        now, then = constant_files(self._start.job), self._start.prompt_files.items()
        return {key: "its content" for key, was in then if now.get(key, was) != was}

    def _distrust(self, changed: Collection[str]) -> None:
        """Mark changed files in the run's history, so that the next start does not trust the records.

        The next start compares rows of changed input files with their records, and refuses changed prompt files. The
        mark stays even if the files are changed back.
        """
        starts = self._run.starts
        if prompts := {*changed} & {*self._start.prompt_files}:
            files = starts.history.found.get("prompt.files", {})
            files = files | dict.fromkeys(prompts, CHANGING)
            starts.learn(found={**starts.history.found, "prompt.files": files})
        if paths := {*changed} - prompts:
            files_then = starts.history.added_to(self._run.manifest).input
            starts.learn(input=distrusted(files_then, paths))


def _still_due(run: OpenRun, attempts: Mapping[int, int] | None) -> dict[int, int]:
    """Return the rows of a retry that still need to be retried, with the number of each row's last attempt.

    Before this process locked the folder, another one may have retried rows. It may also have requeued the run, so that
    an index belongs to another row, which has an answer.
    """
    due = dict(attempts or {})
    if not due:
        return due
    with closing(NewestLog(run.folder / RESULTS)) as newest:
        for index, start, end in newest:
            if index in due:
                record = record_of(newest.view[start:end]) or {"status": "failed"}
                is_other = (record.get("attempt") or 1) != due[index]
                if is_other or failure_kind(record) is None:
                    del due[index]
    return due


def done_in(folder: Path, job: JobConfig, source: Input) -> Callable[[Row], bool]:
    """Return a function that tells whether a row has an answer in the run in ``folder``. Each answer counts for one
    row.

    A row is found by its id. In three cases its fields must be equal as well:

    - The two runs don't take ids from the same ``input.id``. Then an id may be the index of another row.
    - Several rows share the id, in that run or in this input. The input is searched for this only if fields differ.
    - The rows can be read only once.
    """
    check_log(folder)
    log, times, id_field = folder / RESULTS, Counter[str](), job.input.id
    if id_field is not None and read_manifest(folder).identity.get("input.id") == id_field:
        times.update(record["id"] for record in read_newest(log))
    answered = defaultdict[str, Counter[str | None]](Counter)  # by id: the hashes of their fields
    for record in read_newest(log):
        if failure_kind(record) is None and not is_fallback(record["id"]):
            answered[record["id"]][record.get("input_hash")] += 1

    @cache
    def shared() -> set[str]:
        return shared_ids(job, source)

    def is_done(row: Row) -> bool:
        if (hashes := answered.get(row.id)) is None:
            return False
        known: str | None = input_hash(row.fields)
        if known not in hashes and times[row.id] == 1 and source.files is not None:
            known = known if row.id in shared() else next(iter(hashes))
        if not hashes[known]:
            return False
        hashes[known] -= 1
        return True

    return is_done


def shared_ids(job: JobConfig, source: Input) -> set[str]:
    """Return the ids that several rows of the input have.

    Rows that ``input.where`` leaves out count, too, because another run, which is compared by id, may have answered
    them.
    """
    if job.input.where:  # not with rows from Python
        source = from_job(job.with_keys(input={"where": {}}))
    ids = Counter(row.id for row in source.everything(never))
    return {each for each, n_rows in ids.items() if n_rows > 1}
