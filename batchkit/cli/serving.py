"""``batchkit serve``: OpenAI's Batch API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batchkit.cli.frame import echo, say, show
from batchkit.cli.options import FILE, SET, Texts, load
from batchkit.errors import JobError

if TYPE_CHECKING:
    from batchkit.config.tables import JobConfig

_FOLDER = Path("output/serve")


@click.command()
@click.argument("jobs", type=FILE, nargs=-1, metavar="[JOB]...")
@click.option(
    "--model",
    "models",
    multiple=True,
    help="Model folder, or a name on the Hugging Face hub (engine.model). May be repeated if no JOB is given.",
)
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8080,
    help="Port to listen on; 0 for any free port.",
)
@click.option("--folder", type=FILE, default=_FOLDER, help="Folder of files and batches.")
@click.option("--api-key-file", "key_file", type=FILE, help="File with the API keys of the users.")
@click.option(
    "--new-key",
    metavar="NAME",
    help="Add a key for user NAME to --api-key-file, print it, and exit.",
)
@click.option(
    "--retention-days",
    type=click.FloatRange(0),
    default=30.0,
    help="Days after which files and runs of ended batches are removed; 0 keeps them.",
)
@click.option(
    "--max-file-gb",
    type=click.FloatRange(0, min_open=True),
    default=64.0,
    help="Maximum size of an uploaded file, in GB.",
)
@click.option("--webhook", metavar="URL", help="URL that gets a POST for each batch that ends.")
@click.option(
    "--self-check",
    type=click.IntRange(0),
    default=0,
    metavar="ROWS",
    help="Compute this many rows of each batch again alone and compare. Other batches on the model wait meanwhile.",
)
@SET
@click.option(
    "--check", is_flag=True, help="Compare the database with the folders on disk, and exit."
)
def serve(
    jobs: tuple[Path, ...],
    models: Texts,
    new_key: str | None,
    check: bool,
    max_file_gb: float,
    overrides: Texts,
    **where: Any,
) -> None:
    """Serve OpenAI's Batch API on one or several models.

    Each JOB names the engine of one model and the defaults of its requests; its input is not used. Each batch is a run
    in FOLDER/batches. Ctrl-C finishes the requests in flight; the same command continues the rest.
    """
    from batchkit.serve.keys import new_key as make_key
    from batchkit.serve.server import serve as run
    from batchkit.serve.settings import ServedModel, Settings, by_name

    if new_key is not None:
        if where["key_file"] is None:
            raise click.UsageError(
                "--new-key needs --api-key-file FILE, the file to which the key is added"
            )
        echo(make_key(where["key_file"], new_key))
        return
    if check:
        from batchkit.serve.audit import audit

        found = audit(where["folder"])
        show(found, as_json=False)
        raise SystemExit(found.exit_code)
    loaded = [*_loaded(jobs, models, overrides)]
    settings = Settings(
        models=by_name(map(ServedModel, loaded)), max_file_bytes=int(max_file_gb * 2**30), **where
    )
    run(settings, ready=lambda address: echo(f"batchkit: serving {address}v1"), say=say)


def _loaded(jobs: Sequence[Path], models: Texts, overrides: Texts) -> Iterator[JobConfig]:
    from batchkit.config.loading import make_job

    if (len(models) > 1 and jobs) or (len(jobs) > 1 and models):
        raise click.UsageError(
            "--model works with one JOB only: with several JOBs, leave out --model; with several --model,"
            " leave out JOB"
        )
    if not (jobs or models or any(text.startswith("engine.") for text in overrides)):
        raise click.UsageError("give a job file, or --model: batchkit serve --model MODEL")
    for job, model in zip_longest(jobs, models) if jobs or models else [(None, None)]:
        given = {"input.format": "openai-batch"}
        given |= {} if model is None else {"engine.model": model}
        if job is not None:
            loaded = load(job, overrides, given, of=("",))
        else:
            table = {"name": "serve", "engine": {}}
            loaded = make_job(table, "the command line", overrides, given)
        if not loaded.may_have_lines or loaded.steps or loaded.rollout:
            raise JobError(
                "the job sets [prompt], [pair], [[steps]] or [rollout], but the lines of a batch are complete requests:"
                " leave these tables out"
            )
        yield loaded
