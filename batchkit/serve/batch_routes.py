"""The routes ``/v1/batches``, ``/v1/models``, ``/metrics`` and ``POST /v1/chat/completions``.

``/metrics`` counts a key's batches for Prometheus. A chat completion runs as a batch of one row; the response is
sent when the batch has ended.
"""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel, ConfigDict, model_validator

from batchkit.errors import BatchkitError
from batchkit.runs.status import counts_of
from batchkit.serve.batch import UNFINISHED, NewBatch, added_batch, moved
from batchkit.serve.clock import wall_s
from batchkit.serve.files import add_stored, file_doc, new_id, take_in
from batchkit.serve.problem import ApiProblem, missing
from batchkit.serve.settings import Settings
from batchkit.serve.store import ListPage, Object, Store
from batchkit.storage.runfolder import is_run

_ENDPOINT = "/v1/chat/completions"
_LOOK_S = 0.1
_STATUS = {
    **dict.fromkeys(["invalid_request", "prompt_too_long", "media"], 400),
    "batch_failed": 500,
}
_FAILED = 422  # any other failed row: OpenAI's SDK would retry after a 500, but batchkit has already retried the row


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


class FlexRequest(BaseModel):
    model_config = ConfigDict(extra="allow")

    service_tier: Literal["flex"]

    @model_validator(mode="before")
    @classmethod
    def _may_wait(cls, asked: Any) -> Any:
        if isinstance(asked, dict) and asked.get("service_tier") != "flex":
            raise ValueError(
                'this server answers batches: use /v1/batches, or set service_tier = "flex" and wait'
            )
        return asked


def flex_routes(settings: Settings, store: Store) -> APIRouter:
    routes = APIRouter()

    @routes.post(_ENDPOINT)
    async def create_chat_completion(request: Request, asked: FlexRequest) -> Response:
        owner, body = request.state.owner, asked.model_dump()
        try:
            name = (await run_in_threadpool(_begun, body, owner, settings, store))["id"]
            while (batch := await run_in_threadpool(store.get, "batch", name)) is not None:
                if batch["status"] not in UNFINISHED:
                    return Response(_answer(batch, settings), media_type="application/json")
                if await request.is_disconnected():
                    cancel = partial(moved, status="cancelling", now=wall_s())
                    await run_in_threadpool(store.change, name, cancel)
                    break
                await asyncio.sleep(_LOOK_S)
        except asyncio.CancelledError:  # uvicorn's, when its time to shut down is over
            stopping = ApiProblem(503, "The server is stopping; ask again.")
            return JSONResponse(stopping.to_json(), 503)
        return Response(status_code=499)  # the client has disconnected

    return routes


def _begun(body: Any, owner: str, settings: Settings, store: Store) -> Object:
    line = {"custom_id": "flex", "method": "POST", "url": _ENDPOINT, "body": body}
    incoming = settings.incoming / new_id("flex")
    incoming.write_text(json.dumps(line))  # orjson refuses integers beyond 64 bits
    path, expires_at = take_in(incoming, settings, "file"), settings.expiry()
    file = file_doc(path, filename="flex.jsonl", purpose="batch", expires_at=expires_at)
    add_stored(store, settings, "file", owner, file)
    asked = NewBatch(input_file_id=file["id"], endpoint=_ENDPOINT, completion_window="24h")
    return added_batch(asked, owner, settings, store)


def _answer(batch: Object, settings: Settings) -> bytes:
    """Return the response body of a chat completion that ran as ``batch``. Raise ApiProblem if the request or the batch
    failed."""
    if (answers := batch["output_file_id"]) is not None:
        line = orjson.loads((settings.files / answers).read_bytes())
        own = {"id": f"chatcmpl-{batch['id']}", "service_tier": "flex"}
        return orjson.dumps({**line["response"]["body"], **own})
    if (errors := batch["error_file_id"]) is not None:
        found = orjson.loads((settings.files / errors).read_bytes())["error"]
        status = _STATUS.get(found["code"], _FAILED)
    else:
        found, status = batch["errors"]["data"][0], 400
    raise ApiProblem(
        status,
        found["message"],
        param=(found.get("param") or "").removeprefix("body.") or None,
        code=found["code"],
    )
