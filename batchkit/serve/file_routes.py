"""The routes ``/v1/files`` and ``/v1/uploads`` (a file uploaded in several parts)."""

from __future__ import annotations

import shutil
from functools import partial
from hashlib import file_digest, md5
from pathlib import Path
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse
from pydantic import BaseModel, Field

from batchkit.serve.batch import UNFINISHED
from batchkit.serve.clock import wall_s
from batchkit.serve.files import (
    PURPOSES,
    Purpose,
    add_stored,
    file_doc,
    kept_file,
    link,
    new_id,
    parts_of,
    remove_file,
    room_for,
    take_in,
)
from batchkit.serve.forms import Form, described, received
from batchkit.serve.problem import ApiProblem, missing
from batchkit.serve.settings import Settings
from batchkit.serve.store import Object, Store

_PENDING_S = 3600


def file_routes(settings: Settings, store: Store) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/files", openapi_extra=described("file", purpose={"enum": [*PURPOSES]}))
    async def upload_file(request: Request) -> Object:
        async with received(request, settings.incoming) as form:
            return await run_in_threadpool(kept_file, form, request.state.owner, settings, store)

    @routes.get("/v1/files")
    def list_files(
        request: Request,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
        order: Literal["asc", "desc"] = "desc",
        purpose: str | None = None,
    ) -> Object:
        page = store.page(
            "file",
            request.state.owner,
            after=after,
            limit=limit,
            ascending=order == "asc",
            purpose=purpose,
        )
        return page.to_json()

    @routes.get("/v1/files/{file_id}")
    def retrieve_file(request: Request, file_id: str) -> Object:
        return store.found("file", file_id, request.state.owner)

    @routes.get(
        "/v1/files/{file_id}/content",
        response_class=FileResponse,
        responses={200: {"content": {"application/octet-stream": {}}}},
    )
    def file_content(request: Request, file_id: str) -> FileResponse:
        file = store.found("file", file_id, request.state.owner)
        path = settings.files / file["id"]
        return FileResponse(path, media_type="application/octet-stream", filename=file["filename"])

    @routes.delete("/v1/files/{file_id}")
    def delete_file(request: Request, file_id: str) -> Object:
        file = store.found("file", file_id, request.state.owner)
        for stored in store.all("batch", *UNFINISHED, owner=request.state.owner):
            if stored.doc["input_file_id"] == file_id:
                raise ApiProblem(
                    409,
                    f"{file_id} is the input of {stored.doc['id']}, which has not ended; cancel the batch first",
                )
        remove_file(store, settings, file["id"])
        return {"id": file["id"], "object": "file", "deleted": True}

    return routes


class NewUpload(BaseModel):
    bytes: int = Field(ge=0)
    filename: str = Field(max_length=512)
    mime_type: str
    purpose: Purpose


class EndOfUpload(BaseModel):
    """The body of the request that completes an upload. ``md5``: the checksum of the whole file, in hexadecimal."""

    part_ids: list[str] = Field(max_length=10_000)
    md5: str | None = None


def upload_routes(settings: Settings, store: Store) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/uploads")
    def create_upload(request: Request, asked: NewUpload) -> Object:
        if asked.bytes > settings.max_file_bytes:
            text = f"bytes: found {asked.bytes:,}; this server accepts files of at most {settings.max_file_bytes:,}"
            raise ApiProblem(413, text, param="bytes")
        now = wall_s()
        upload = {
            "id": new_id("upload"),
            "object": "upload",
            "created_at": now,
            "expires_at": now + _PENDING_S,
            "status": "pending",
            "file": None,
            **asked.model_dump(),
        }
        store.add("upload", request.state.owner, upload)
        return upload

    @routes.post("/v1/uploads/{upload_id}/parts", openapi_extra=described("data"))
    async def add_part(request: Request, upload_id: str) -> Object:
        owner = request.state.owner
        await run_in_threadpool(_pending, store, upload_id, owner)
        async with received(request, settings.incoming) as form:
            return await run_in_threadpool(_kept_part, form, upload_id, owner, settings, store)

    @routes.post("/v1/uploads/{upload_id}/complete")
    def complete_upload(request: Request, upload_id: str, asked: EndOfUpload) -> Object:
        owner = request.state.owner
        upload = _pending(store, upload_id, owner)
        known = parts_of(store, upload_id, owner)
        if unknown := [name for name in asked.part_ids if name not in known]:
            raise missing("Part", unknown[0])
        if (size := sum(known[name]["bytes"] for name in asked.part_ids)) != upload["bytes"]:
            text = f"the parts have {size:,} bytes in total, expected {upload['bytes']:,}"
            raise ApiProblem(400, text, param="part_ids")
        parts = [settings.files / name for name in asked.part_ids]
        file = _joined(upload, parts, asked.md5, settings)
        link(settings.files / file["id"], file["purpose"], settings.media_of(owner))
        more = size - sum(part["bytes"] for part in known.values())
        done = {**upload, "status": "completed", "file": file}
        with room_for(file["id"], more, owner, settings, store):
            # Another request may have completed or cancelled the upload meanwhile.
            _pending(store, upload_id, owner)
            store.change(upload_id, lambda doc: done, adding=(file,))
        remove_file(store, settings, *known)
        return done

    @routes.post("/v1/uploads/{upload_id}/cancel")
    def cancel_upload(request: Request, upload_id: str) -> Object:
        upload = _pending(store, upload_id, request.state.owner)
        cancelled = {**upload, "status": "cancelled"}
        store.change(upload_id, lambda doc: cancelled)
        remove_file(store, settings, *parts_of(store, upload_id, request.state.owner))
        return cancelled

    return routes


def _pending(store: Store, name: str, owner: str) -> Object:
    upload = store.found("upload", name, owner)
    if upload["status"] != "pending" or upload["expires_at"] <= wall_s():
        state = upload["status"] if upload["status"] != "pending" else "expired"
        raise ApiProblem(
            409, f"{name} is {state} and accepts no more parts", code="upload_not_pending"
        )
    return upload


def _kept_part(form: Form, upload: str, owner: str, settings: Settings, store: Store) -> Object:
    path = take_in(form.file("data"), settings, "part")
    part = {
        "id": path.name,
        "object": "upload.part",
        "created_at": wall_s(),
        "upload_id": upload,
        "bytes": path.stat().st_size,
    }
    add_stored(store, settings, "part", owner, part)
    return part


def _joined(upload: Object, parts: list[Path], digest: str | None, settings: Settings) -> Object:
    """Join the parts of an upload into one stored file, and return its file object.

    ``digest``: expected MD5 checksum of the file, or None. Raises ApiProblem if it does not match.
    """
    incoming = settings.incoming / new_id("parts")
    try:
        with incoming.open("wb") as file:
            for part in parts:
                with part.open("rb") as source:
                    shutil.copyfileobj(source, file, 1 << 20)
        if digest is not None and _md5(incoming) != digest.lower():
            raise ApiProblem(
                400, "md5 does not match the uploaded parts; upload them again", param="md5"
            )
        path = take_in(incoming, settings, "file")
    except FileNotFoundError:  # another request has completed or cancelled the upload
        raise missing("Part", upload["id"]) from None
    finally:
        incoming.unlink(missing_ok=True)
    named, purpose = upload["filename"], upload["purpose"]
    return file_doc(path, filename=named, purpose=purpose, expires_at=settings.expiry())


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, partial(md5, usedforsecurity=False)).hexdigest()
