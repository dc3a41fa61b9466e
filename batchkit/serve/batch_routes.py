"""``/v1/batches``, and ``/v1/models``."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request

from batchkit.serve.batch import NewBatch, added_batch, moved
from batchkit.serve.clock import wall_s
from batchkit.serve.files import found_file
from batchkit.serve.live import live
from batchkit.serve.problem import Problem, missing
from batchkit.serve.settings import Settings
from batchkit.serve.store import Object, Page, Store


def batch_routes(settings: Settings, store: Store) -> APIRouter:
    routes, started = APIRouter(), wall_s()

    @routes.post("/v1/batches")
    def create_batch(request: Request, asked: NewBatch) -> Object:
        owner = request.state.owner
        file = found_file(store, asked.input_file_id, owner)
        if file["purpose"] != "batch":
            text = (
                f"input_file_id: {file['id']} has the purpose {file['purpose']!r}, expected 'batch'"
            )
            raise Problem(400, text, param="input_file_id")
        return added_batch(asked, owner, settings, store)

    @routes.get("/v1/batches")
    def list_batches(
        request: Request,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
    ) -> Object:
        page = store.page("batch", request.state.owner, after=after, limit=limit)
        return page._replace(docs=[live(batch, settings) for batch in page.docs]).to_json()

    @routes.get("/v1/batches/{batch_id}")
    def retrieve_batch(request: Request, batch_id: str) -> Object:
        return live(_found(store, batch_id, request.state.owner), settings)

    @routes.post("/v1/batches/{batch_id}/cancel")
    def cancel_batch(request: Request, batch_id: str) -> Object:
        batch = _found(store, batch_id, request.state.owner)
        now = wall_s()
        changed = store.change(batch_id, lambda doc: moved(doc, "cancelling", now))
        if changed is None:
            batch = _found(store, batch_id, request.state.owner)
            if batch["status"] != "cancelling":
                text = f"Cannot cancel a batch with status '{batch['status']}'."
                raise Problem(409, text, code="batch_not_cancellable")
        return live(changed or batch, settings)

    @routes.get("/v1/models")
    def list_models() -> Object:
        return Page([_model(name, started) for name in settings.models], False).to_json()

    @routes.get("/v1/models/{name:path}")
    def retrieve_model(name: str) -> Object:
        if name not in settings.models:
            raise missing("Model", name)
        return _model(name, started)

    return routes


def _found(store: Store, name: str, owner: str) -> Object:
    if (batch := store.get("batch", name, owner)) is None:
        raise missing("Batch", name)
    return batch


def _model(name: str, started: int) -> Object:
    return {"id": name, "object": "model", "created": started, "owned_by": "batchkit"}
