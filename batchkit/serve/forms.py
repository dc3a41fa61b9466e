"""Multipart forms with a file, written to disk as they arrive."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from batchkit.serve.problem import ApiProblem

if TYPE_CHECKING:
    from fastapi import Request

_MOST_FIELDS, _MOST_FIELD_BYTES = 32, 64 * 1024


def described(file: str, **fields: Any) -> dict[str, Any]:
    """Return the OpenAPI description of a form with the file field ``file`` and the required ``fields``, given as
    schemas."""
    parts = {file: {"type": "string", "format": "binary"}, **fields}
    schema = {"type": "object", "required": [*parts], "properties": parts}
    content = {"multipart/form-data": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}


class Form:
    """A received form. ``path``: the temporary file with the uploaded content; None if the form had no file."""

    def __init__(self) -> None:
        self.fields: dict[str, str] = {}
        self.path: Path | None = None
        self.filename = ""

    def file(self, name: str) -> Path:
        """Return the path of the form's uploaded file. Raise ApiProblem if there is none. ``name``: the field that the
        error names."""
        if self.path is None:
            raise ApiProblem(
                400, f"{name}: the form has no file; send one in this field", param=name
            )
        return self.path

    def required(self, name: str) -> str:
        if not (found := self.fields.get(name)):
            raise ApiProblem(400, f"Missing required parameter: '{name}'.", param=name)
        return found


@asynccontextmanager
async def received(request: Request, folder: Path) -> AsyncIterator[Form]:
    """Receive the form of a request, and write its uploaded file to ``folder``. At the end of the block, the file is
    removed unless the caller has moved it.

    Raises:
        ApiProblem: The body is not a form with one file.
    """
    from python_multipart import create_form_parser
    from python_multipart.exceptions import FormParserError

    form, content_type = Form(), request.headers.get("content-type", "")

    def keep(file: Any) -> None:
        if form.path is not None:
            raise ApiProblem(
                400, "the form has several files; send one file per request", param="file"
            )
        if file.in_memory:
            file.flush_to_disk()
        file.close()
        form.path, form.filename = Path(os.fsdecode(file.actual_file_name)), _text(file.file_name)

    def note(field: Any) -> None:
        form.fields[_text(field.field_name)] = _text(field.value)

    if not content_type.lower().startswith("multipart/form-data"):
        raise ApiProblem(400, "expected a form with a file: content-type: multipart/form-data")
    # In the server's folder, so that the caller can move the file into place by rename.
    with TemporaryDirectory(dir=folder) as own:
        config = {
            "UPLOAD_DIR": own,
            "UPLOAD_DELETE_TMP": False,
            "MAX_FIELDS": _MOST_FIELDS,
            "MAX_FIELD_SIZE": _MOST_FIELD_BYTES,
        }
        try:
            headers: Any = {"Content-Type": content_type.encode()}
            parser = create_form_parser(headers, note, keep, config=config)
            async for chunk in request.stream():
                if chunk:
                    parser.write(chunk)
            parser.finalize()
        except (FormParserError, ValueError) as error:
            raise ApiProblem(400, f"the body is not a form with a file: {error}") from error
        yield form


def _text(value: bytes | None) -> str:
    return (value or b"").decode(errors="replace")
