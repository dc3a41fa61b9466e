"""``batchkit serve``: OpenAI's Batch API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from batchkit.cli.frame import echo, say, show
from batchkit.cli.options import FILE, SET, Texts, load
from batchkit.errors import JobError

_FOLDER = Path("output/serve")


@click.command()
@click.argument("job", type=FILE, required=False)
@click.option("--model", help="A folder, or a name on the Hugging Face hub (engine.model).")
@click.option("--host", default="127.0.0.1", help="The address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, help="0 takes any free one.")
@click.option("--folder", type=FILE, default=_FOLDER, help="Where files and batches are kept.")
@click.option("--api-key-file", "key_file", type=FILE, help="The keys of those who may use it.")
@click.option("--new-key", metavar="NAME", help="Add a key to --api-key-file, print it and exit.")
@click.option(
    "--retention-days",
    type=click.FloatRange(0),
    default=30.0,
    help="Files and runs of ended batches are removed after so many days; 0: never.",
)
@click.option(
    "--max-file-gb",
    type=click.FloatRange(0, min_open=True),
    default=64.0,
    help="Larger files are refused.",
)
@click.option("--webhook", metavar="URL", help="It is told of each batch that has ended.")
@SET
@click.option("--check", is_flag=True, help="Compare the database with the folders, and exit.")
def serve(
    job: Path | None,
    model: str | None,
    new_key: str | None,
    check: bool,
    max_file_gb: float,
    overrides: Texts,
    **where: Any,
) -> None:
    """Serve OpenAI's Batch API: files and batches, answered by one model.

    JOB has the engine and the defaults of requests; its input is not used. Each batch is a run in FOLDER/batches.
    Ctrl-C lets requests in flight finish; the same command continues.
    """
    from batchkit.config.loading import make_job
    from batchkit.serve.keys import new_key as make_key
    from batchkit.serve.server import serve as run
    from batchkit.serve.settings import Settings

    if new_key is not None:
        if where["key_file"] is None:
            raise click.UsageError("--new-key needs --api-key-file FILE, which it is added to")
        echo(make_key(where["key_file"], new_key))
        return
    if check:
        from batchkit.serve.audit import audit

        found = audit(where["folder"])
        show(found, as_json=False)
        raise SystemExit(found.exit_code)
    given = {"input.format": "openai-batch"}
    given |= {} if model is None else {"engine.model": model}
    if job is not None:
        loaded = load(job, overrides, given, of=("",))
    elif model is not None or any(text.startswith("engine.") for text in overrides):
        loaded = make_job({"name": "serve", "engine": {}}, "the command line", overrides, given)
    else:
        raise click.UsageError("give a job file, or --model: batchkit serve --model MODEL")
    if not loaded.may_have_lines or loaded.steps or loaded.rollout:
        raise JobError(
            "prompt, pair, steps and rollout: a batch's lines are whole requests; leave these tables out"
        )
    settings = Settings(job=loaded, max_file_bytes=int(max_file_gb * 2**30), **where)
    run(settings, ready=lambda address: echo(f"batchkit: serving {address}v1"), say=say)
