"""The input of one start, watched for changes while the run reads it."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from batchkit.errors import BrokenInputError, ChangedInputError, InputError
from batchkit.execution.resume import OpenRun
from batchkit.execution.start import Start
from batchkit.rendering.constant_files import constant_files
from batchkit.sources.formats import ROWS_ARE_FILES
from batchkit.sources.input import Input, check_unchanged, distrusted, watched
from batchkit.storage.identity import CHANGING
from batchkit.types import Row


class WatchedInput:
    """``source``, and the files that all prompts include. What changes while the run reads it is noted in
    the manifest, so that the next start compares rows."""

    def __init__(self, start: Start, run: OpenRun, source: Input) -> None:
        self._start, self._run = start, run
        self.source = source._replace(
            changes=lambda thorough: {**source.changes(thorough), **self._changed_prompts()}
        )
        self._all_read = False

    @property
    def may_wait(self) -> bool:
        """Whether reading the next row may take long, and can be done only once."""
        return self.source.files is None

    def watched(self, rows: Iterator[Row]) -> Iterator[Row]:
        """``rows`` of it. If reading fails, a run that has begun can continue once the input is fixed.

        Raises:
            InputError: the rows can't be read; BrokenInputError, if some were answered.
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
        """Raises ChangedInputError if files that are opened after the last row was read have changed:
        those that all prompts include, and those that are rows."""
        changed = self._changed_prompts()
        if files := self._files_that_are_rows():
            try:
                found = self.source.changes(True)
            except InputError as error:
                raise BrokenInputError(str(error)) from error
            changed |= {path: how for path, how in found.items() if path in files}  # not new ones
        self._distrust(changed.keys())
        check_unchanged(changed)

    def note_changes(self) -> None:
        """At the end: have the next start look at what has changed."""
        is_over = self._all_read and not self._files_that_are_rows()
        changed = self._changed_prompts() if is_over else self.source.changes(False)
        self._distrust(changed.keys())

    def _files_that_are_rows(self) -> set[str]:
        """Or whose pages are. They are opened again when their row is rendered."""
        files = self.source.files or ()
        return {file.path for file in files if file.read_as.partition(": ")[0] in ROWS_ARE_FILES}

    def _changed_prompts(self) -> dict[str, str]:
        """How files that all prompts include differ, by key. Some rows are rendered after the last
        one was read, so these are compared at the end, too."""
        now, then = constant_files(self._start.job), self._start.prompt_files.items()
        return {key: "its content" for key, was in then if now.get(key, was) != was}

    def _distrust(self, changed: Collection[str]) -> None:
        """Make the next start compare the answered rows with those in the input, or refuse the
        prompts, even if all was changed back."""
        manifest = self._run.manifest
        if prompts := {*changed} & {*self._start.prompt_files}:
            files = manifest.identity.get("prompt.files", {})
            manifest.identity["prompt.files"] = files | dict.fromkeys(prompts, CHANGING)
        if paths := {*changed} - prompts:
            manifest.input = distrusted(manifest.input, paths)
