"""The database of a server: the file, upload and batch objects of the API, and webhook events that are not sent yet."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import orjson

from batchkit.errors import StoreError
from batchkit.serve.problem import missing

Kind = Literal["file", "upload", "part", "batch", "event"]
Object = dict[str, Any]

_VERSION = 1
_SCHEMA = """
CREATE TABLE objects (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL,
    owner TEXT NOT NULL,
    doc TEXT NOT NULL,
    status TEXT AS (json_extract(doc, '$.status')),
    expires_at INTEGER AS (json_extract(doc, '$.expires_at'))
);
CREATE INDEX by_owner ON objects (kind, owner, seq);
CREATE INDEX by_status ON objects (kind, status);
"""


class Stored(NamedTuple):
    """An object of the API, and the name of the key that owns it ("" if the server has no keys)."""

    owner: str
    doc: Object


class ListPage(NamedTuple):
    docs: list[Object]
    has_more: bool

    def to_json(self) -> Object:
        """Return the page in the format of OpenAI's lists."""
        ends = (self.docs[0]["id"], self.docs[-1]["id"]) if self.docs else (None, None)
        return {
            "object": "list",
            "data": self.docs,
            "first_id": ends[0],
            "last_id": ends[1],
            "has_more": self.has_more,
        }


class Store:
    """A SQLite file of API objects, each stored as JSON, in order of creation.

    The server's threads share one connection. A thread that holds ``lock`` can read and then write without a write
    of another thread in between. When a call returns, its data is on disk.

    Raises:
        StoreError: The file is damaged or from another version of batchkit.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.lock = threading.RLock()  # shared by request handlers, the runner and the lifecycle
        self.changed = threading.Event()
        """An event that is set when the database has changed. The lifecycle waits for it and clears it."""
        try:
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._prepare(path)
        except sqlite3.DatabaseError as error:
            raise StoreError(
                f"{path}: can't be opened as a database: {error}; restore it from a backup, or choose another folder"
            ) from error

    def _prepare(self, path: Path) -> None:
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version not in (0, _VERSION):
            raise StoreError(
                f"{path}: is from another version of batchkit (schema {version}, expected {_VERSION}); install the"
                " version that created it"
            )
        if version == 0:
            self._db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {_VERSION}; COMMIT;")

    def close(self) -> None:
        with self.lock:
            self._db.close()

    def add(self, kind: Kind, owner: str, *docs: Object) -> None:
        with self._transaction() as db:
            for doc in docs:
                _put(db, kind, owner, doc)

    def change(
        self,
        name: str,
        change: Callable[[Object], Object | None],
        *,
        adding: tuple[Object, ...] = (),
    ) -> Object | None:
        """Replace the object called ``name`` with ``change(object)``, and return the new object.

        If the object does not exist or ``change`` returns None, write nothing and return None.

        ``adding``: further objects (files and events) to add in the same transaction.
        """
        with self._transaction() as db:
            found = db.execute("SELECT owner, doc FROM objects WHERE id = ?", (name,)).fetchone()
            changed = None if found is None else change(orjson.loads(found[1]))
            if changed is None:
                return None
            db.execute("UPDATE objects SET doc = ? WHERE id = ?", (_text(changed), name))
            for doc in adding:
                _put(db, doc["object"], found[0], doc)
        return changed

    def remove(self, *names: str) -> None:
        with self._transaction() as db:
            db.executemany("DELETE FROM objects WHERE id = ?", [(name,) for name in names])

    def get(self, kind: Kind, name: str, owner: str | None = None) -> Object | None:
        """Return the object, or None if it does not exist. With ``owner``, objects of other owners count as missing."""
        query = "SELECT owner, doc FROM objects WHERE kind = ? AND id = ?"
        found = self._read(query, kind, name)
        if not found or owner not in (None, found[0][0]):
            return None
        doc: Object = orjson.loads(found[0][1])
        return doc

    def found(self, kind: Kind, name: str, owner: str) -> Object:
        """Return the object. Raise ApiProblem (404) if this owner has no such object."""
        if (doc := self.get(kind, name, owner)) is None:
            raise missing(kind.capitalize(), name)
        return doc

    def page(
        self,
        kind: Kind,
        owner: str,
        *,
        after: str | None,
        limit: int,
        ascending: bool = False,
        purpose: str | None = None,
    ) -> ListPage:
        """Return at most ``limit`` objects of the owner that follow the object ``after``, newest first unless
        ``ascending``."""
        order, follows = ("ASC", ">") if ascending else ("DESC", "<")
        where, values = "kind = ? AND owner = ?", [kind, owner]
        if after is not None:
            where += f" AND seq {follows} (SELECT seq FROM objects WHERE id = ? AND owner = ?)"
            values += [after, owner]
        if purpose is not None:
            where += " AND json_extract(doc, '$.purpose') = ?"
            values.append(purpose)
        query = f"SELECT doc FROM objects WHERE {where} ORDER BY seq {order} LIMIT {limit + 1}"
        docs = [orjson.loads(text) for (text,) in self._read(query, *values)]
        return ListPage(docs[:limit], len(docs) > limit)

    def all(self, kind: Kind, *statuses: str, owner: str | None = None) -> list[Stored]:
        """Return all objects of a kind, oldest first. With ``statuses``, return only objects with one of these
        statuses."""
        where, values = "kind = ?", [kind, *statuses]
        if statuses:
            where += f" AND status IN ({', '.join('?' * len(statuses))})"
        if owner is not None:
            where, values = f"{where} AND owner = ?", [*values, owner]
        query = f"SELECT owner, doc FROM objects WHERE {where} ORDER BY seq"
        return [Stored(owner, orjson.loads(text)) for owner, text in self._read(query, *values)]

    def names(self, kind: Kind, owner: str) -> set[str]:
        query = "SELECT id FROM objects WHERE kind = ? AND owner = ?"
        return {name for (name,) in self._read(query, kind, owner)}

    def expired(self, now: float) -> list[Stored]:
        """Return the files and uploads whose time of expiry is not after ``now``."""
        query = (
            "SELECT owner, doc FROM objects WHERE kind IN ('file', 'upload') AND expires_at <= ?"
        )
        return [Stored(owner, orjson.loads(text)) for owner, text in self._read(query, now)]

    def counts(self, owner: str | None) -> dict[tuple[str, str], int]:
        """Return the number of objects by kind and status. ``owner`` None counts the objects of all owners."""
        query = "SELECT kind, status, count(*) FROM objects WHERE owner = coalesce(?, owner) GROUP BY 1, 2"
        return {(kind, status or ""): n for kind, status, n in self._read(query, owner)}

    def bytes_of(self, owner: str) -> int:
        """Return the total size of this owner's files and upload parts, in bytes."""
        query = "SELECT coalesce(sum(json_extract(doc, '$.bytes')), 0) FROM objects WHERE kind IN ('file', 'part') AND owner = ?"
        return int(self._read(query, owner)[0][0])

    def problems(self) -> str:
        """Return the damage that SQLite's integrity check finds in the file, or "" if there is none."""
        found = self._read("PRAGMA integrity_check")[0][0]
        return "" if found == "ok" else str(found)

    def _read(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        try:
            with self.lock:
                return self._db.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise StoreError(
                f"the server's database {self._path} can't be read: {error}; stop the server, then restore"
                f" {self._path.name} from a backup"
            ) from error

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        try:
            with self.lock:
                self._db.execute("BEGIN IMMEDIATE")
                try:
                    yield self._db
                    self._db.execute("COMMIT")
                    self.changed.set()
                finally:
                    if self._db.in_transaction:
                        self._db.execute("ROLLBACK")
        except sqlite3.Error as error:
            raise StoreError(
                f"the server's database {self._path} can't be written: {error}; make room on its disk, or check its"
                " permissions, then start the server again"
            ) from error


def _put(db: sqlite3.Connection, kind: Kind, owner: str, doc: Object) -> None:
    """Add an object, or replace the object with the same id. A replaced object keeps its place in the order."""
    db.execute(
        "INSERT INTO objects (id, kind, owner, doc) VALUES (?, ?, ?, ?)"
        " ON CONFLICT (id) DO UPDATE SET doc = excluded.doc",
        (doc["id"], kind, owner, _text(doc)),
    )


def _text(doc: Object) -> str:
    return orjson.dumps(doc).decode()
