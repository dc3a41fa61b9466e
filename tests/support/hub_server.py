"""What the Hugging Face hub's client asks for when it pushes, lists and reads a data set, over real HTTP.

Large files go through git LFS, as on the hub without Xet: batch, PUT, commit.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.web import Page, web_server

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer:
    """``created`` is what repositories were created with; ``files`` what was committed, by path; ``is_down``: every
    request fails.

    Only requests with ``token`` are answered; only repositories of ``owner`` may be made.
    """

    def __init__(self, token: str, owner: str) -> None:
        self.token, self.owner = token, owner
        self.created: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self._objects: dict[str, bytes] = {}
        self.url, self.is_down = "", False

    def found(self, path: str) -> tuple[int, Any]:
        """The status and the JSON for a GET of a dataset, or of one of its revisions."""
        name, _, rest = path.removeprefix("/api/datasets/").partition("/tree/")
        if rest:
            return 200, [self._entry(name) for name in self.files]
        name, _, revision = name.partition("/revision/")
        known = [f"{self.owner}/{one['name']}" for one in self.created]
        if name not in known or revision not in ("", "main"):
            return 404, {"error": f"{path}: not found"}
        files = [{"rfilename": path} for path in self.files]
        return 200, {"id": name, "sha": COMMIT, "private": True, "siblings": files}

    def _entry(self, path: str) -> dict[str, Any]:
        content = self.files[path]
        oid = hashlib.sha1(content).hexdigest()
        return {"type": "file", "path": path, "size": len(content), "oid": oid}

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        """The status and the JSON for a POST."""
        if path == "/api/repos/create":
            asked = json.loads(body)
            if asked.get("organization") != self.owner:
                return 403, {"error": "You don't have the rights to create a dataset there"}
            known = any(one["name"] == asked["name"] for one in self.created)
            self.created.append(asked)
            name = f"{self.owner}/{asked['name']}"
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
            self._commit([json.loads(line) for line in body.splitlines() if line])
            name = path.split("/datasets/")[1].split("/commit/")[0]
            url = f"{self.url}/datasets/{name}/commit/{COMMIT}"
            return 200, {"commitUrl": url, "commitOid": COMMIT, "success": True}
        return 404, {"error": f"{path}: not found"}

    def put(self, oid: str, body: bytes) -> None:
        assert hashlib.sha256(body).hexdigest() == oid
        self._objects[oid] = body

    def _commit(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.files[value["path"]] = self._objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del self.files[value["path"]]


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
        path = self.path.partition("?")[0]
        if "/resolve/" not in path:
            status, found = self.server_of.found(path)
            self._say(status, found, **{"X_Error_Code": "RepoNotFound"} if status == 404 else {})
        elif (name := path.partition("/resolve/")[2].partition("/")[2]) in self.server_of.files:
            self._send(self.server_of.files[name])
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

    def _send(self, content: bytes) -> None:
        """Send a file, or the range of it that the request names."""
        oid = hashlib.sha1(content).hexdigest()
        about = {"ETag": f'"{oid}"', "X_Repo_Commit": COMMIT, "Accept_Ranges": "bytes"}
        first, _, last = (self.headers.get("Range") or "").removeprefix("bytes=").partition("-")
        if not first:
            self.reply(200, content, **about, Content_Length=len(content))
            return
        part = content[int(first) : int(last) + 1 if last else None]
        at = f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
        self.reply(206, part, **about, Content_Length=len(part), Content_Range=at)

    def _say(self, status: int, found: Any, **headers: str) -> None:
        body = json.dumps(found).encode()
        about = {**headers, "Content_Type": "application/json"}
        self.reply(status, body, **about, Content_Length=len(body))
