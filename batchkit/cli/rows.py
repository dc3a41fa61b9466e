"""``batchkit show``, ``status``, ``ls`` and ``view``: what is in a run so far."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import click

from batchkit.cli.frame import Result, echo, say, show
from batchkit.cli.options import COUNT, JSON, MEDIA, RUN, find, printed

_WATCH_S = 2.0


@click.command("show")
@RUN
@click.option("--failed", is_flag=True, help="Only rows that failed or came back empty.")
@click.option("--id", "ids", multiple=True, metavar="ID", help="The row ID. May be repeated.")
@click.option("-n", "most", type=COUNT, help="At most so many rows; 5, or all with --id.")
@MEDIA
@JSON
def show_rows(run: str | None, as_json: bool, **which: Any) -> None:
    """Print rows of RUN with prompt, images, answer and error.

    Prompts are rendered again from the input.
    """
    from batchkit.commands.show import show_rows as look

    found = look(find(run), **which)
    if as_json:
        echo(json.dumps(found.to_json()))
        return
    for row in found.rows:
        echo(row.to_text())
    if not found.rows:
        say("no row failed" if which["failed"] else "no row has a record yet")
    if found.problem:
        say(f"where the input can't be read as it was, prompts are missing: {found.problem}")


@click.command()
@RUN
@click.option(
    "--watch",
    is_flag=True,
    help=f"Show it again, with a bar, every {_WATCH_S:g} seconds, as long as a process works on RUN.",
)
@JSON
def status(run: str | None, watch: bool, as_json: bool) -> None:
    """Show what of RUN is done, failed and left, its rate and ETA."""
    from batchkit.runs.status import status as look

    folder = find(run)
    found = look(folder)
    while watch and found.held_by is not None:
        click.clear()  # on a terminal
        if not as_json and (bar := found.bar()):
            echo(bar)
        show(found, as_json)
        time.sleep(_WATCH_S)
        found = look(folder)
    if watch:
        click.clear()
    show(found, as_json)


@click.command("ls")
@click.argument("folder", default="output", type=click.Path(path_type=Path), metavar="[DIR]")
@printed
def list_runs(folder: Path) -> Result:
    """List the runs in DIR with their state, the newest first; output/ if it is left out."""
    from batchkit.runs.listing import runs_below

    return runs_below(folder)


@click.command()
@click.argument("run", required=False, type=click.Path(), metavar="[RUN|DIR]")
@click.option("--host", default="127.0.0.1", help="The address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), help="By default 8484, or any if it is taken."
)
@click.option("--no-browser", is_flag=True, help="Only print the address.")
@MEDIA
def view(run: str | None, no_browser: bool, **where: Any) -> None:
    """Show RUN, or the runs in DIR, on a web page that follows them live.

    By default, the runs in output/. Nothing in a run is changed. Everybody who can reach the address
    can read the runs. Ctrl-C ends it.
    """
    from batchkit.commands.view import view as serve

    serve(run, browser=not no_browser, ready=echo, **where)
    sys.stdout.flush()
    os._exit(
        0
    )  # a thread may wait for a row's template, in a child process that ends with this one
