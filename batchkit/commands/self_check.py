"""``compare --self``: repeats the self-check of a run. If answers differ, it looks for a setting that cures this."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from batchkit.commands import Say
from batchkit.commands.retry import with_secrets
from batchkit.commands.trust import vouched
from batchkit.config.loading import load_job
from batchkit.config.tables import JobConfig
from batchkit.engines.memory import visible_gpus
from batchkit.errors import BatchkitError, JobError
from batchkit.execution.parity import only
from batchkit.execution.recheck import FOLDER, recheck
from batchkit.execution.run import tried
from batchkit.execution.start import StartOptions
from batchkit.sources.input import Input, from_job
from batchkit.storage.checkpoint import check_log
from batchkit.storage.job_toml import job_of_run
from batchkit.storage.log import RESULTS
from batchkit.storage.newest_lines import read_newest
from batchkit.storage.starts import Checked, read_history

_ROWS = 32
_SHOWN = 10
_BATCH_INVARIANT = {"VLLM_BATCH_INVARIANT": "1"}
_BACKENDS = ("TRITON_ATTN", "FLASHINFER", "FLASH_ATTN")


class Setting(NamedTuple):
    """A setting that may cure a fault: engine ``options``, or variables of the ``environment``."""

    options: Mapping[str, Any] = {}
    environment: Mapping[str, str] = {}

    @property
    def in_words(self) -> str:
        found = {f"engine.options.{key}": value for key, value in self.options.items()}
        parts = [f"{key} = {value}" for key, value in {**found, **self.environment}.items()]
        return ", ".join(parts) or "the run's own settings"


class Trial(NamedTuple):
    """The self-check of some rows with a setting. ``problem``: why the engine could not run with it; "" if it could."""

    setting: Setting
    checked: Checked
    problem: str = ""

    @property
    def is_cure(self) -> bool:
        return not self.problem and self.checked.rows > 0 and not self.checked.different

    def to_json(self) -> dict[str, Any]:
        problem = {"problem": self.problem} if self.problem else {}
        return {"setting": self.setting.in_words, **self.checked.counts(), **problem}


class SelfComparison(NamedTuple):
    """The result of ``compare --self``. ``trials``: the settings that were tried, the run's own first; empty if no row
    is different."""

    checked: Checked
    trials: Sequence[Trial] = ()

    @property
    def exit_code(self) -> int:
        return 1 if self.checked.different else 0

    @property
    def cure(self) -> str | None:
        """The first setting that cured the fault; None if none did, or if the fault did not occur again."""
        if not self.trials or self.trials[0].is_cure:
            return None
        return next((trial.setting.in_words for trial in self.trials if trial.is_cure), None)

    def to_json(self) -> dict[str, Any]:
        return {
            "checked": self.checked.counts(),
            "differences": self.checked.differences,
            "trials": [trial.to_json() for trial in self.trials],
            "cure": self.cure,
        }

    def to_text(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield self.checked.in_words() or "no row could be compared"
        for found in self.checked.differences[:_SHOWN]:
            gap = "" if found["gap"] is None else f", gap {found['gap']:.3g}"
            at = "" if found["token"] is None else f": token {found['token']}{gap}"
            yield f"- row {found['index']} (id {found['id']}), {found['kind'].replace('_', ' ')}{at}"
            if found["token"] is not None:
                yield f"  {found['batched']!r} in the run, {found['alone']!r} alone"
        for trial in self.trials:
            how = f"{trial.checked.different} of {trial.checked.rows} rows different"
            yield f"with {trial.setting.in_words}: {trial.problem or how}"
        if self.cure is not None:
            yield f"cured by {self.cure}: run the job again with it (--fresh)"
        elif self.trials and self.trials[0].is_cure:
            yield "these rows alone do not show the fault in a batch: it needs other rows, or more of them"
        elif self.trials:
            yield "none of these settings cures it"


def check_again(
    folder: Path,
    *,
    job_file: Path | None = None,
    overrides: Sequence[str] = (),
    trust: bool = False,
    say: Say = print,
) -> SelfComparison:
    """Answer some rows of the run again, each alone, and compare the answers with the records. If some are different, run
    these rows in batches with one setting after another, until their self-check finds no difference.

    ``job_file``, ``overrides`` and ``trust``: as for ``retry_failed``.

    Raises:
        JobError: the answers can't be repeated, or the input is gone.
        EngineError: the model can't be loaded.
    """
    check_log(folder)
    job = vouched(
        job_of_run(folder, overrides), say, trust=trust, named=job_file, overrides=overrides
    )
    if job.input.path is None:
        raise JobError(
            f"{folder}: its rows came from Python, so they can't be read again; only a run with input.path can be checked"
        )
    job = with_secrets(job, None if job_file is None else load_job(job_file), say)
    source = from_job(job)
    say(f"answering up to {_ROWS} rows again, each alone")
    checked = recheck(job, source, _ROWS, _run)
    if not checked.different:
        return SelfComparison(checked)
    records = read_newest(folder / FOLDER / RESULTS)
    rows = only(source, {record["index"] for record in records})
    trials = list[Trial]()
    for setting in _settings(job):
        say(f"answering them in batches with {setting.in_words}")
        trials.append(_trial(job, rows, setting))
        if trials[-1].is_cure:
            break
    return SelfComparison(checked, trials)


def _settings(job: JobConfig) -> Iterator[Setting]:
    """Yield the settings to try: first none, then the settings of vLLM that the job does not use yet."""
    yield Setting()
    if job.engine.kind != "vllm":
        return
    options = job.engine.options
    for name, value in (("enforce_eager", True), ("enable_prefix_caching", False)):
        if options.get(name) != value:
            yield Setting({name: value})
    if visible_gpus():
        for backend in _BACKENDS:
            if options.get("attention_backend") != backend:
                yield Setting({"attention_backend": backend})
    yield Setting(environment=_BATCH_INVARIANT)


def _trial(job: JobConfig, rows: Input, setting: Setting) -> Trial:
    n_rows = rows.size()
    of_trial = job.as_part(
        name=f"{FOLDER}-trial",
        engine={"options": {**job.engine.options, **setting.options}},
        run={"max_engine_restarts": 0},
        output={"dir": str(job.folder)},
        self_check={"rows": n_rows, "max_different": 1.0},
    )
    try:
        with _environment(setting.environment):
            _run(of_trial, rows)
    except BatchkitError as error:
        return Trial(setting, Checked(), str(error).splitlines()[0])
    return Trial(setting, read_history(of_trial.folder).self_checks)


def _run(job: JobConfig, rows: Input) -> None:
    tried(job, rows, StartOptions(command="compare", quiet=True, fresh=True))


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the engines that are loaded in the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
