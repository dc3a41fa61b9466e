"""The commands that show a run: ``show``, ``status`` and ``view``."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import click

from batchkit.cli.frame import echo, say, show
from batchkit.cli.options import COUNT, JSON, MEDIA, RUN, find

_WATCH_S = 2.0


@click.command("show")
@RUN
@click.option("--failed", is_flag=True, help="Show only rows that failed or have an empty answer.")
@click.option(
    "--id", "ids", multiple=True, metavar="ID", help="Show the row with this id. May be repeated."
)
@click.option("-n", "most", type=COUNT, help="Maximum number of rows; default 5, or all with --id.")
@MEDIA
@JSON
def show_rows(run: str | None, as_json: bool, **which: Any) -> None:
    """Print rows of RUN with prompt, images, answer and error.

    Renders the prompts again from the input.
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
        say(
            f"the prompts of some rows are missing, because the input can't be read or has changed: {found.problem}"
        )


@click.command()
@click.argument("run", required=False, type=click.Path(), metavar="[RUN|DIR]")
@click.option(
    "--watch",
    is_flag=True,
    help=f"Refresh every {_WATCH_S:g} seconds, with a progress bar, while a process works on RUN.",
)
@JSON
def status(run: str | None, watch: bool, as_json: bool) -> None:
    """Print the progress of RUN, or list the runs in DIR.

    Prints rows, failures by kind, tokens, rate and ETA. The list has the newest run first.
    """
    from batchkit.runs.listing import folder_of, is_folder_of_runs, runs_below
    from batchkit.runs.status import status as look

    if run is not None and is_folder_of_runs(of_runs := folder_of(run)):
        show(runs_below(of_runs), as_json)
        return
    folder = find(run)
    found = look(folder)
    while watch and found.held_by is not None:
        click.clear()  # on a terminal
        if not as_json and (bar := found.bar()):
            echo(bar)
        show(found, as_json)
        time.sleep(_WATCH_S)
        found = look(find(run))
    if watch:
        click.clear()
    show(found, as_json)


@click.command()
@click.argument("run", required=False, type=click.Path(), metavar="[RUN|DIR]")
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help="Port to listen on; default 8484, or any free port if it is taken.",
)
@click.option("--no-browser", is_flag=True, help="Print the address without opening a browser.")
@MEDIA
def view(run: str | None, no_browser: bool, **where: Any) -> None:
    """Show RUN, or all runs in DIR, on a live web page.

    The default of DIR is output/. `view` changes nothing in a run. Anyone who can reach the address can read the runs.
    Stop it with Ctrl-C.
    """
    from batchkit.commands.view import view as serve

    serve(run, browser=not no_browser, ready=echo, **where)
    sys.stdout.flush()
    # A thread may wait for a row's template, in a child process that ends with this one.
    os._exit(0)
