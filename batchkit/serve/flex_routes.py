"""The routes ``/v1/chat/completions`` and ``/v1/responses``, for single requests that can wait.

Each request runs as a batch of one row. The response is sent when the batch has ended, or at once for a response with
``background``: its state and its answer are at ``GET /v1/responses/{id}``.
"""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any, Literal

import orjson
from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from batchkit.serve.batch import UNFINISHED, NewBatch, added_batch, moved
from batchkit.serve.clock import wall_s
from batchkit.serve.files import add_stored, file_doc, new_id, take_in
from batchkit.serve.problem import ApiProblem, missing
from batchkit.serve.settings import Settings
from batchkit.serve.store import Object, Store

_CHAT, _RESPONSES = "/v1/chat/completions", "/v1/responses"
_MODEL = "single_request_model"  # a field that only batches of these routes have
_LOOK_S = 0.1
_STATUS = {
    **dict.fromkeys(["invalid_request", "prompt_too_long", "media"], 400),
    "batch_failed": 500,
}
_STATES = {"validating": "queued", "cancelling": "cancelled", "cancelled": "cancelled"}
_FAILED = 422  # any other failed row: OpenAI's SDK would retry after a 500, but batchkit has already retried the row


class FlexRequest(BaseModel):
    """The body of a single request. All other keys are the request's own."""

    model_config = ConfigDict(extra="allow")

    model: str = Field(max_length=4096)  # as long as a path
    service_tier: str | None = None
    background: bool | None = None
    stream: Literal[False] | None = None

    def check_can_wait(self, endpoint: str) -> None:
        """Raise ApiProblem if the client expects the answer at once."""
        if self.service_tier != "flex" and not (self.background and endpoint == _RESPONSES):
            text = (
                'this server answers batches: use /v1/batches, or set service_tier = "flex" and wait'
                " (in /v1/responses also background = true)"
            )
            raise ApiProblem(400, text, code="invalid_value")


def flex_routes(settings: Settings, store: Store) -> APIRouter:
    routes = APIRouter()

    @routes.post(_CHAT)
    async def create_chat_completion(request: Request, asked: FlexRequest) -> Response:
        asked.check_can_wait(_CHAT)
        body = asked.model_dump(exclude_unset=True)
        return await _when_ended(_CHAT, body, request, settings, store)

    @routes.post(_RESPONSES)
    async def create_response(request: Request, asked: FlexRequest) -> Response:
        asked.check_can_wait(_RESPONSES)
        body = asked.model_dump(exclude_unset=True, exclude={"background"})
        if not asked.background:
            return await _when_ended(_RESPONSES, body, request, settings, store)
        owner = request.state.owner
        batch = await run_in_threadpool(_begun, _RESPONSES, body, owner, settings, store)
        return _json(_response(batch, settings))

    @routes.get(f"{_RESPONSES}/{{response_id}}")
    def retrieve_response(request: Request, response_id: str) -> Response:
        return _json(_response(_found(response_id, request.state.owner, store), settings))

    @routes.post(f"{_RESPONSES}/{{response_id}}/cancel")
    def cancel_response(request: Request, response_id: str) -> Response:
        batch = _found(response_id, request.state.owner, store)
        cancel = partial(moved, status="cancelling", now=wall_s())
        return _json(_response(store.change(batch["id"], cancel) or batch, settings))

    return routes


def _begun(endpoint: str, body: Any, owner: str, settings: Settings, store: Store) -> Object:
    line = {"custom_id": "flex", "method": "POST", "url": endpoint, "body": body}
    incoming = settings.incoming / new_id("flex")
    incoming.write_text(json.dumps(line))  # orjson refuses integers beyond 64 bits
    path, expires_at = take_in(incoming, settings, "file"), settings.expiry()
    file = file_doc(path, filename="flex.jsonl", purpose="batch", expires_at=expires_at)
    add_stored(store, settings, "file", owner, file)
    asked = NewBatch(input_file_id=file["id"], endpoint=endpoint, completion_window="24h")
    return added_batch(asked, owner, settings, store, **{_MODEL: body["model"]})


async def _when_ended(
    endpoint: str, body: Any, request: Request, settings: Settings, store: Store
) -> Response:
    """Run a request, and return its answer when its batch has ended. If the client disconnects, cancel the batch."""
    owner = request.state.owner
    try:
        name = (await run_in_threadpool(_begun, endpoint, body, owner, settings, store))["id"]
        while (batch := await run_in_threadpool(store.get, "batch", name)) is not None:
            if batch["status"] not in UNFINISHED:
                return _json(_answer(batch, settings))
            if await request.is_disconnected():
                cancel = partial(moved, status="cancelling", now=wall_s())
                await run_in_threadpool(store.change, name, cancel)
                break
            await asyncio.sleep(_LOOK_S)
    except asyncio.CancelledError:  # uvicorn's, when its time to shut down is over
        stopping = ApiProblem(503, "The server is stopping; ask again.")
        return JSONResponse(stopping.to_json(), 503)
    return Response(status_code=499)  # the client has disconnected


def _json(content: Object) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")


def _answer(batch: Object, settings: Settings) -> Object:
    """Return the response body of a request that ran as ``batch``. Raise ApiProblem if the request or the batch
    failed."""
    if (answers := batch["output_file_id"]) is not None:
        body = _line_in(answers, settings)["response"]["body"]
        name = f"chatcmpl-{batch['id']}" if batch["endpoint"] == _CHAT else _id_of(batch)
        return {**body, "id": name, "service_tier": "flex"}
    if (errors := batch["error_file_id"]) is not None:
        found = _line_in(errors, settings)["error"]
        status = _STATUS.get(found["code"], _FAILED)
    else:
        found, status = batch["errors"]["data"][0], 400
    raise ApiProblem(
        status,
        found["message"],
        param=(found.get("param") or "").removeprefix("body.") or None,
        code=found["code"],
    )


def _line_in(file_id: str, settings: Settings) -> Any:
    """Return the only line of a file. Raise ApiProblem (404) if the file has expired or was deleted."""
    try:
        return json.loads((settings.files / file_id).read_bytes())
    except FileNotFoundError:
        raise missing("File", file_id) from None


def _id_of(batch: Object) -> str:
    return f"resp_{batch['id'].removeprefix('batch_')}"


def _found(response_id: str, owner: str, store: Store) -> Object:
    """Return the batch of a response. Raise ApiProblem (404) if this owner has no such response."""
    batch = store.get("batch", f"batch_{response_id.removeprefix('resp_')}", owner)
    if batch is None or batch["endpoint"] != _RESPONSES or _MODEL not in batch:
        raise missing("Response", response_id)
    return batch


def _response(batch: Object, settings: Settings) -> Object:
    """Return the response object of ``batch`` in its current state."""
    error = None
    try:
        if batch["status"] in ("completed", "expired", "failed"):
            return _answer(batch, settings) | {"background": True}
    except ApiProblem as problem:
        if problem.status == 404:
            raise
        code = "invalid_prompt" if problem.status == 400 else "server_error"
        error = {"code": code, "message": problem.message}
    return {
        "id": _id_of(batch),
        "object": "response",
        "created_at": batch["created_at"],
        "model": batch[_MODEL],
        "status": "failed" if error else _STATES.get(batch["status"], "in_progress"),
        "background": True,
        "service_tier": "flex",
        "error": error,
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }
