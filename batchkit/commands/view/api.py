"""What ``/api/`` answers; ``server.py`` says what each address means."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from functools import lru_cache
from math import ceil, isfinite
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from batchkit.commands.view.detail import Details
from batchkit.commands.view.overview import Figures, about, figures_of, overview
from batchkit.commands.view.pairs import ONLY, Pairs, page_of, pairs_of
from batchkit.commands.view.rows import OUTCOMES, SORTS, Query, Side, labels_of
from batchkit.commands.view.runs import Runs
from batchkit.commands.view.search import Search
from batchkit.commands.view.timeline import newest_point, timeline
from batchkit.config.masking import masked_text
from batchkit.errors import BatchkitError, MediaError
from batchkit.runs.columns import Table
from batchkit.runs.compare import compare
from batchkit.runs.index import Index, Indexes, Snapshot
from batchkit.runs.pairs import have_same_input
from batchkit.storage.job_toml import job_of_run
from batchkit.storage.manifest import read_manifest
from batchkit.storage.metrics import read_metrics
from batchkit.storage.plain_json import encoded

_MOST_ROWS, _MOST_POINTS = 500, 10_000
_KEPT = 4  # runs whose figures are held, with the arrays that they are of
_GROW_S = 0.5  # a request lets the index grow so long
_SEARCH_S = 1.5
_SEARCHES = 6  # that are kept
_END_WITHIN_S = 0.1
_EVERY_S = 1.0  # between events; five times as long as it takes to look, if that is more
_AT_LEAST_EVERY_S = 4.0


class Api:
    """The handlers. Starlette calls those that are not ``async`` in threads."""

    def __init__(self, runs: Runs, is_ending: Callable[[], bool]) -> None:
        self._runs, self._is_ending = runs, is_ending
        self._indexes, self._details = Indexes(), Details()
        self._search = lru_cache(_SEARCHES)(Search)  # goes on where the last request stopped
        self._figures: dict[Path, tuple[Snapshot, Figures]] = {}
        self._pairs: tuple[Snapshot, Snapshot, Pairs] | None = None  # of the last comparison

    def runs(self, request: Request) -> Response:
        return _json([*self._runs.listed()])

    def status(self, request: Request) -> Response:
        return _json(self._status(self._folder(request)))

    def about(self, request: Request) -> Response:
        return _json(about(self._folder(request)))

    def metrics(self, request: Request) -> Response:
        points = max(2, _whole(request, "points", 600, _MOST_POINTS))
        return _json(timeline(read_metrics(self._folder(request)), points))

    def rows(self, request: Request) -> Response:
        offset = _whole(request, "offset", 0, 2**32)
        limit = _whole(request, "limit", 50, _MOST_ROWS)
        query = _query(request)
        side = self._side(self._folder(request))
        index, snapshot = side.index, side.snapshot
        share, has_words = snapshot.share, None
        if query.text:
            has_words, searched = self._search(index, query.text).advance(snapshot, _SEARCH_S)
            share = min(share, searched)
        found = query.rows(snapshot, has_words)
        page = found[offset : offset + limit]
        is_last = offset + limit >= len(found)
        return _json(
            {
                "total": None if query.text and share < 1 else len(found),
                "offset": offset,
                "rows": [side.row(number) for number in page.tolist()],
                "indexed": share,
                "next": None if is_last else offset + limit,
            }
        )

    def row(self, request: Request) -> Response:
        index, entries = self._entries(request)
        return _json(self._details.row(index, entries, request.url.path))

    def image(self, request: Request) -> Response:
        index, entries = self._entries(request)
        try:
            content = self._details.image(index, entries[-1], _number(request, "n"))
        except MediaError as error:
            raise HTTPException(404, masked_text(str(error))) from None
        return Response(content, media_type="image/webp")

    async def events(self, request: Request) -> Response:
        key = request.path_params["run"]
        await run_in_threadpool(self._folder, request)  # 404 at once
        return StreamingResponse(self._events(key), media_type="text/event-stream")

    def compare(self, request: Request) -> Response:
        offset = _whole(request, "offset", 0, 2**32)
        limit = _whole(request, "limit", 50, _MOST_ROWS)
        only = _one_of(request, "only", ONLY) or "changed"
        keys = [request.query_params.get(name, "") for name in ("a", "b")]
        a, b = (self._side(self._found(key)) for key in keys)
        known = self._pairs
        if known is None or known[0] is not a.snapshot or known[1] is not b.snapshot:
            by_place = have_same_input(*(read_manifest(side.index.folder) for side in (a, b)))
            known = a.snapshot, b.snapshot, pairs_of(a.snapshot, b.snapshot, by_place=by_place)
            self._pairs = known
        pairs = known[2]
        counts = pairs.counts()
        return _json(
            {
                "total": counts[only],
                "counts": counts,
                "rows": page_of(pairs, only, offset, limit, a, b),
                "offset": offset,
                "indexed": min(a.snapshot.share, b.snapshot.share),
            }
        )

    def comparison(self, request: Request) -> Response:
        keys = [request.query_params.get(name, "") for name in ("a", "b")]
        return _json(compare([*map(self._found, keys)]).to_json())

    def _folder(self, request: Request) -> Path:
        return self._found(request.path_params["run"])

    def _found(self, key: str) -> Path:
        try:
            return self._runs.folder(key)
        except KeyError:
            raise HTTPException(
                404, f"no run {key!r} here; it may have been moved or deleted"
            ) from None

    def _entries(self, request: Request) -> tuple[Index, Table]:
        """Those of one row, the newest last."""
        row = _number(request, "row")
        index, snapshot = self._grown(self._folder(request))
        entries = snapshot.entries[snapshot.entries["row"] == row]
        if not len(entries):
            raise HTTPException(404, f"row {row} has no record")
        return index, entries

    def _grown(self, folder: Path) -> tuple[Index, Snapshot]:
        index = self._indexes.of(folder)
        return index, index.grow(_GROW_S)

    def _side(self, folder: Path) -> Side:
        return Side(*self._grown(folder), labels_of(job_of_run(folder)))

    def _status(self, folder: Path) -> dict[str, Any]:
        look, (index, snapshot) = self._runs.look(folder), self._grown(folder)
        known = self._figures.get(folder)
        if known is None or known[0] is not snapshot:
            if len(self._figures) >= _KEPT:
                self._figures.clear()
            known = self._figures[folder] = snapshot, figures_of(snapshot, index.group_by)
        return overview(look, index, snapshot, known[1])

    async def _events(self, key: str) -> AsyncIterator[bytes]:
        """Until the client goes: then Starlette cancels it; or until the server does."""
        sent: dict[str, bytes] = {}
        while True:
            began = time.monotonic()
            news = await run_in_threadpool(self._news, key)
            changed = {name: data for name, data in news.items() if sent.get(name) != data}
            sent = news  # after a problem, all of it again
            for name, data in changed.items():
                yield b"event: %b\ndata: %b\n" % (name.encode(), data)  # data ends in a newline
            if not changed:
                yield b": still here\n\n"
            pause_s = min(max(_EVERY_S, 5 * (time.monotonic() - began)), _AT_LEAST_EVERY_S)
            for _ in range(ceil(pause_s / _END_WITHIN_S)):
                if self._is_ending():
                    return
                await asyncio.sleep(_END_WITHIN_S)

    def _news(self, key: str) -> dict[str, bytes]:
        """The newest events by name."""
        try:
            folder = self._found(key)
            point = newest_point(read_metrics(folder))
            news = {"status": self._status(folder), **({"metrics": point} if point else {})}
        except (HTTPException, BatchkitError, OSError) as error:
            text = error.detail if isinstance(error, HTTPException) else str(error)
            news = {"problem": {"error": masked_text(text)}}
        return {name: encoded(value) for name, value in news.items()}


def _json(value: Any) -> Response:
    return Response(encoded(value), media_type="application/json")


def _query(request: Request) -> Query:
    given = request.query_params
    query = Query(
        status=_one_of(request, "status", OUTCOMES),
        kind=given.get("kind", ""),
        group=given.get("group", ""),
        scorer=given.get("scorer", ""),
        least=_score(request, "min"),
        most=_score(request, "max"),
        text=given.get("text", ""),
        sort=_one_of(request, "sort", ("index", "score", *SORTS)) or "index",
        descending=_one_of(request, "order", ("asc", "desc")) == "desc",
    )
    needs_score = query.least is not None or query.most is not None or query.sort == "score"
    if needs_score and not query.scorer:
        raise HTTPException(400, "scorer is missing: min, max and sort=score are about one")
    return query


def _whole(request: Request, name: str, default: int, most: int) -> int:
    text = request.query_params.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 11 and int(text) <= most):
        raise HTTPException(400, f"{name}={text}: expected a whole number of at most {most}")
    return int(text)


def _number(request: Request, name: str) -> int:
    text: str = request.path_params[name]
    if not (text.isascii() and text.isdigit() and len(text) < 11):
        raise HTTPException(404, f"{text!r} is not a number")
    return int(text)


def _score(request: Request, name: str) -> float | None:
    text = request.query_params.get(name, "")
    try:
        found = float(text) if text else None
    except ValueError:
        found = float("nan")
    if found is not None and not isfinite(found):
        raise HTTPException(400, f"{name}={text}: expected a number")
    return found


def _one_of(request: Request, name: str, known: tuple[str, ...]) -> str:
    text = request.query_params.get(name, "")
    if text and text not in known:
        raise HTTPException(400, f"{name}={text}: expected {', '.join(known)}")
    return text
