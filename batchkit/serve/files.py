"""The stored contents of uploaded and generated files.

The content of a file is complete and synced to disk before the database refers to it.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, get_args

from batchkit.serve.batch import outputs_of
from batchkit.serve.clock import wall_s
from batchkit.serve.forms import Form
from batchkit.serve.problem import ApiProblem
from batchkit.serve.settings import Settings
from batchkit.serve.store import Kind, Object, Store
from batchkit.storage.files import sync_folder

Purpose = Literal["batch", "assistants", "fine-tune", "vision", "user_data", "evals"]
PURPOSES: tuple[str, ...] = get_args(Purpose)
_FOR_LINES = ("vision", "user_data")
_HOUR_S, _MONTH_S = 3600, 2_592_000
KINDS_OF_FILES: tuple[Kind, ...] = ("file", "part")


def file_doc(path: Path, *, filename: str, purpose: str, expires_at: int | None) -> Object:
    """Return OpenAI's file object for the content at ``path``, whose name is the file id."""
    return {
        "id": path.name,
        "object": "file",
        "bytes": path.stat().st_size,
        "created_at": wall_s(),
        "filename": filename,
        "purpose": purpose,
        "status": "processed",
        "status_details": None,
        "expires_at": expires_at,
    }


def expiry_in(fields: dict[str, str], settings: Settings, now: int) -> int | None:
    """Return the time at which an uploaded file expires: from the form field ``expires_after[seconds]``, or else the
    server's default."""
    if (given := fields.get("expires_after[seconds]")) is None:
        return settings.expiry(now)
    if not given.isdecimal() or not _HOUR_S <= int(given) <= _MONTH_S:
        text = f"expires_after[seconds]: found {given!r}, expected {_HOUR_S} to {_MONTH_S}"
        raise ApiProblem(400, text, param="expires_after")
    return now + int(given)


def kept_file(form: Form, owner: str, settings: Settings, store: Store) -> Object:
    """Store the file of an upload form, and return its file object.

    Raises:
        ApiProblem: The form has no file, or a parameter is wrong.
    """
    if (purpose := form.required("purpose")) not in PURPOSES:
        text = f"purpose: found {purpose!r}, expected one of {', '.join(PURPOSES)}"
        raise ApiProblem(400, text, param="purpose")
    incoming = form.file("file")
    expires_at = expiry_in(form.fields, settings, wall_s())
    path = take_in(incoming, settings, "file")
    link(path, purpose, settings.media_of(owner))
    named = form.filename or "file"
    file = file_doc(path, filename=named, purpose=purpose, expires_at=expires_at)
    add_stored(store, settings, "file", owner, file)
    return file


def add_stored(store: Store, settings: Settings, kind: Kind, owner: str, doc: Object) -> None:
    """Add an object whose content is already stored to the database.

    If the key's storage limit is reached, remove the content and raise ApiProblem.
    """
    with room_for(doc["id"], doc["bytes"], owner, settings, store):
        store.add(kind, owner, doc)


@contextmanager
def room_for(
    name: str, n_bytes: int, owner: str, settings: Settings, store: Store
) -> Iterator[None]:
    """Check that ``n_bytes`` more fit into the owner's storage limit, and hold the store's lock while the caller
    writes.

    If they don't fit, or if the block raises ApiProblem, remove the content called ``name``.
    """
    most = settings.limits_of(owner).bytes
    try:
        with store.lock:
            if (taken := store.bytes_of(owner)) + n_bytes > most:
                text = f"{n_bytes:,} bytes don't fit: your files use {taken:,} of {most:,} bytes; delete some files"
                raise ApiProblem(429, text, code="storage_limit_exceeded")
            yield
    except ApiProblem:
        remove_file(store, settings, name)
        raise


def new_id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(16)}"


def take_in(incoming: Path, settings: Settings, kind: str) -> Path:
    """Sync an uploaded file to disk, move it to the folder of contents under a new id, and return its path."""
    path = settings.files / new_id(kind)
    with incoming.open("rb") as file:
        os.fsync(file.fileno())
    incoming.replace(path)
    sync_folder(path.parent)
    return path


def link(path: Path, purpose: str, folder: Path) -> None:
    """Link a stored file into ``folder`` if its ``purpose`` is one for request lines. Request lines may open the files
    in ``folder`` by id."""
    if purpose in _FOR_LINES:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / path.name).hardlink_to(path)


def remove_file(store: Store, settings: Settings, *names: str) -> None:
    """Remove files from the database, then from disk. If the server crashes between the two, ``remove_unknown`` removes
    the contents at the next start."""
    store.remove(*names)
    for name in names:
        for path in (settings.files / name, *settings.media.glob(f"*/{name}")):
            path.unlink(missing_ok=True)


def remove_unknown(store: Store, settings: Settings) -> None:
    """Remove contents that are not in the database. A killed server may leave them; no client knows their ids."""
    shutil.rmtree(settings.incoming)
    settings.incoming.mkdir()
    known = {stored.doc["id"] for kind in KINDS_OF_FILES for stored in store.all(kind)}
    for stored in store.all("batch", "finalizing", "cancelling"):
        known |= {*outputs_of(stored.doc)}
    for path in [*settings.files.iterdir(), *settings.media.glob("*/*")]:
        if path.name not in known:
            path.unlink()


def parts_of(store: Store, upload: str, owner: str | None = None) -> dict[str, Object]:
    found = store.all("part", owner=owner)
    return {one.doc["id"]: one.doc for one in found if one.doc["upload_id"] == upload}
