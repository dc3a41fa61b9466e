"""A stand-in for an object store, in memory, which a test makes unreachable or slow: ``standin://bucket/…``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class StoreStandIn(MemoryFileSystem):  # type: ignore[misc]
    """An fsspec filesystem in memory. The attributes belong to the class, because fsspec makes the instances.

    - ``down``: every request raises an error.
    - ``loses_replies``: an upload raises an error, and arrives with ``deliver``.
    """

    protocol = "standin"
    down = False
    loses_replies = False
    _late: list[tuple[bytes, str]] = []  # noqa: RUF012

    @classmethod
    def begin(cls) -> None:
        """Make the store empty and reachable, and its addresses known to fsspec."""
        name = f"{cls.__module__}.{cls.__name__}"
        fsspec.register_implementation("standin", name, clobber=True)
        cls.down = cls.loses_replies = False
        cls._late.clear()
        cls.store.clear()

    @classmethod
    def deliver(cls) -> None:
        """Store what was uploaded without a reply."""
        for content, path in cls._late:
            cls().pipe_file(path, content)
        cls._late.clear()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        found: str = super()._strip_protocol(path.replace("standin://", "memory://"))
        return found

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        self._check()
        found: list[Any] = super().ls(path, detail, **kwargs)
        return found

    def put_file(self, lpath: str, rpath: str, **kwargs: Any) -> None:
        self._check()
        if self.loses_replies:
            self._late.append((Path(lpath).read_bytes(), rpath))
            raise TimeoutError("no reply")
        super().put_file(lpath, rpath, **kwargs)

    def _check(self) -> None:
        if self.down:
            raise ConnectionError("the network is down")
