"""The server of ``batchkit view``: its routes, and what protects them.

Everything is GET. What is not there is 404, what can't be read 409, a wrong parameter 400, each with
{"error": text}. Times are ISO 8601 in UTC, durations in seconds.

``/``
    The list of runs; if one run was asked for, a redirect to its page.
``/run/{run}``, ``/compare?a=RUN&b=RUN``, ``/assets/{name}``
    Pages, and what they load: this folder's CSS and JS, and the ``page.css`` of the report.
``/api/runs``
    [{run, name, folder, state, total, ok, failed, pending, started_at, model, kind}], the newest
    first. ``run`` is the run's key in all URLs; ``state``: running, finished, stopped or "failed to
    start"; ``kind``: the engine's. A run that can't be read has ``error`` instead of the counts.
``/api/runs/{run}``
    The dict of ``batchkit status --json``, and {state, model, kind, started_at, starts: [{number,
    command, started_at, ended_at, exit, host, seconds, engine_restarts, events: [{at, text}],
    workers}]}. ``at`` is null in runs of older versions.
``/api/runs/{run}/rows?offset=0&limit=50``
    {total, offset, rows: [{index, id, status, kind, text, prediction, scores, group, usage,
    latency_s, attempt}], indexed, next}. ``text`` is cut to 500 characters; ``next`` is the offset
    of the next page or null; ``indexed``: the share of the log that is in the index.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from contextlib import closing
from importlib.resources import files
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from batchkit.commands.view.runs import Runs
from batchkit.config.masking import masked_text
from batchkit.errors import BatchkitError
from batchkit.scoring.metrics import group_name
from batchkit.storage.answers import answers_in_words
from batchkit.storage.job_toml import job_of_run
from batchkit.storage.ledger import RESULTS, failure_kind, whole_record
from batchkit.storage.newest import NewestLog

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
_MOST_ROWS = 500
_MOST_TEXT = 500


class _Refused(Exception):
    """A request that gets an error: the status code and what it says."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def make_app(runs: Runs, host: str) -> ASGIApp:
    """The application; ``host`` is the name or address that it listens on."""
    routes = _Routes(runs)
    app = Starlette(
        routes=[
            Route("/", routes.home),
            Route("/run/{run}", routes.run_page),
            Route("/compare", routes.compare_page),
            Route("/assets/{name}", routes.asset),
            Route("/api/runs", routes.runs),
            Route("/api/runs/{run}", routes.status),
            Route("/api/runs/{run}/rows", routes.rows),
        ],
        exception_handlers={
            _Refused: _on_refused,
            BatchkitError: _on_problem,
            404: lambda request, error: _json({"error": f"{request.url.path}: not here"}, 404),
        },
    )
    return _guarded(app, host)


class _Routes:
    """The handlers. Starlette calls those that are not ``async`` in threads."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._assets = _assets()

    def home(self, request: Request) -> Response:
        if self._runs.is_single:
            (key,) = self._runs.folders() or [""]
            if key:
                return RedirectResponse(f"/run/{key}")
        return self._page("runs.html")

    def run_page(self, request: Request) -> Response:
        self._folder(request)
        return self._page("run.html")

    def compare_page(self, request: Request) -> Response:
        return self._page("compare.html")

    def asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._assets or name.endswith(".html"):
            raise _Refused(404, f"no asset {name!r}")
        return self._asset(name)

    def runs(self, request: Request) -> Response:
        return _json([*self._runs.listed()])

    def status(self, request: Request) -> Response:
        look = self._runs.look(self._folder(request))
        return _json({**look.summary(), **look.to_json()})

    def rows(self, request: Request) -> Response:
        folder = self._folder(request)
        offset = _whole(request, "offset", 0, 2**32)
        limit = _whole(request, "limit", 50, _MOST_ROWS)
        group_by = job_of_run(folder).scoring.group_by
        path = folder / RESULTS
        with closing(NewestLog(path)) as log:
            here = slice(offset, offset + limit)
            places = zip(log.starts[here].tolist(), log.ends[here].tolist(), strict=True)
            found = [whole_record(log.view[start:end], path, start) for start, end in places]
            total = len(log.rows)
        shown = [_row(record, group_by) for record in found]
        following = offset + limit if offset + limit < total else None
        page = {"total": total, "offset": offset, "rows": shown, "indexed": 1, "next": following}
        return _json(page)

    def _folder(self, request: Request) -> Any:
        key = request.path_params["run"]
        try:
            return self._runs.folder(key)
        except KeyError:
            raise _Refused(404, f"no run {key!r} here; it may have been moved or deleted") from None

    def _page(self, name: str) -> Response:
        if name not in self._assets:
            raise _Refused(404, f"no page {name!r}")
        return self._asset(name)

    def _asset(self, name: str) -> Response:
        content, media_type = self._assets[name]
        return Response(content, media_type=media_type)


def _row(record: Mapping[str, Any], group_by: str | None) -> dict[str, Any]:
    """What the list shows of a row."""
    answer = answers_in_words(record)[0] or (record.get("error") or {}).get("message") or ""
    return {
        "index": record["index"],
        "id": record["id"],
        "status": record["status"],
        "kind": failure_kind(record),
        "text": answer if len(answer) <= _MOST_TEXT else answer[: _MOST_TEXT - 1] + "…",
        "prediction": record.get("prediction"),
        "scores": record.get("scores"),
        "group": group_name((record.get("fields") or {}).get(group_by)) if group_by else None,
        "usage": record.get("usage"),
        "latency_s": record.get("latency_s"),
        "attempt": record.get("attempt"),
    }


def _whole(request: Request, name: str, default: int, most: int) -> int:
    text = request.query_params.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 11 and int(text) <= most):
        raise _Refused(400, f"{name}={text}: expected a whole number of at most {most}")
    return int(text)


def _assets() -> dict[str, tuple[bytes, str]]:
    """What may be loaded, by name, with its type."""
    commands = files("batchkit") / "commands"
    found = [
        path for path in (commands / "view").iterdir() if path.name.endswith((*_TYPES, ".html"))
    ]
    found.append(commands / "report" / "page.css")
    return {
        path.name: (path.read_bytes(), _TYPES.get(path.name[path.name.rfind(".") :], "text/html"))
        for path in found
    }


def _json(value: Any, status: int = 200) -> Response:
    content = orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)
    return Response(content, status, media_type="application/json")


def _on_refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, _Refused)
    return _json({"error": str(error)}, error.status)


def _on_problem(request: Request, error: Exception) -> Response:
    return _json({"error": masked_text(str(error))}, 409)


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
            text = f"Host {named!r} is not this server's; it is {host!r}, or started with --host"
            await _json({"error": text}, 403)(scope, receive, send_guarded)
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
