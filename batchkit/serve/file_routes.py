"""``/v1/files``."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse

from batchkit.serve.batch import UNFINISHED
from batchkit.serve.files import PURPOSES, found_file, kept_file, remove_file
from batchkit.serve.forms import described, received
from batchkit.serve.problem import Problem
from batchkit.serve.settings import Settings
from batchkit.serve.store import Object, Store


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
        return found_file(store, file_id, request.state.owner)

    @routes.get(
        "/v1/files/{file_id}/content",
        response_class=FileResponse,
        responses={200: {"content": {"application/octet-stream": {}}}},
    )
    def file_content(request: Request, file_id: str) -> FileResponse:
        file = found_file(store, file_id, request.state.owner)
        path = settings.files / file["id"]
        return FileResponse(path, media_type="application/octet-stream", filename=file["filename"])

    @routes.delete("/v1/files/{file_id}")
    def delete_file(request: Request, file_id: str) -> Object:
        file = found_file(store, file_id, request.state.owner)
        for stored in store.all("batch", *UNFINISHED, owner=request.state.owner):
            if stored.doc["input_file_id"] == file_id:
                raise Problem(
                    409,
                    f"{file_id} is the input of {stored.doc['id']}, which has not ended: cancel it first",
                )
        remove_file(store, settings, file["id"])
        return {"id": file["id"], "object": "file", "deleted": True}

    return routes
