"""The handlers of the addresses below ``/api/``; ``server.py`` documents each address."""

from __future__ import annotations

import time
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, TypeVar

import numpy as np
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from batchkit.commands.view.detail import RowMedia, beside_answers, row_of
from batchkit.commands.view.figures import RUNS_KEPT, figures_of
from batchkit.commands.view.overview import about, newest_point, overview, timeline
from batchkit.commands.view.pairs import PairsQuery, page_of, pairs_of
from batchkit.commands.view.rows import ComparedRun, Query, Rows, labels_of
from batchkit.errors import BatchkitError
from batchkit.runs.compare import compare, compare_values, have_same_input
from batchkit.runs.index import Index, Snapshot, Table, stamp_of
from batchkit.runs.listing import Runs, look_at
from batchkit.runs.reach import Reach
from batchkit.runs.scores import table_of_index
from batchkit.scoring.metrics import ScoreTable, head
from batchkit.storage.job_toml import job_of_run
from batchkit.storage.log import RESULTS, log_of
from batchkit.storage.metrics import read_metrics
from batchkit.storage.plain_json import encoded
from batchkit.storage.score_store import SCORES
from batchkit.storage.starts import current_manifest

_GROW_S = 0.5  # maximum time that a request extends the index

Asked = TypeVar("Asked", bound=BaseModel)


class Mean(NamedTuple):
    """The mean of a run's first scorer, or None if the run has no scores. ``stamps``: values that change if the files
    change from which the mean was computed."""

    stamps: tuple[Any, ...]
    score: dict[str, Any] | None


