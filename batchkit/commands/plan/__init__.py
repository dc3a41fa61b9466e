"""``plan``: what a job will take, forecast from a sample of its rows that is answered first."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from batchkit.commands.forecast_file import hash_of_job, shown, time_of, tokens_of, write_forecast
from batchkit.commands.plan.answers import strata_of, stratified
from batchkit.commands.plan.forecast import Engines, Interval, Prices, Rest, rest_of, summary_of
from batchkit.commands.plan.lengths import Lengths, Say, count_lengths
from batchkit.commands.plan.memory import Memory, memory_of
from batchkit.commands.plan.sample import Sample, answer_sample
from batchkit.config.numbers import number
from batchkit.config.tables import JobConfig
from batchkit.errors import TooManyFailuresError
from batchkit.execution.budgets import Budgets
from batchkit.runs.status import counts_of
from batchkit.sources.input import from_job
from batchkit.storage.manifest import read_manifest
from batchkit.storage.runfolder import is_run
from batchkit.types import Usage, utc_now

SAMPLED = 64  # rows by default, at most a quarter of those that are left
_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Plan:
    """A forecast. ``failed``: of the ``sampled`` rows. Tokens, GPU hours and price are of the whole run, what is done included; ``seconds``
    are of the start to come, with the engine up. ``left`` rows have no record yet. ``price`` is None if
    the job has no price, ``gpu_hours`` if it is not known which GPUs answer.
    ``run``: when the run began; ``starts``: how many it had had by then; ``of``: a hash of the job.
    """

    name: str
    folder: str
    run: str
    at: str
    rows: int
    sampled: int
    failed: int
    left: int
    prompt_tokens: Interval
    completion_tokens: Interval
    seconds: Interval
    load_seconds: float
    gpu_hours: Interval | None
    price: Interval | None
    lengths: Lengths
    answers: Mapping[str, float]
    engine: Mapping[str, Any]
    memory: Memory
    starts: int
    of: str

    def to_json(self) -> dict[str, Any]:
        lengths = self.lengths
        return {
            "name": self.name,
            "folder": self.folder,
            "run": self.run,
            "at": self.at,
            "rows": self.rows,
            "sampled": self.sampled,
            "left": self.left,
            "prompt_tokens": self.prompt_tokens.rounded(0),
            "completion_tokens": self.completion_tokens.rounded(0),
            "seconds": self.seconds.rounded(3),
            "load_seconds": round(self.load_seconds, 3),
            "gpu_hours": None if self.gpu_hours is None else self.gpu_hours.rounded(6),
            "price": None if self.price is None else self.price.rounded(6),
            "prompts": {
                "counted": lengths.counted,
                "exact": lengths.is_exact,
                "longest": [asdict(row) for row in lengths.longest],
            },
            "failing": {
                "rows": round(lengths.failing * lengths.left),
                "problems": [asdict(problem) for problem in lengths.problems],
                "sampled": self.failed,
            },
            "answers": dict(self.answers),
            "engine": dict(self.engine),
            "memory": self.memory._asdict(),
            "starts": self.starts,
            "of": self.of,
        }

    def to_text(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield (
            f"{self.name}: {self.rows:,} rows, {self.sampled:,} of them answered for this forecast,"
            f" {self.left:,} left"
        )
        counted = self.lengths.counted
        how = "exact" if self.lengths.is_exact else "judged by those of the sample"
        of = "all" if counted == self.lengths.left else f"{counted:,}"
        prompts = shown(self.prompt_tokens._asdict(), tokens_of)
        yield f"prompt tokens: {prompts}; {how}, of {of} rows that were left"
        yield f"completion tokens: {shown(self.completion_tokens._asdict(), tokens_of)}"
        load = f", and {time_of(self.load_seconds)} to load the model" if self.left else ""
        yield f"time: {shown(self.seconds._asdict(), time_of)}{load}"
        if self.gpu_hours is not None:
            yield f"GPU hours: {shown(self.gpu_hours._asdict(), number)}"
        if self.price is not None:
            yield f"price: {shown(self.price._asdict(), number)}"
        if self.lengths.longest:
            unit = "tokens" if self.lengths.in_tokens else "characters"
            longest = self.lengths.longest[0]
            yield f"longest prompt: {longest.size:,} {unit}, row {longest.index} (id {longest.id})"
        if self.answers.get("max"):
            answers = self.answers
            yield (
                f"answers in the sample: median {number(answers['median'])} tokens,"
                f" longest {number(answers['max'])}"
            )
        memory = self.memory
        if memory.host_gb is not None:
            gpu = "" if memory.gpu_gb is None else f", {number(memory.gpu_gb)} GiB on a GPU"
            yield f"memory: {number(memory.host_gb)} GiB on the host{gpu}"
        if problems := self.lengths.problems:
            yield f"about {round(self.lengths.failing * self.lengths.left):,} rows would fail, among them"
            for problem in problems[:3]:
                yield f"  row {problem.index} (id {problem.id}) {problem.kind}: {problem.message}"
        if self.failed:
            yield f"{self.failed:,} rows of the sample failed: batchkit show --failed {self.folder}"
        yield "in brackets: 90 % intervals"


def plan(job: JobConfig, *, rows: int | None, lengths: int | None, say: Say) -> Plan:
    """Answer ``rows`` rows at random, 64 if None, and forecast the others. Their answers are records of
    the job's run. The prompts of at most ``lengths`` rows are counted.

    Raises:
        BatchkitError: as a run, or the sample can't be answered, or all of it failed.
    """
    source = from_job(job)
    found = count_lengths(job, source, lengths, say)
    starts_before = len(read_manifest(job.folder).starts) if is_run(job.folder) else 0
    chosen = _chosen(found, rows, job.run.seed)
    sample = answer_sample(job, source, chosen, say) if chosen else None
    if sample is not None and sample.failed == len(sample.rows) > 0:
        raise TooManyFailuresError(
            f"all {sample.failed:,} rows of the sample failed, which is nothing to forecast from; each"
            f" with its message: batchkit show --failed {job.folder}"
        )
    made = _planned(job, found, sample, starts_before)
    if made.run:
        write_forecast(job.folder, made.to_json())
    return made


def _chosen(lengths: Lengths, rows: int | None, seed: int) -> list[int]:
    """The rows of the sample, in random order."""
    n_rows = rows or min(SAMPLED, max(2, lengths.left // 4))
    n_rows = min(n_rows, len(lengths.indexes))
    if not n_rows:
        return []
    places = stratified(strata_of(lengths.sizes, n_rows), n_rows, seed)
    shuffled: list[int] = np.random.default_rng(seed).permutation(lengths.indexes[places]).tolist()
    return shuffled


def _planned(job: JobConfig, lengths: Lengths, sample: Sample | None, starts_before: int) -> Plan:
    folder, run = job.folder, job.run
    manifest = read_manifest(folder) if is_run(folder) else None
    done = Usage(0, 0) if manifest is None else counts_of(folder).tokens
    memory = memory_of(folder, starts_before)
    workers, load_s, rest = run.workers or 1, 0.0, Rest()
    left = lengths.left - (0 if sample is None else len(sample.rows))
    per_gpu_s = job.gpus * (run.price_per_gpu_hour or 0.0) / _HOUR_S
    engine: dict[str, Any] = {}
    if sample is not None:
        running = min(sample.running, memory.kv_cache_rows or sample.running)
        of_prompts, of_answers = run.price_per_million_tokens or (0.0, 0.0)
        engines = Engines(workers, running, job.engine.kind == "transformers")
        prices = Prices(of_prompts / 1e6, of_answers / 1e6, per_gpu_s)
        rest = rest_of(lengths, sample, engines, prices, run.seed)
        load_s = sample.load_s if left else 0.0
        engine = {
            "workers": workers,
            "running": running,
            "sampled_at": [wave.window for wave in sample.measured],
            "sample_seconds": round(sample.seconds, 3),
        }
    to_come = rest.seconds.plus(load_s)
    earlier = sum(start.gpu_seconds for start in manifest.starts) if manifest is not None else 0.0
    so_far = Budgets(job, time.monotonic(), earlier).price(done)
    gpu_hours = None
    if not any(job.with_engine(name).engine.base_url for name in job.engine_names):
        gpu_hours = to_come.plus(earlier / _HOUR_S, job.gpus / _HOUR_S)
    return Plan(
        name=job.name,
        folder=str(folder),
        run="" if manifest is None else manifest.created_at,
        at=utc_now(),
        rows=lengths.rows,
        sampled=0 if sample is None else len(sample.rows),
        failed=0 if sample is None else sample.failed,
        left=left,
        prompt_tokens=rest.prompt_tokens.plus(done.prompt_tokens),
        completion_tokens=rest.completion_tokens.plus(done.completion_tokens),
        seconds=rest.seconds,
        load_seconds=load_s,
        gpu_hours=gpu_hours,
        price=None if so_far is None else rest.price.plus(so_far + load_s * per_gpu_s),
        lengths=lengths,
        answers=summary_of(
            [] if sample is None else [row.completion_tokens for row in sample.rows]
        ),
        engine=engine,
        memory=memory,
        starts=0 if manifest is None else len(manifest.starts),
        of=hash_of_job(job),
    )
