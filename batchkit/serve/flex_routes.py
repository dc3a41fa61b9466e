"""``POST /v1/chat/completions`` for those who can wait: a batch of one row, answered when it has ended."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any, Literal

import orjson
from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict

from batchkit.serve.batch import UNFINISHED, NewBatch, added_batch, moved
from batchkit.serve.clock import wall_s
from batchkit.serve.files import add_stored, file_doc, new_id, take_in
from batchkit.serve.problem import Problem
from batchkit.serve.settings import Settings
from batchkit.serve.store import Object, Store

_ENDPOINT = "/v1/chat/completions"
_LOOK_S = 0.1
_STATUS = {
    **dict.fromkeys(["invalid_request", "prompt_too_long", "media"], 400),
    "batch_failed": 500,
}
_FAILED = 422  # any other row that failed: the SDK would ask again after a 500, and it was tried again here


class FlexRequest(BaseModel):
    model_config = ConfigDict(extra="allow")

    service_tier: Literal["flex"]


def flex_routes(settings: Settings, store: Store) -> APIRouter:
    routes = APIRouter()

    @routes.post(_ENDPOINT)
    async def create_chat_completion(request: Request, asked: FlexRequest) -> Response:
        owner, body = request.state.owner, asked.model_dump()
        name = (await run_in_threadpool(_begun, body, owner, settings, store))["id"]
        while (batch := await run_in_threadpool(store.get, "batch", name)) is not None:
            if batch["status"] not in UNFINISHED:
                return Response(_answer(batch, settings), media_type="application/json")
            if await request.is_disconnected():
                cancel = partial(moved, status="cancelling", now=wall_s())
                await run_in_threadpool(store.change, name, cancel)
                break
            try:
                await asyncio.sleep(_LOOK_S)
            except asyncio.CancelledError:  # it did not end in the time that is left after SIGTERM
                stopping = Problem(503, "The server is stopping; ask again.")
                return JSONResponse(stopping.to_json(), 503)
        return Response(status_code=499)  # nobody reads it

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
    """Raises Problem with what was wrong with the request or the batch."""
    if (answers := batch["output_file_id"]) is not None:
        line = orjson.loads((settings.files / answers).read_bytes())
        own = {"id": f"chatcmpl-{batch['id']}", "service_tier": "flex"}
        return orjson.dumps({**line["response"]["body"], **own})
    if (errors := batch["error_file_id"]) is not None:
        found = orjson.loads((settings.files / errors).read_bytes())["error"]
        status = _STATUS.get(found["code"], _FAILED)
    else:
        found, status = batch["errors"]["data"][0], 400
    raise Problem(
        status,
        found["message"],
        param=(found.get("param") or "").removeprefix("body.") or None,
        code=found["code"],
    )
