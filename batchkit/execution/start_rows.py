"""The rows of one start: read as they are needed, and watched for changes of the input."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping
from itertools import islice

from batchkit.config.tables import JobConfig
from batchkit.errors import BrokenInputError, ChangedInputError, InputError
from batchkit.execution.turns import Turns
from batchkit.rendering.constant_files import constant_files
from batchkit.sources.formats import ROWS_ARE_FILES
from batchkit.sources.input import Input, check_unchanged, distrusted, watched
from batchkit.storage.identity import CHANGING
from batchkit.storage.index_set import IndexSet
from batchkit.storage.manifest import Manifest
from batchkit.types import Row


class StartRows:
    """``prompt_files``: hashes of the files that all prompts include. ``has_answers``: an earlier start
    has some, so a broken input stops a run that can be continued. ``elsewhere`` counts the rows that
    another run has done.
    """

    def __init__(
        self,
        job: JobConfig,
        source: Input,
        manifest: Manifest,
        turns: Turns,
        prompt_files: Mapping[str, str],
        *,
        has_answers: bool,
    ) -> None:
        self._job, self._manifest, self._turns = job, manifest, turns
        self._prompt_files = prompt_files
        self._has_answers = has_answers
        self._source = source._replace(
            changes=lambda thorough: {**source.changes(thorough), **self._changed_prompts()}
        )
        self._all_read = False
        self.elsewhere = 0

    @property
    def may_wait(self) -> bool:
        """Whether reading the next row may take long, and can be done only once."""
        return self._source.files is None

    def without(
        self, is_settled: Callable[[int], bool], is_done_elsewhere: Callable[[Row], bool]
    ) -> Iterator[Row]:
        """Every row that is neither settled nor done elsewhere."""
        for row in self._readable(self._source.read(is_settled)):
            if row.error is None and is_done_elsewhere(row):
                self.elsewhere += 1
            else:
                yield row

    def only(self, indexes: Container[int] | IndexSet) -> Iterator[Row]:
        """The rows with these indexes."""
        return self._readable(self._source.everything(lambda index: index not in indexes))

    def some_remain(self, is_settled: Callable[[int], bool]) -> bool:
        """Whether rows have no record. Past the limit others may have one, so it takes a look at each."""
        pending = self._source.read(is_settled)
        return next(islice(pending, self.elsewhere, None), None) is not None

    def check_late_files(self) -> None:
        """Raises ChangedInputError if files that are opened after the last row was read have changed:
        those that all prompts include, and those that are rows."""
        changed = self._changed_prompts()
        if files := self._files_that_are_rows():
            try:
                found = self._source.changes(True)
            except InputError as error:
                raise BrokenInputError(str(error)) from error
            changed |= {path: how for path, how in found.items() if path in files}  # not new ones
        self._distrust(changed.keys())
        check_unchanged(changed)

    def note_changes(self) -> None:
        """At the end: have the next start look at what has changed."""
        is_over = self._all_read and not self._files_that_are_rows()
        changed = self._changed_prompts() if is_over else self._source.changes(False)
        self._distrust(changed.keys())

    def _readable(self, rows: Iterator[Row]) -> Iterator[Row]:
        """If reading fails, a run that has begun can continue once the input is fixed."""
        begun = self._has_answers
        try:
            for row in self._turns.kept(watched(rows, self._source)):
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

    def _files_that_are_rows(self) -> set[str]:
        """Or whose pages are. They are opened again when their row is rendered."""
        files = self._source.files or ()
        return {file.path for file in files if file.read_as.partition(": ")[0] in ROWS_ARE_FILES}

    def _changed_prompts(self) -> dict[str, str]:
        """How files that all prompts include differ, by key. Some rows are rendered after the last
        one was read, so these are compared at the end, too."""
        now = constant_files(self._job)
        then = self._prompt_files.items()
        return {key: "its content" for key, was in then if now.get(key, was) != was}

    def _distrust(self, changed: Collection[str]) -> None:
        """Make the next start compare the answered rows with those in the input, or refuse the
        prompts, even if all was changed back."""
        if prompts := {*changed} & {*self._prompt_files}:
            files = self._manifest.identity.get("prompt.files", {})
            self._manifest.identity["prompt.files"] = files | dict.fromkeys(prompts, CHANGING)
        if paths := {*changed} - prompts:
            self._manifest.input = distrusted(self._manifest.input, paths)
