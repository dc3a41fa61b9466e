"""The server of ``batchkit view``: its routes, and what protects them.

Everything is GET. What is not there is 404, what can't be read 409, a wrong parameter 400, each with
{"error": text}. Times are ISO 8601 in UTC, durations in seconds.

``/``
    The list of runs; if one run was asked for, a redirect to its page.
``/run/{run}``, ``/compare?a=RUN&b=RUN``, ``/assets/{name}``
    The page, which shows one run, two, or the list of runs, and what it loads: page.css, page.js.
``/api/runs``
    [{run, name, folder, state, total, ok, failed, pending, started_at, model, kind}], the newest
    first. ``run`` is the run's key in all URLs; ``state``: running, finished, stopped or "failed to
    start"; ``kind``: the engine's. A run that can't be read has ``error`` instead of the counts.
``/api/runs/{run}``
    The dict of ``batchkit status --json``, and {state, model, kind, started_at, starts: [{number,
    command, started_at, ended_at, exit, host, seconds, engine_restarts, events: [{at, text}],
    workers}], failures: [{kind, count, message, index}], groups: [name], group_by, scorers: [{name,
    head, scale}], scores, spreads, notes: [text], problem, indexed, forecast}. A failure's ``message`` and ``index`` are of its first
    row. ``scale``: what a score is multiplied by to be shown. ``scores``: the dict of
    ``batchkit score --json``. ``spreads``: histograms (``spread.py``) of latency and lengths.
    ``problem``: what is wrong with the log, or null. ``indexed``: the share of the log that failures,
    groups and scorers are of, from 0 to 1. ``forecast``: {at, left, seconds, prompt_tokens,
    completion_tokens, gpu_hours, price} of ``batchkit plan``, or null.
``/api/runs/{run}/about``
    {origin: [[name, value]], job_toml, steps: {name: {generations, failed, prompt_tokens,
    completion_tokens}}}: where the answers come from.
``/api/runs/{run}/metrics?points=600``
    Columns of equal length, thinned to some ``points``: {at, seconds, start, rows_ok, rows_failed,
    rows_per_s, prompt_tokens_per_s, completion_tokens_per_s, window, in_flight, running, waiting,
    kv_cache_usage, preemptions, engine_restarts, host_bytes, gpu_bytes, gpu_utilization}.
    ``seconds``: of work, over all starts. A rate is since the line before, null at a start's first.
``/api/runs/{run}/rows?offset=0&limit=50&status=&kind=&group=&scorer=&min=&max=&text=&sort=&order=``
    {total, offset, rows: [{index, id, status, kind, text, prediction, scores, group, usage,
    latency_s, attempt, asked}], indexed, next}. ``text``, the answer, and ``asked``, the field with the
    question, are cut to 500 characters. ``status``: ok, failed, unscored, or cut (at max_tokens). ``min``
    and ``max`` limit the score of ``scorer``; ``text`` is searched for as it is, upper and lower case being equal;
    ``sort``: index, latency, tokens, length or score; ``order``: asc or desc. ``indexed``: the share of
    the log that the answer is over; ask again if it is below 1. ``total`` is null while the search has
    not seen all of it. ``next``: the offset of the next page, or null.
``/api/runs/{run}/rows/{index}``
    {record, kind, group, asked, answers, reference, fields, attempts, prompt, steps}: the newest record;
    its answers in words, one for each choice; the right answer or null; the row's fields as texts; its
    older records; what it was asked: {messages: [{role, content}]} or {text} or {error}, and {images:
    [url]}; and the lines of ``steps.jsonl`` that are of this row.
``/api/runs/{run}/rows/{index}/images/{n}``
    An image of the prompt as WebP, scaled down to 3 megapixels; 404 if it can't be opened.
``/api/runs/{run}/events``
    Server-sent events: "status" (as above) and "metrics" (one value for each column) when they have
    changed, "problem" ({error}) while the run can't be read; a comment as a heartbeat.
``/api/compare?a=RUN&b=RUN&only=changed&offset=0&limit=50``
    {total, counts, rows: [{id, group, a, b}], offset, indexed}: rows that have the same id, as
    in the list; ``a`` or ``b`` is null if the run has no such row. ``only`` and ``counts``: changed,
    fixed, broken, all; ``counts`` also has only_a and only_b.
``/api/comparison?a=RUN&b=RUN``
    The dict of ``batchkit report A B --json``.

A report (``batchkit report``) is this page as a file that has these answers inside.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from batchkit.commands.view.page import ASSETS, html
from batchkit.commands.view.runs import Runs
from batchkit.config.masking import masked_text
from batchkit.errors import BatchkitError

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
            Route("/compare", pages.page),
            Route("/assets/{name}", pages.asset),
            Route("/api/runs", api.runs),
            Route("/api/runs/{run}", api.status),
            Route("/api/runs/{run}/metrics", api.metrics),
            Route("/api/runs/{run}/rows", api.rows),
            Route("/api/runs/{run}/rows/{row}", api.row),
            Route("/api/runs/{run}/rows/{row}/images/{n}", api.image),
            Route("/api/runs/{run}/events", api.events),
            Route("/api/runs/{run}/about", api.about),
            Route("/api/compare", api.compare),
            Route("/api/comparison", api.comparison),
        ],
        exception_handlers={
            HTTPException: _on_refused,
            BatchkitError: _on_problem,
            OSError: _on_problem,
        },
    )
    return _guarded(app, host)


class _Pages:
    """The page, which is the same at each address, and what it loads."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs

    def home(self, request: Request) -> Response:
        if self._runs.is_single:
            return RedirectResponse(f"/run/{self._runs.single_key}")
        return self.page(request)

    def run(self, request: Request) -> Response:
        key = request.path_params["run"]
        if key not in self._runs.folders():
            raise HTTPException(404, f"no run {key!r} here; it may have been moved or deleted")
        return self.page(request)

    def page(self, request: Request) -> Response:
        return Response(html(), media_type="text/html")

    def asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in ASSETS:
            raise HTTPException(404, f"no asset {name!r}")
        make, media_type = ASSETS[name]
        return Response(make(), media_type=media_type)


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
