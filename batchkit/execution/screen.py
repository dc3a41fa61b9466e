"""What people and programs see of a run while it works: lines, a bar, metrics, and the manifest's notes."""

from __future__ import annotations

from batchkit.execution.budgets import Budgets
from batchkit.execution.progress import Progress, State
from batchkit.execution.recorder import Pool, Recorder
from batchkit.execution.resume import OpenRun
from batchkit.execution.tasks import Tasks
from batchkit.types import Usage


class Screen:
    """Told once a turn how far the run is; nothing depends on it. Used by the run's thread."""

    def __init__(
        self, run: OpenRun, progress: Progress, recorder: Recorder, budgets: Budgets
    ) -> None:
        self.progress = progress
        self._run, self._recorder, self._budgets = run, recorder, budgets
        self._tokens_before = self.tokens()

    def say(self, text: str) -> None:
        """Write one line to run.log and to stderr."""
        self.progress.event(text)

    def begin(self, tasks: Tasks) -> None:
        """Report what earlier starts have done, and what this one may cost."""
        if tasks.resumed:
            of = "" if (total := tasks.total(timeout_s=1)) is None else f" of {total:,}"
            self.say(f"resumed {tasks.resumed:,}{of} rows")
        if announced := self._budgets.announced(self._tokens_before):
            self.say(announced)

    def show(self, tasks: Tasks, pool: Pool, *, force: bool = False) -> None:
        """Update what is shown, where an update is due; very cheap otherwise."""
        state, manifest = self.state(tasks, pool), self._run.manifest
        self.progress.update(state, force=force)
        self._recorder.update(state, pool, force=force)
        if manifest.total is None and (total := tasks.total()) is not None:
            manifest.total = tasks.input.source.sample_of or total  # status need not count the rows
            self._run.save()

    def note(self, pool: Pool) -> None:
        """Have the manifest say what ``status`` shows of the workers, and what GPUs cost."""
        has_changed = self.note_workers(pool)
        if self.note_gpus() or has_changed:
            self._run.save()

    def note_workers(self, pool: Pool) -> bool:
        """False if there is only one worker."""
        if workers := pool.workers():
            self._run.manifest.last_start.workers = workers
        return bool(workers)

    def note_gpus(self) -> bool:
        """Note for how long GPUs were held; True if it has to be on disk: the job has a price for them."""
        self._run.manifest.last_start.gpu_seconds = round(self._budgets.gpu_seconds, 3)
        return self._budgets.count_gpus

    def tokens(self, unfinished: int = 0) -> Usage:
        """Of the run, over all starts, with those of answers that have not ended."""
        usage = self._run.ledger.usage
        return Usage(usage.prompt_tokens, usage.completion_tokens + unfinished)

    def state(self, tasks: Tasks, pool: Pool | None) -> State:
        totals, before, now = self._run.ledger.totals, self._tokens_before, self.tokens()
        total = tasks.total()
        return State(
            total=None if total is None else total - tasks.elsewhere,
            ok=totals.ok,
            failed=totals.failed,
            resumed=tasks.resumed,
            in_flight=0 if pool is None else pool.in_flight,
            prompt_tokens=now.prompt_tokens - before.prompt_tokens,
            completion_tokens=now.completion_tokens - before.completion_tokens,
            unfinished_tokens=0 if pool is None else pool.unfinished_tokens,
            generations=self._run.ledger.steps.spent.generations,
        )
