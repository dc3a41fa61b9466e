"""The server of ``batchkit view``: its routes and its access checks.

All requests are GET. Errors are 404 (not found), 409 (can't be read) and 400 (invalid parameter), each with
{"error": text}. Times are ISO 8601 in UTC, durations in seconds. ``run`` is the name of a run folder.

``/``, ``/run/{run}``, ``/compare?a=RUN&b=RUN``, ``/assets/{name}``
    The page (list of runs, one run, or two runs) and its files: page.css and the modules of its script.
``/api/runs``
    [{run, folder, score, …}] as ``Look.summary``, the newest first; ``error`` instead of the counts if a run can't be
    read. ``score``: {name, head, mean} of the first scorer, null if it is unknown or missing.
``/api/runs/{run}``
    ``overview.overview``: the dict of ``batchkit status --json``, failures, scores and histograms of the run, and
    ``newest``, the last value of each column of the metrics.
``/api/runs/{run}/about``
    ``overview.about``: the origin of the answers.
``/api/runs/{run}/metrics``
    ``overview.timeline``: columns of equal length. ``seconds``: working time over all starts.
``/api/runs/{run}/values``
    ``Comparison.to_json`` of the values of ``input.cross`` in the run; null if there are fewer than two, or no scores.
``/api/runs/{run}/rows?offset=0&limit=50&…`` (``rows.Query``)
    {total, offset, rows, indexed, next, has_images}; rows as ``rows.ComparedRun.row``. ``indexed``: the share of the log
    that the response covers; request again if it is below 1. ``next``: the offset of the next page, or null.
``/api/runs/{run}/prompts?rows=3,5,8``
    {index: {asked, reference, image}} as ``detail.beside_answers``; if it lacks some rows, request these again.
``/api/runs/{run}/rows/{index}``
    ``detail.shown``: the row's records, prompt, fields and steps.
``/api/runs/{run}/rows/{index}/images/{n}``
    An image of the prompt as WebP, scaled down to 3 megapixels; 404 if it can't be opened.
``/api/runs/{run}/rows/{index}/clips/{n}``
    A clip of the prompt, or the requested byte range of it; 404 if it can't be opened or played.
    ``/poster`` below it is a frame of a video as WebP.
``/api/compare?a=RUN&b=RUN&…`` (``pairs.PairsQuery``)
    {total, counts, rows: [{id, group, a, b}], offset, indexed}: rows with the same id, as
    in the list; ``a`` or ``b`` is null if the run has no such row.
``/api/comparison?a=RUN&b=RUN``
    The dict of ``batchkit compare A B --json``.

A report (``batchkit report``) is this page as a file that contains these responses.
"""

from __future__ import annotations

import ipaddress
from functools import partial
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from batchkit.commands.view.page import ASSETS, read
from batchkit.config.masking import masked_text
from batchkit.errors import BatchkitError, MediaError
from batchkit.runs.listing import Runs

_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; media-src 'self';"
        " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def make_app(runs: Runs, host: str | None) -> ASGIApp:
    """Return the application: the page and its API for ``runs``. ``host``: the name or address that the server listens
    on; None allows requests to any host name."""
    from batchkit.commands.view.api import Api

    pages, api = _Pages(runs), Api(runs)
    app = Starlette(
        routes=[
            Route("/", pages.home),
            Route("/run/{run}", pages.run),
            Route("/compare", pages.page),
            Route("/assets/{name}", pages.asset),
            Route("/api/runs", api.runs),
            Route("/api/runs/{run}", api.status),
            Route("/api/runs/{run}/metrics", api.metrics),
            Route("/api/runs/{run}/rows", api.rows),
            Route("/api/runs/{run}/prompts", api.prompts),
            Route("/api/runs/{run}/rows/{row:int}", api.row),
            Route("/api/runs/{run}/rows/{row:int}/images/{n:int}", api.image),
            Route("/api/runs/{run}/rows/{row:int}/clips/{n:int}", api.clip),
            Route("/api/runs/{run}/rows/{row:int}/clips/{n:int}/poster", api.poster),
            Route("/api/runs/{run}/about", api.about),
            Route("/api/runs/{run}/values", api.values),
            Route("/api/compare", api.compare),
            Route("/api/comparison", api.comparison),
        ],
        exception_handlers={
            HTTPException: _on_refused,
            MediaError: partial(_on_problem, status=404),
            BatchkitError: _on_problem,
            OSError: _on_problem,
        },
    )
    return _guarded(app, host)


class _Pages:
    """The handlers of the web page, which is the same at each address, and of its files."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs

    def home(self, request: Request) -> Response:
        if self._runs.is_single:
            return RedirectResponse(f"/run/{quote(self._runs.target.name)}")
        return self.page(request)

    def run(self, request: Request) -> Response:
        key = request.path_params["run"]
        if key not in self._runs.folders():
            raise HTTPException(404, f"no run {key!r} here; it may have been moved or deleted")
        return self.page(request)

    def page(self, request: Request) -> Response:
        return Response(read("page.html"), media_type="text/html")

    def asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in ASSETS:
            raise HTTPException(404, f"no asset {name!r}")
        return Response(read(name), media_type=ASSETS[name])


def _on_refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code)


def _on_problem(request: Request, error: Exception, status: int = 409) -> Response:
    return JSONResponse({"error": masked_text(str(error))}, status)


def _guarded(app: ASGIApp, host: str | None) -> ASGIApp:
    """Return ``app`` with security headers. Requests that use another host name than this server's are refused.
    Otherwise, a web page could point its own host name at this address and read the runs (DNS rebinding)."""

    async def guarded(request: Request, answered: RequestResponseEndpoint) -> Response:
        named = request.headers.get("host", "")
        refusal = "" if host is None else refusal_of(named, host)
        response = JSONResponse({"error": refusal}, 403) if refusal else await answered(request)
        response.headers.update(_HEADERS)
        return response

    return BaseHTTPMiddleware(app, guarded)


def refusal_of(named: str, host: str) -> str:
    """Return why a request to the host name ``named`` is refused, or "" if it is allowed. IP addresses are allowed,
    because they always mean the same machine; host names can be pointed anywhere."""
    name = named.rsplit(":", 1)[0] if not named.endswith("]") else named
    name = name.strip("[]").lower().rstrip(".")
    try:
        if name not in ("localhost", host.lower()):
            ipaddress.ip_address(name)
    except ValueError:
        return (
            f"Host {named!r} is refused: open this server by its IP address or as localhost, or start it with"
            " --host set to that name"
        )
    return ""
