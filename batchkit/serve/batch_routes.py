"""The routes ``/v1/batches``, ``/v1/models`` and ``/metrics``, which counts a key's batches for Prometheus."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import PlainTextResponse, Response

from batchkit.errors import BatchkitError
from batchkit.runs.status import counts_of
from batchkit.serve.batch import UNFINISHED, NewBatch, added_batch, moved
from batchkit.serve.clock import wall_s
from batchkit.serve.problem import ApiProblem, missing
from batchkit.serve.settings import Settings
from batchkit.serve.store import ListPage, Object, Store
from batchkit.storage.runfolder import is_run


def batch_routes(settings: Settings, store: Store) -> APIRouter:
    routes, started = APIRouter(), wall_s()

    @routes.post("/v1/batches")
    def create_batch(request: Request, asked: NewBatch) -> Object:
        owner = request.state.owner
        file = store.found("file", asked.input_file_id, owner)
        if file["purpose"] != "batch":
            text = (
                f"input_file_id: {file['id']} has the purpose {file['purpose']!r}, expected 'batch'"
            )
            raise ApiProblem(400, text, param="input_file_id")
        return added_batch(asked, owner, settings, store)

    @routes.get("/v1/batches")
    def list_batches(
        request: Request,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
    ) -> Object:
        page = store.page("batch", request.state.owner, after=after, limit=limit)
        return page._replace(docs=[_live(batch, settings) for batch in page.docs]).to_json()

    @routes.get("/v1/batches/{batch_id}")
    def retrieve_batch(request: Request, batch_id: str) -> Object:
        return _live(store.found("batch", batch_id, request.state.owner), settings)

    @routes.post("/v1/batches/{batch_id}/cancel")
    def cancel_batch(request: Request, batch_id: str) -> Object:
        batch = store.found("batch", batch_id, request.state.owner)
        now = wall_s()
        changed = store.change(batch_id, lambda doc: moved(doc, "cancelling", now))
        if changed is None:
            batch = store.found("batch", batch_id, request.state.owner)
            if batch["status"] != "cancelling":
                text = f"Cannot cancel a batch with status '{batch['status']}'."
                raise ApiProblem(409, text, code="batch_not_cancellable")
        return _live(changed or batch, settings)

    @routes.get("/v1/models")
    def list_models() -> Object:
        return ListPage([_model(name, started) for name in settings.models], False).to_json()

    @routes.get("/v1/models/{name:path}")
    def retrieve_model(name: str) -> Object:
        if name not in settings.models:
            raise missing("Model", name)
        return _model(name, started)

    @routes.get("/metrics", response_class=PlainTextResponse)
    def metrics(request: Request) -> Response:
        return _metrics(request.state.owner, settings, store)

    return routes


def _live(batch: Object, settings: Settings) -> Object:
    """Return a running batch with the current counts from its run folder; return other batches unchanged."""
    folder = settings.runs / batch["id"]
    if batch["status"] not in ("in_progress", "cancelling", "finalizing") or not is_run(folder):
        return batch
    try:
        found = counts_of(folder).totals
    except BatchkitError:  # the run is just opening its log
        return batch
    total = batch["request_counts"]["total"]
    counts = {"total": total, "completed": found.ok, "failed": found.failed}
    return {**batch, "request_counts": counts}


def _metrics(owner: str, settings: Settings, store: Store) -> Response:
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest

    registry, of_rows = CollectorRegistry(), "Rows of batches that have not ended"
    states = Gauge("batchkit_batches", "Batches by state", ["status"], registry=registry)
    rows = Gauge("batchkit_batch_rows", of_rows, ["state"], registry=registry)
    files = Gauge("batchkit_file_bytes", "Bytes of files", registry=registry)
    for (kind, status), n in store.counts(owner).items():
        if kind == "batch":
            states.labels(status).set(n)
    for stored in store.all("batch", *UNFINISHED, owner=owner):
        counts = _live(stored.doc, settings)["request_counts"]
        left = counts["total"] - counts["completed"] - counts["failed"]
        for state, n in {**counts, "left": left}.items():
            if state != "total":
                rows.labels(state).inc(n)
    files.set(store.bytes_of(owner))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


def _model(name: str, started: int) -> Object:
    return {"id": name, "object": "model", "created": started, "owned_by": "batchkit"}
