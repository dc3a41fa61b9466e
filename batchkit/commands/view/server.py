"""The server of ``batchkit view``: its routes, and what protects them.

Everything is GET. What is not there is 404, what can't be read 409, a wrong parameter 400, each with
{"error": text}. Times are ISO 8601 in UTC, durations in seconds.

``/``
    The list of runs; if one run was asked for, a redirect to its page.
``/run/{run}``, ``/compare?a=RUN&b=RUN``, ``/assets/{name}``
    Pages, and what they load: this folder's CSS and JS, and what the report shares.
``/api/runs``
    [{run, name, folder, state, total, ok, failed, pending, started_at, model, kind}], the newest
    first. ``run`` is the run's key in all URLs; ``state``: running, finished, stopped or "failed to
    start"; ``kind``: the engine's. A run that can't be read has ``error`` instead of the counts.
``/api/runs/{run}``
    The dict of ``batchkit status --json``, and {state, model, kind, started_at, starts: [{number,
    command, started_at, ended_at, exit, host, seconds, engine_restarts, events: [{at, text}],
    workers}], failures: [{kind, count, message, index}], groups: [name], group_by, scorers: [{name,
    head, scale}], problem, indexed, forecast}. ``at`` is null in runs of older versions. A failure's ``message``
    and ``index`` are of its first row. ``scale``: what a score is multiplied by to be shown.
    ``problem``: what is wrong with the log, or null. ``indexed``: the share of the log that failures,
    groups and scorers are of, from 0 to 1. ``forecast``: {at, left, seconds, prompt_tokens,
    completion_tokens, gpu_hours, price} of ``batchkit plan``, or null.
``/api/runs/{run}/metrics?points=600``
    Columns of equal length, thinned to some ``points``: {at, seconds, start, rows_ok, rows_failed,
    rows_per_s, prompt_tokens_per_s, completion_tokens_per_s, window, in_flight, running, waiting,
    kv_cache_usage, preemptions, engine_restarts, host_bytes, gpu_bytes, gpu_utilization}.
    ``seconds``: of work, over all starts. A rate is since the line before, null at a start's first.
``/api/runs/{run}/rows?offset=0&limit=50&status=&kind=&group=&scorer=&min=&max=&text=&sort=&order=``
    {total, offset, rows: [{index, id, status, kind, text, prediction, scores, group, usage,
    latency_s, attempt}], indexed, next}. ``text`` is cut to 500 characters. ``status``:
    ok, failed, unscored, or cut at max_tokens. ``min`` and ``max`` limit
    the score of ``scorer``; ``text`` is searched for as it is, upper and lower case being equal;
    ``sort``: index, latency, tokens, length or score; ``order``: asc or desc. ``indexed``: the share of
    the log that the answer is over; ask again if it is below 1. ``total`` is null while the search has
    not seen all of it. ``next``: the offset of the next page, or null.
``/api/runs/{run}/rows/{index}``
    {record, answers, reference, attempts, prompt, steps}: the newest record; its answers in words,
    one for each choice; the right answer or null; the row's older records; what it was asked:
    {messages: [{role, content}]} or {text} or {error}, and {images: [url]}; and the lines of
    ``steps.jsonl`` that are of this row.
``/api/runs/{run}/rows/{index}/images/{n}``
    An image of the prompt as WebP, scaled down to 3 megapixels; 404 if it can't be opened.
``/api/runs/{run}/events``
    Server-sent events: "status" (as above) and "metrics" (one value for each column) when they have
    changed, "problem" ({error}) while the run can't be read; a comment as a heartbeat.
``/api/compare?a=RUN&b=RUN&only=changed&offset=0&limit=50``
    {total, counts, rows: [{id, group, a, b}], offset, indexed}: rows that have the same id, as
    in the list; ``a`` or ``b`` is null if the run has no such row. ``only`` and ``counts``: changed,
    fixed, broken, all; ``counts`` also has only_a and only_b.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from importlib.resources import files

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from batchkit.commands.view.runs import Runs
from batchkit.config.masking import masked_text
from batchkit.errors import BatchkitError

_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
        " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def make_app(runs: Runs, host: str, *, is_ending: Callable[[], bool]) -> ASGIApp:
    """The application; ``host`` is the name or address that it listens on. Once it ``is_ending``,
    so do its streams of events."""
    from batchkit.commands.view.api import Api

    pages, api = _Pages(runs), Api(runs, is_ending)
    app = Starlette(
        routes=[
            Route("/", pages.home),
            Route("/run/{run}", pages.run),
            Route("/compare", pages.compare),
            Route("/assets/{name}", pages.asset),
            Route("/api/runs", api.runs),
            Route("/api/runs/{run}", api.status),
            Route("/api/runs/{run}/metrics", api.metrics),
            Route("/api/runs/{run}/rows", api.rows),
            Route("/api/runs/{run}/rows/{row}", api.row),
            Route("/api/runs/{run}/rows/{row}/images/{n}", api.image),
            Route("/api/runs/{run}/events", api.events),
            Route("/api/compare", api.compare),
        ],
        exception_handlers={
            HTTPException: _on_refused,
            BatchkitError: _on_problem,
            OSError: _on_problem,
        },
    )
    return _guarded(app, host)


class _Pages:
    """The pages, and what they load."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._assets = _assets()

    def home(self, request: Request) -> Response:
        if self._runs.is_single:
            return RedirectResponse(f"/run/{self._runs.single_key}")
        return self._page("runs.html")

    def run(self, request: Request) -> Response:
        key = request.path_params["run"]
        if key not in self._runs.folders():
            raise HTTPException(404, f"no run {key!r} here; it may have been moved or deleted")
        return self._page("run.html")

    def compare(self, request: Request) -> Response:
        return self._page("compare.html")

    def asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name.endswith(".html"):
            raise HTTPException(404, f"no asset {name!r}")
        return self._page(name)

    def _page(self, name: str) -> Response:
        if name not in self._assets:
            raise HTTPException(404, f"no asset {name!r}")
        content, media_type = self._assets[name]
        return Response(content, media_type=media_type)


def _assets() -> dict[str, tuple[bytes, str]]:
    """What may be loaded, by name, with its type."""
    commands = files("batchkit") / "commands"
    found = [
        path for path in (commands / "view").iterdir() if path.name.endswith((*_TYPES, ".html"))
    ]
    found += [commands / "report" / name for name in ("page.css", "elements.js")]
    return {
        path.name: (path.read_bytes(), _TYPES.get(path.name[path.name.rfind(".") :], "text/html"))
        for path in found
    }


def _on_refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code)


def _on_problem(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": masked_text(str(error))}, 409)


def _guarded(app: ASGIApp, host: str) -> ASGIApp:
    """``app`` with the headers that protect its pages, only for requests to this server by a name
    that is its own: a web page elsewhere could point its own name to this address."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), text.encode()) for name, text in _HEADERS.items()]
                message["headers"] = [*message["headers"], *own]
            await send(message)

        named = Request(scope).headers.get("host", "")
        if not _is_own(named, host):
            text = (
                f"Host {named!r} is refused: open this server by its address or as localhost, or start"
                " it with --host and that name"
            )
            await JSONResponse({"error": text}, 403)(scope, receive, send_guarded)
            return
        await app(scope, receive, send_guarded)

    return guarded


def _is_own(named: str, host: str) -> bool:
    """An address can't be pointed elsewhere, a name can."""
    name = named.rsplit(":", 1)[0] if not named.endswith("]") else named
    name = name.strip("[]").lower().rstrip(".")
    if name in ("localhost", host.lower()):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
