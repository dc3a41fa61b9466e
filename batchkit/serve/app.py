"""The web application: routes, error responses, and access checks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from batchkit import __version__
from batchkit.config.masking import masked_text
from batchkit.errors import BatchkitError
from batchkit.serve.guard import Guard, is_page
from batchkit.serve.problem import ApiProblem
from batchkit.serve.settings import Settings
from batchkit.serve.store import Store

if TYPE_CHECKING:
    from fastapi import Request
    from fastapi.responses import JSONResponse
    from starlette.types import ASGIApp, Receive, Scope, Send


def make_app(settings: Settings, store: Store) -> ASGIApp:
    """Return the ASGI application: the API, and the pages of ``batchkit view``, which show only the runs of the
    request's API key. Every error response has OpenAI's format."""
    from fastapi import FastAPI
    from fastapi.exceptions import RequestValidationError
    from starlette.exceptions import HTTPException

    from batchkit.commands.view.server import refusal_of
    from batchkit.serve.batch_routes import batch_routes
    from batchkit.serve.file_routes import file_routes, upload_routes
    from batchkit.serve.flex_routes import flex_routes

    app = FastAPI(
        title="batchkit serve",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        responses={"4XX": {"description": "An error as OpenAI's API has it"}},
    )
    app.include_router(file_routes(settings, store))
    app.include_router(upload_routes(settings, store))
    app.include_router(batch_routes(settings, store))
    app.include_router(flex_routes(settings, store))
    app.add_api_route("/health", lambda: {"status": "ok"}, methods=["GET"])
    for kind, answer in {
        ApiProblem: _on_problem,
        RequestValidationError: _on_invalid,
        HTTPException: _on_http,
        BatchkitError: _on_trouble,
        OSError: _on_trouble,
        Exception: _on_trouble,
    }.items():
        app.add_exception_handler(kind, answer)
    return Guard(
        _with_pages(app, settings, store),
        settings.keys,
        lambda named: refusal_of(named, settings.host),
        settings.max_file_bytes,
    )


def _with_pages(app: ASGIApp, settings: Settings, store: Store) -> ASGIApp:
    from batchkit.commands.view.server import make_app as make_view
    from batchkit.runs.listing import Runs

    def view_of(owner: str) -> ASGIApp:
        media = (settings.media_of(owner).resolve(),)
        named = partial(store.names, "batch", owner)
        return make_view(Runs(settings.runs.resolve(), False, media, named), None)

    views = {owner: view_of(owner) for owner in settings.owners}

    async def routed(scope: Scope, receive: Receive, send: Send) -> None:
        is_for_view = is_page(scope.get("path", ""))
        await (views[scope["state"]["owner"]] if is_for_view else app)(scope, receive, send)

    return routed


def _answer(problem: ApiProblem) -> JSONResponse:
    from fastapi.responses import JSONResponse

    return JSONResponse(problem.to_json(), problem.status)


def _on_problem(request: Request, error: Any) -> JSONResponse:
    return _answer(error)


def _on_invalid(request: Request, error: Any) -> JSONResponse:
    """Return a 400 response that names the first invalid parameter or field of the body."""
    first, content_type = error.errors()[0], request.headers.get("content-type", "")
    if first["loc"] == ("body",) and "json" not in content_type:
        text = f"the body's content type is {content_type or 'missing'}; send the header content-type: application/json"
        return _answer(ApiProblem(400, text))
    param = ".".join(str(part) for part in first["loc"][1:])
    text = first["msg"].removeprefix("Value error, ")
    code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
    return _answer(
        ApiProblem(400, f"{param}: {text}" if param else text, param=param or None, code=code)
    )


def _on_http(request: Request, error: Any) -> JSONResponse:
    path = request.url.path
    text = f"{error.detail}: {request.method} {path}"
    if error.status_code == 404 and not path.startswith("/v1/"):
        text += "; the API is below /v1: add /v1 to base_url"
    return _answer(ApiProblem(error.status_code, text))


def _on_trouble(request: Request, error: Any) -> JSONResponse:
    return _answer(
        ApiProblem(500, masked_text(f"the server failed to process the request: {error}"))
    )
