"""The commands that try a job before it runs: ``plan``, ``tune`` and ``find-bs``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

import batchkit.cli.options as options
from batchkit.cli.frame import Result, say
from batchkit.cli.options import COUNT, JOB, LIMIT, SET, Texts, load, of_key, printed
from batchkit.errors import JobError


@click.command()
@JOB
@options.rows(
    "Number of rows to answer for the forecast; default 64, but at most a quarter of the rows left."
)
@click.option(
    "--lengths",
    type=COUNT,
    metavar="N",
    help="Number of rows, drawn at random, whose prompt tokens are counted; default 100,000, or 2,000 with images.",
)
@LIMIT
@of_key(
    "budget.price_per_gpu_hour",
    "--price-per-gpu-hour",
    "Price of one GPU for one hour",
    type=click.FloatRange(0, min_open=True),
    metavar="PRICE",
)
@of_key(
    "budget.price_per_million_tokens",
    "--price-per-million-tokens",
    "Prices of a million prompt tokens and of a million completion tokens",
    metavar="IN,OUT",
    callback=lambda context, option, text: _prices(text),
)
@options.TRUST
@SET
@printed
def plan(
    job: Path,
    rows: int | None,
    lengths: int | None,
    trust: bool,
    overrides: Texts,
    **keys: Any,
) -> Result:
    """Forecast tokens, time, GPU hours and price of JOB.

    Answers a random sample of rows with JOB's engine and settings. The run keeps these answers, and at its end prints a
    comparison with the forecast. Each figure has a 90 % interval.
    """
    from batchkit.commands.plan import plan as forecast

    loaded = load(job, overrides, options.given_keys(keys), trust=trust)
    return forecast(loaded, rows=rows, lengths=lengths, say=say)


def _prices(text: str | None) -> list[float] | None:
    """Return the two prices in ``text``, per million prompt and completion tokens. Raises JobError if there are not
    two."""
    if text is None:
        return None
    try:
        of_prompts, of_answers = map(float, text.split(","))
    except ValueError:
        raise JobError(
            f"--price-per-million-tokens {text}: write two prices, for prompt and for completion tokens: 0.15,0.60"
        ) from None
    return [of_prompts, of_answers]


@click.command("find-bs")
@JOB
@click.option("--low", type=COUNT, default=1, help="Smallest batch size.")
@click.option("--high", type=COUNT, default=1024, help="Largest batch size.")
@options.rows("Use only the first N rows; default all.")
@options.seconds(
    "Maximum seconds of measurement per batch size, after at most as many seconds to fill the engine.",
    30.0,
)
@click.option(
    "--write",
    is_flag=True,
    help="Set the best size in the file JOB; the rest of the file stays as it is.",
)
@SET
@printed
def find_bs(job: Path, write: bool, overrides: Texts, **limits: Any) -> Result:
    """Find the best batch size for JOB by binary search.

    The engine batches continuously, so the batch size is the number of requests that it runs at the same time,
    engine.options.max_num_seqs. A larger one needs more GPU memory.

    Tries each size on JOB's rows with a new engine: doubles the size from --low, then searches for the largest one that
    fits. Stops when twice the size gains less than 3 %. Exits with 1 if no size fits. The runs are kept in find-bs/ in
    the run folder. The same command continues a search that was stopped.
    """
    from batchkit.commands.tuning.find import find_batch_size

    write_to = job if write else None
    return find_batch_size(load(job, overrides), write_to=write_to, say=say, **limits)


@click.command()
@JOB
@click.option(
    "--minutes",
    type=click.FloatRange(0, min_open=True),
    default=20.0,
    help="Approximate length of the search in minutes, including the final comparison with the default.",
)
@options.rows("Use only the first N rows; default all.")
@options.seconds(
    "Maximum seconds of measurement per trial, after at most as many seconds to fill the engine.",
    10.0,
)
@click.option(
    "--allow-changes",
    is_flag=True,
    help="Also try options that change answers (bfloat16, fp8 weights, fp8 KV cache), and count the changed answers.",
)
@click.option(
    "--write",
    is_flag=True,
    help="Set the best options in the file JOB; the rest of the file stays as it is.",
)
@SET
@printed
def tune(job: Path, allow_changes: bool, write: bool, overrides: Texts, **limits: Any) -> Result:
    """Find the fastest engine options for JOB on this machine.

    Tries options that change speed but not answers, on JOB's rows: how the GPUs are used, the number of concurrent
    requests, tokens per step, memory, CUDA graphs, and other options that help against the bottleneck. At the end, it
    measures the default and the best options in turn, three times each. tune/trials.html in the run folder shows all
    trials; their runs are kept beside it. The same command continues a search that was stopped.
    """
    from batchkit.commands.tuning.tune import SearchLimits
    from batchkit.commands.tuning.tune import tune as search

    write_to, searched = job if write else None, SearchLimits(**limits)
    return search(
        load(job, overrides), searched, allow_changes=allow_changes, write_to=write_to, say=say
    )
