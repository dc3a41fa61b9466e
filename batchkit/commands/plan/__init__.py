"""The ``plan`` command: answers a random sample of a job's rows, and forecasts time and cost of the other rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from batchkit.commands import Say
from batchkit.commands.forecast_file import hash_of_job, shown, tokens_of
from batchkit.commands.plan.forecast import EngineCount, Prices, Rest, rest_of
from batchkit.commands.plan.lengths import Lengths, count_lengths
from batchkit.commands.plan.sample import Sample, answer_sample, rows_in_kv_cache
from batchkit.config.numbers import duration, number
from batchkit.config.tables import JobConfig
from batchkit.engines.memory import gpus
from batchkit.errors import TooManyFailuresError
from batchkit.execution.places import gpus_of
from batchkit.runs.status import counts_of
from batchkit.sources.input import from_job
from batchkit.storage.forecast_json import update_forecast
from batchkit.storage.manifest import read_manifest
from batchkit.storage.runfolder import is_run
from batchkit.storage.starts import read_history
from batchkit.types import Usage, utc_now

_SHARE = 6  # `plan` prints a note if the sample is more than one sixth of the rows that are left
SAMPLED = 64  # default number of rows, at most a quarter of the remaining rows
_HOUR_S = 3600.0


class Plan(NamedTuple):
    """A forecast. ``figures`` is the content of ``forecast.json``:

    - ``left``: number of rows without a record.
    - tokens, ``gpu_hours`` and ``price``: for the whole run, including finished rows. ``price`` is None if the job sets
      no price. ``gpu_hours`` is None without a local GPU, or if it is unknown which GPUs will answer.
    - ``seconds``: how long the next start will take, in seconds, without ``load_seconds``, the time to load the engine.
    - ``run``: the creation time of the run folder; "" if the run has no starts.
    - ``starts``: how many starts the run had when this forecast was made.
    - ``of``: a hash of the job. If a job has another hash, the forecast is not for that job.
    """

    figures: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        return dict(self.figures)

    def to_text(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        found = self.figures
        rows, left, prompts = found["rows"], found["left"], found["prompts"]
        yield (
            f"{found['name']}: {rows:,} rows, {found['sampled']:,} of them answered for this forecast,"
            f" {left:,} left"
        )
        how = "exact" if prompts["exact"] else "estimated from the sample"
        left_before = left + found["sampled"]
        of = "all" if prompts["counted"] == left_before else f"{prompts['counted']:,}"
        tokens = shown(found["prompt_tokens"], tokens_of)
        yield f"prompt tokens: {tokens}; {how}, of {of} rows that were left"
        yield f"completion tokens: {shown(found['completion_tokens'], tokens_of)}"
        load = f", and {duration(found['load_seconds'])} to load the model" if left else ""
        yield f"time: {shown(found['seconds'], duration)}{load}"
        for name, key in (("GPU hours", "gpu_hours"), ("price", "price")):
            if found[key] is not None:
                yield f"{name}: {shown(found[key], number)}"
        copied = found["copied"]
        if any(copied.values()):
            yield (
                f"not computed: {copied['deduplicated']:,} rows equal to others (run.deduplicate),"
                f" {copied['reused']:,} answered by other runs (run.reuse)"
            )
        yield f"order of the rows: {found['order']} (run.order)"
        yield from self._failures()
        yield "in brackets: 90 % intervals"

    def _failures(self) -> Iterator[str]:
        failing = self.figures["failing"]
        if failing["rows"]:
            yield f"about {failing['rows']:,} rows would fail: `batchkit validate` lists them"
        if failing["sampled"]:
            folder = self.figures["folder"]
            yield f"{failing['sampled']:,} rows of the sample failed: batchkit show --failed {folder}"


def plan(job: JobConfig, *, rows: int | None, lengths: int | None, say: Say) -> Plan:
    """Answer ``rows`` random rows (64 if None) in the job's run, and forecast the rows without a record.

    ``lengths``: the maximum number of rows whose prompts are counted.

    Raises:
        BatchkitError: The run can't start or stopped, or all rows of the sample failed.
    """
    source = from_job(job)
    found = count_lengths(job, source, lengths, say)
    starts_before = len(read_history(job.folder).starts)
    chosen = _sampled_indexes(found, rows, job.run.seed)
    if len(chosen) * _SHARE > found.left:
        say(
            f"the forecast answers {len(chosen):,} of {found.left:,} rows, more than a sixth of the run, and loads the"
            " model once more; the run keeps these answers"
        )
    sample = answer_sample(job, source, chosen, say) if chosen else Sample()
    if sample.failed == len(sample.rows) > 0:
        raise TooManyFailuresError(
            f"all {sample.failed:,} rows of the sample failed, so there is no forecast; to see why: batchkit show"
            f" --failed {job.folder}"
        )
    made = Plan(_figures(job, found, sample, starts_before))
    if is_run(job.folder):
        update_forecast(job.folder, made.figures)
    return made


def _sampled_indexes(lengths: Lengths, rows: int | None, seed: int) -> list[int]:
    """Return the indexes of the sampled rows, in random order.

    ``rows``: number of rows to sample. None means 64, but at most a quarter of the rows without a record.
    """
    n_rows = rows or min(SAMPLED, max(2, lengths.left // 4))
    chosen: list[int] = np.random.default_rng(seed).permutation(lengths.indexes)[:n_rows].tolist()
    return chosen


def _figures(
    job: JobConfig, lengths: Lengths, sample: Sample, starts_before: int
) -> dict[str, Any]:
    folder, budget = job.folder, job.budget
    starts = read_history(folder).starts
    done = counts_of(folder).tokens if is_run(folder) else Usage(0, 0)
    left = lengths.left - len(sample.rows)
    running = min(sample.running, rows_in_kv_cache(folder, starts_before) or sample.running)
    per_gpu_s = gpus_of(job) * (budget.price_per_gpu_hour or 0.0) / _HOUR_S
    rest = Rest()
    if sample.waves:
        of_prompts, of_answers = budget.price_per_million_tokens or (0.0, 0.0)
        engines = EngineCount(job.workers.least, running, job.engine.kind == "transformers")
        prices = Prices(of_prompts / 1e6, of_answers / 1e6, per_gpu_s)
        rest = rest_of(lengths, sample, engines, prices, job.run.seed)
    load_s = sample.load_s if left else 0.0
    earlier_s = sum(start.gpu_seconds for start in starts)
    so_far = budget.price_of(done, earlier_s)
    gpu_hours = rest.seconds.plus(load_s).plus(earlier_s / _HOUR_S, gpus_of(job) / _HOUR_S)
    # Workers on Ray may have GPUs that this machine lacks.
    has_gpus = (
        job.workers.count is not None or budget.price_per_gpu_hour is not None or bool(gpus())
    )
    is_elsewhere = any(job.with_engine(name).engine.base_url for name in job.engine_names)
    price = None if so_far is None else rest.price.plus(so_far + load_s * per_gpu_s)
    return {
        "name": job.name,
        "folder": str(folder),
        "run": read_manifest(folder).created_at if is_run(folder) else "",
        "at": utc_now(),
        "rows": lengths.rows,
        "sampled": len(sample.rows),
        "left": left,
        "prompt_tokens": rest.prompt_tokens.plus(done.prompt_tokens).rounded(0),
        "completion_tokens": rest.completion_tokens.plus(done.completion_tokens).rounded(0),
        "seconds": rest.seconds.rounded(3),
        "load_seconds": round(load_s, 3),
        "gpu_hours": None if is_elsewhere or not has_gpus else gpu_hours.rounded(6),
        "price": None if price is None else price.rounded(6),
        "prompts": {
            "counted": lengths.counted,
            "exact": lengths.is_exact,
            "unit": lengths.unit,
        },
        "copied": {
            "deduplicated": round(lengths.deduplicated * lengths.scale),
            "reused": round(lengths.reused * lengths.scale),
        },
        "order": lengths.order,
        "failing": {
            "rows": round(lengths.failing * lengths.left),
            "sampled": sample.failed,
        },
        "running": running,
        "starts": len(starts),
        "of": hash_of_job(job),
    }