class Api:
    """The handlers of ``/api/`` requests. Starlette calls them in several threads."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._indexes: dict[Path, Index] = {}
        self._lock = Lock()  # guards the table of indexes against concurrent requests
        # Computed from all rows, which takes time.
        self._tables = lru_cache(RUNS_KEPT)(table_of_index)
        self._pairs = lru_cache(1)(pairs_of)
        self._means: dict[Path, Mean] = {}

    def runs(self, request: Request) -> Response:
        until = time.monotonic() + _GROW_S
        listed = [*self._runs.listed()]
        return _json([run | {"score": self._mean(Path(run["folder"]), until)} for run in listed])

    def status(self, request: Request) -> Response:
        folder = self._folder(request)
        look, (index, snapshot) = look_at(folder), self._grown(folder)
        found = overview(
            look,
            figures_of(index, snapshot),
            self._tables(snapshot, index.group_by),
            problem=index.problem,
            indexed=snapshot.share,
        )
        return _json({**found, "newest": newest_point(read_metrics(folder))})

    def about(self, request: Request) -> Response:
        folder = self._folder(request)
        return _json(about(folder, Reach.of(folder, self._runs.media)))

    def values(self, request: Request) -> Response:
        found = compare_values(self._folder(request))
        return _json(found and found.to_json())

    def metrics(self, request: Request) -> Response:
        return _json(timeline(read_metrics(self._folder(request))))

    def rows(self, request: Request) -> Response:
        query = _query_of(Query, request)
        side = self._side(self._folder(request))
        found = query.rows(side.index, side.snapshot)
        end = query.offset + query.limit
        return _json(
            {
                "total": len(found),
                "offset": query.offset,
                "rows": [side.row(number) for number in found[query.offset : end].tolist()],
                "indexed": side.snapshot.share,
                "has_images": side.labels.has_images,
                "next": None if end >= len(found) else end,
            }
        )

    def prompts(self, request: Request) -> Response:
        index, snapshot = self._grown(self._folder(request))
        rows = snapshot.entries["row"][snapshot.newest]
        chosen = snapshot.newest[np.isin(rows, _query_of(Rows, request).indexes)]
        return _json(dict(beside_answers(index, snapshot.entries[chosen], self._runs.media)))

    def row(self, request: Request) -> Response:
        index, entries = self._entries(request)
        return _json(row_of(index, entries, request.url.path, self._runs.media))

    def image(self, request: Request) -> Response:
        content = self._media(request).image(request.path_params["n"])
        return Response(content, media_type="image/webp")

    def poster(self, request: Request) -> Response:
        content = self._media(request).poster(request.path_params["n"])
        return Response(content, media_type="image/webp")

    def clip(self, request: Request) -> Response:
        clip = self._media(request).clip(request.path_params["n"])
        status, content, headers = clip.answer(request.headers.get("range"))
        return Response(content, status, headers, media_type=clip.type)

    def _media(self, request: Request) -> RowMedia:
        index, entries = self._entries(request)
        return RowMedia.of(index, entries[-1], self._runs.media)

    def compare(self, request: Request) -> Response:
        query = _query_of(PairsQuery, request)
        a, b = (self._side(self._found(key)) for key in (query.a, query.b))
        by_place = have_same_input(*(current_manifest(side.index.folder) for side in (a, b)))
        pairs = self._pairs(a.snapshot, b.snapshot, by_place=by_place)
        counts = pairs.counts()
        return _json(
            {
                "total": counts[query.only],
                "counts": counts,
                "rows": page_of(pairs, query, a, b),
                "offset": query.offset,
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
            return self._runs.folders()[key]
        except KeyError:
            raise HTTPException(
                404, f"no run {key!r} here; it may have been moved or deleted"
            ) from None

    def _entries(self, request: Request) -> tuple[Index, Table]:
        """Return the run's index, and the entries of all records of the requested row, the newest last."""
        row = request.path_params["row"]
        index, snapshot = self._grown(self._folder(request))
        entries = snapshot.entries[snapshot.entries["row"] == row]
        if not len(entries):
            raise HTTPException(404, f"row {row} has no record")
        return index, entries

    def _mean(self, folder: Path, until: float) -> dict[str, Any] | None:
        """Return the mean of the run's first score. If the time ``until`` has passed, or the log is not indexed yet,
        return the previous value."""
        stamps = tuple(stamp_of(folder / name) for name in (RESULTS, SCORES))
        known = self._means.get(folder, Mean((), None))
        if known.stamps == stamps or time.monotonic() > until:
            return known.score
        with suppress(BatchkitError, OSError):
            job, found = job_of_run(folder), None
            if job.scoring.is_on or stamps[1]:
                _, snapshot = self._grown(folder)
                if snapshot.share < 1:
                    return known.score
                found = _score_of(table_of_index(snapshot, None))
            self._means[folder] = known = Mean(stamps, found)
        return known.score

    def _grown(self, folder: Path) -> tuple[Index, Snapshot]:
        group_by = job_of_run(folder).scoring.group_by
        log_of(folder)  # raises if the log is missing or being replaced
        with self._lock:
            index = self._indexes.pop(folder, None)
            if index is None or not index.is_current(group_by):
                index = Index(folder, group_by)
            self._indexes[folder] = index
            if len(self._indexes) > RUNS_KEPT:
                del self._indexes[next(iter(self._indexes))]  # the least recently used index
        return index, index.grow(_GROW_S)

    def _side(self, folder: Path) -> ComparedRun:
        return ComparedRun(*self._grown(folder), labels_of(Reach.of(folder, self._runs.media)))


def _score_of(table: ScoreTable) -> dict[str, Any] | None:
    name = next(iter(table.names), "")
    mean = table.overall.mean(name)
    return None if mean is None else {"name": name, "head": head(name), "mean": mean}


def _json(value: Any) -> Response:
    return Response(encoded(value), media_type="application/json")


def _query_of(kind: type[Asked], request: Request) -> Asked:
    """Return the query parameters of a request as a ``kind``. Empty parameters count as not given."""
    try:
        return kind.model_validate({k: v for k, v in request.query_params.items() if v})
    except ValidationError as error:
        first = error.errors()[0]
        named = "".join(f"{name}={first['input']}: " for name in first["loc"])
        raise HTTPException(400, f"{named}{first['msg']}") from None
