"""What the Hugging Face hub's client asks for when it pushes, lists and reads a data set, over real HTTP.

Large files go through git LFS, as on the hub without Xet: batch, PUT, commit.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote

from tests.support.web import Page, web_server

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer:
    """``created`` is what repositories were created with; ``datasets`` has the files of each by their paths, under its
    name, or under ``NAME@REVISION`` for a revision other than main; ``sent`` counts the bytes that were read of each
    path; ``is_down``: every request fails.

    Only requests with ``token`` are answered; only repositories of ``owner`` may be made.
    """

    def __init__(self, token: str, owner: str) -> None:
        self.token, self.owner = token, owner
        self.created: list[dict[str, Any]] = []
        self.datasets: dict[str, dict[str, bytes]] = {}
        self.sent: Counter[str] = Counter()
        self._objects: dict[str, bytes] = {}
        self.url, self.is_down = "", False

    @property
    def files(self) -> dict[str, bytes]:
        """The files of the one dataset that was created."""
        (name,) = {one["name"] for one in self.created}
        return self.datasets[f"{self.owner}/{name}"]

    def found(self, path: str, query: str) -> tuple[int, Any]:
        """The status and the JSON for a GET of a dataset, of one of its revisions, or of a folder in it."""
        name, _, rest = path.removeprefix("/api/datasets/").partition("/tree/")
        revision, _, folder = rest.partition("/")
        if not rest:
            name, _, revision = name.partition("/revision/")
        files = self.datasets.get(_key(name, revision))
        if files is None:
            return 404, {"error": f"{path}: not found"}
        if rest:
            folder = unquote(folder)
            entries = _entries(files, folder, is_deep="recursive=true" in query.lower())
            return (200, entries) if entries or not folder else (404, {"error": "no such folder"})
        siblings = [{"rfilename": path} for path in files]
        return 200, {"id": name, "sha": COMMIT, "private": True, "siblings": siblings}

    def file(self, path: str) -> bytes | None:
        """The content of the file at ``/datasets/OWNER/NAME/resolve/REVISION/PATH``."""
        name, _, rest = path.removeprefix("/datasets/").partition("/resolve/")
        revision, _, name_in_it = rest.partition("/")
        return self.datasets.get(_key(name, revision), {}).get(unquote(name_in_it))

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        """The status and the JSON for a POST."""
        if path == "/api/repos/create":
            asked = json.loads(body)
            if asked.get("organization") != self.owner:
                return 403, {"error": "You don't have the rights to create a dataset there"}
            known = any(one["name"] == asked["name"] for one in self.created)
            self.created.append(asked)
            name = f"{self.owner}/{asked['name']}"
            self.datasets.setdefault(name, {})
            found = {"url": f"{self.url}/datasets/{name}", "name": name}
            return (409, {"error": "exists", **found}) if known else (200, found)
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if "/preupload/" in path:
            paths = [file["path"] for file in json.loads(body)["files"]]
            modes = {path: "lfs" if path.endswith(".parquet") else "regular" for path in paths}
            files = [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes.items()]
            return 200, {"files": files}
        if path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            for one in objects:
                upload = {"href": f"{self.url}/put/{one['oid']}", "header": {}}
                one["actions"] = {"upload": upload}
            return 200, {"transfer": "basic", "objects": objects}
        if "/commit/" in path:
            name = path.split("/datasets/")[1].split("/commit/")[0]
            self._commit(name, [json.loads(line) for line in body.splitlines() if line])
            url = f"{self.url}/datasets/{name}/commit/{COMMIT}"
            return 200, {"commitUrl": url, "commitOid": COMMIT, "success": True}
        return 404, {"error": f"{path}: not found"}

    def put(self, oid: str, body: bytes) -> None:
        assert hashlib.sha256(body).hexdigest() == oid
        self._objects[oid] = body

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        files = self.datasets[name]
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self._objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]


def _key(name: str, revision: str) -> str:
    return name if revision in ("", "main", COMMIT) else f"{name}@{unquote(revision)}"


def _entries(files: dict[str, bytes], folder: str, *, is_deep: bool) -> list[dict[str, Any]]:
    """The files and folders in ``folder``; with ``is_deep``, also those in its folders."""
    found: dict[str, dict[str, Any]] = {}
    start = f"{folder}/" if folder else ""
    for path, content in sorted(files.items()):
        parts = path.removeprefix(start).split("/") if path.startswith(start) else []
        for n in range(1, len(parts)):
            name = start + "/".join(parts[:n])
            if n == 1 or is_deep:
                found[name] = {"type": "directory", "path": name, "size": 0, "oid": COMMIT}
        if len(parts) == 1 or (parts and is_deep):
            oid = hashlib.sha1(content).hexdigest()
            found[path] = {"type": "file", "path": path, "size": len(content), "oid": oid}
    return [*found.values()]


@contextmanager
def hub(token: str = "hf_" + "x" * 30, owner: str = "me") -> Iterator[HubServer]:
    server = HubServer(token, owner)
    with web_server(type("Handler", (_Handler,), {"server_of": server})) as server.url:
        yield server


class _Handler(Page):
    protocol_version = "HTTP/1.1"
    server_of: HubServer

    def do_GET(self) -> None:
        if not self._is_allowed():
            return
        path, _, query = self.path.partition("?")
        if "/resolve/" not in path:
            status, found = self.server_of.found(path, query)
            missing = "EntryNotFound" if "/tree/" in path else "RepoNotFound"
            self._say(status, found, **{"X_Error_Code": missing} if status == 404 else {})
        elif (content := self.server_of.file(path)) is not None:
            self._send(path, content)
        else:
            self._say(404, {"error": f"{path}: not found"}, X_Error_Code="EntryNotFound")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self._sent()
        if self._is_allowed():
            self._say(*self.server_of.answer(self.path.partition("?")[0], body))

    def do_PUT(self) -> None:
        self.server_of.put(self.path.rpartition("/")[2], self._sent())
        self._say(200, {})

    def _is_allowed(self) -> bool:
        if self.server_of.is_down:
            self._say(503, {"error": "down"})
            return False
        if allowed := self.headers.get("Authorization") == f"Bearer {self.server_of.token}":
            return allowed
        self._say(401, {"error": "Invalid username or password."})
        return allowed

    def _sent(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _send(self, path: str, content: bytes) -> None:
        """Send a file, or the range of it that the request names."""
        oid = hashlib.sha1(content).hexdigest()
        about = {"ETag": f'"{oid}"', "X_Repo_Commit": COMMIT, "Accept_Ranges": "bytes"}
        first, _, last = (self.headers.get("Range") or "").removeprefix("bytes=").partition("-")
        if not first:
            self._count(path, content)
            self.reply(200, content, **about, Content_Length=len(content))
            return
        part = content[int(first) : int(last) + 1 if last else None]
        self._count(path, part)
        at = f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
        self.reply(206, part, **about, Content_Length=len(part), Content_Range=at)

    def _count(self, path: str, content: bytes) -> None:
        if self.command == "GET":
            name = unquote(path.rpartition("/resolve/")[2].partition("/")[2])
            self.server_of.sent[name] += len(content)

    def _say(self, status: int, found: Any, **headers: str) -> None:
        body = json.dumps(found).encode()
        about = {**headers, "Content_Type": "application/json"}
        self.reply(status, body, **about, Content_Length=len(body))
