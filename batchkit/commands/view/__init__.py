"""The ``view`` command: shows runs on a live web page."""

from __future__ import annotations

import os
import socket
import webbrowser
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchkit.engines.registry import require
from batchkit.errors import Interrupted, JobError
from batchkit.runs.listing import Runs, find_run, folder_of
from batchkit.storage.runfolder import is_run

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp

PORT = 8484  # if it is taken and --port is not set, any free port
_OUTPUT = Path("output")


def view(
    target: str | None,
    *,
    host: str,
    port: int | None,
    browser: bool,
    media: Sequence[Path] = (),
    ready: Callable[[str], None],
) -> None:
    """Serve the web page of a run (``target``: a run folder or job file), or of all runs below a folder (default
    ``output``), until a signal stops the process.

    ``media``: folders whose inputs and images may be read (``Reach``). ``ready`` is called with the address.

    Raises:
        JobError: There is nothing to show, the port is taken, or a package is missing.
    """
    require(["starlette", "uvicorn"], user="batchkit view", extra="view")
    from batchkit.commands.view.server import make_app

    runs = _runs(target, tuple(media))
    with bound(host, port) as listening:
        server = quiet_server(make_app(runs, host), ends_in_s=1, loop="asyncio")
        address = address_of(host, listening.getsockname()[1])
        ready(address)
        if browser and (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
            webbrowser.open(address)
        try:
            server.run(sockets=[listening])
        except (Interrupted, KeyboardInterrupt):  # the normal way for the server to end
            return


def _runs(target: str | None, media: tuple[Path, ...]) -> Runs:
    folder = _OUTPUT if target is None else folder_of(target)
    if not folder.is_dir():
        if target is None:
            raise JobError(f"{folder}/: no such folder; name a folder with runs, or a run")
        folder = find_run(target)  # target is a job file
    return Runs(folder.resolve(), is_run(folder), media)


def quiet_server(
    app: ASGIApp, *, ends_in_s: int, head_timeout_s: float = 10.0, **options: Any
) -> uvicorn.Server:
    """Return a uvicorn server that logs nothing. When it stops, running responses get ``ends_in_s`` seconds to finish.
    Request heads are limited in size and number of headers, and must arrive within ``head_timeout_s`` seconds."""
    import uvicorn

    from batchkit.commands.view import connections

    http: Any = partial(connections.BoundedConnection, head_timeout_s=head_timeout_s)
    return uvicorn.Server(
        uvicorn.Config(
            connections.with_bounded_heads(app),
            http=http,
            h11_max_incomplete_event_size=connections.MAX_HEAD_BYTES,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=ends_in_s,
            **options,
        )
    )


def bound(host: str, port: int | None) -> socket.socket:
    """Return a socket that listens on this address. ``port`` None means 8484, or any free port if 8484 is taken. Raise
    JobError if the address can't be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if port is None:
        with suppress(OSError):
            return socket.create_server((host, PORT), family=family)
    try:
        return socket.create_server((host, port or 0), family=family)
    except OSError as error:
        named = "" if port is None else f" --port {port}"
        raise JobError(
            f"--host {host}{named}: can't listen on this address: {error.strerror}; --host must be an address"
            " or a name of this machine; --port 0 uses any free port"
        ) from error


def address_of(host: str, port: int) -> str:
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"
