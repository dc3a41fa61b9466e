"""A folder of objects in a store: S3, Google Cloud Storage, Azure, or a shared folder (``file://``), through ``obstore``.

Objects that decide something are written with ``create``, which fails if the object exists (``If-None-Match: *``). Such
an object never changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from batchkit.config.installation import how_to_install
from batchkit.config.masking import masked_text
from batchkit.config.urls import CHECK_KEYS, bare
from batchkit.errors import JobError, StoreError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

SCHEMES = ("s3", "gs", "az", "file")
_KEYS_OF_MACHINE = "169.254.169.254"  # asked for keys if the environment has none
_ANSWER = re.compile(r"<Code>(.*?)</Code>\s*<Message>(.*?)</Message>", re.DOTALL)  # of S3 and Azure
_TRY_S = 30.0  # obstore's own retries within one call
_RETRIES: Any = {"max_retries": 6, "retry_timeout": timedelta(seconds=_TRY_S)}


def is_store(address: str) -> bool:
    """Return whether ``address`` can be a folder in a store."""
    scheme, separator, rest = address.partition("://")
    return bool(separator) and scheme in SCHEMES and bool(rest.strip("/"))


class Objects:
    """The objects below ``address``, for example ``s3://bucket/runs/NAME``. Any thread may use it.

    Raises:
        JobError: obstore is not installed, or the address or its settings are wrong.
        StoreError (every method): the store can't be reached, or refuses the request. A write may have succeeded.
    """

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        self._store = _opened(self.address)

    def at(self, name: str) -> Objects:
        """Return the objects of the folder ``name`` below this one."""
        return Objects(f"{self.address}/{name}")

    def create(self, key: str, content: bytes) -> bool:
        """Write an object that does not exist. Return False if there is another one.

        An object with this ``content`` counts as written: the reply to an earlier try may have been lost. So the content
        must have a part that no other writer uses.
        """
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        with self._errors(key):
            try:
                self._put(key, content, mode="create")
            except (AlreadyExistsError, PreconditionError):
                if (found := self.get(key)) is None:
                    raise  # another writer is about to create it
                return found == content
        return True

    def put(self, key: str, content: bytes) -> None:
        """Write or replace an object."""
        with self._errors(key):
            self._put(key, content, mode="overwrite")

    def get(self, key: str) -> bytes | None:
        """Return the content of an object, or None if it does not exist."""
        import obstore

        with self._errors(key):
            try:
                return bytes(obstore.get(self._store, key).bytes())
            except FileNotFoundError:
                return None

    def get_ranges(self, key: str, starts: list[int], sizes: list[int]) -> list[bytes]:
        """Return parts of an object."""
        import obstore

        with self._errors(key):
            found = obstore.get_ranges(self._store, key, starts=starts, lengths=sizes)
            return [bytes(part) for part in found]

    def folders(self) -> list[str]:
        """Return the names of the folders directly below, sorted. The newest may be missing."""
        import obstore

        with self._errors(""):
            found = obstore.list_with_delimiter(self._store)
            return sorted(path.rstrip("/").rpartition("/")[2] for path in found["common_prefixes"])

    def names(self, folder: str) -> list[str]:
        """Return the names of the objects in a ``folder`` below. The newest may be missing."""
        import obstore

        with self._errors(folder):
            found = obstore.list_with_delimiter(self._store, f"{folder}/")
            return [item["path"].rpartition("/")[2] for item in found["objects"]]

    def check_create(self) -> None:
        """Check that a second ``create`` of an object fails.

        Raises:
            JobError: the store ignores the condition, so that two machines could write the same run.
        """
        key, tries = f"probe-{token_hex(8)}", (b"first", b"second")
        first, second = (self.create(key, content) for content in tries)
        with self._errors(key):
            import obstore

            obstore.delete(self._store, key)
        if not first or second:
            raise JobError(
                f"{bare(self.address)}: the store has no conditional writes: a second PUT with If-None-Match: * succeeded,"
                " so two machines could write the same run. Use a store that has them, such as S3, Google Cloud Storage,"
                " Azure, MinIO or Ceph"
            )

    def _put(self, key: str, content: bytes, *, mode: Any) -> None:
        import obstore

        obstore.put(self._store, key, content, mode=mode, use_multipart=False)

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except Exception as error:  # obstore's errors have no common base
            place = f"{bare(self.address)}/{key}".rstrip("/")
            raise StoreError(f"{place}: {reason_of(error)}") from error


def reason_of(error: Exception) -> str:
    """Return the reason of an error of obstore, on one line and without secrets, with advice if access keys or the bucket
    may be wrong."""
    text, _, _ = str(error).partition("\n\nDebug source")
    if (answer := _ANSWER.search(text)) is not None:
        text = ": ".join(answer.groups())
    text = masked_text(" ".join(text.split())) or type(error).__name__
    is_refused = type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError")
    if is_refused or _KEYS_OF_MACHINE in text:
        return f"{text}; {CHECK_KEYS}"
    if isinstance(error, FileNotFoundError) or "NoSuchBucket" in text:
        return f"{text}; check the name of the bucket"
    return text


def _opened(address: str) -> ObjectStore:
    try:
        from obstore.store import LocalStore, from_url
    except ImportError as error:
        raise JobError(
            f"{bare(address)}: obstore is not installed; {how_to_install('store')}"
        ) from error
    if not is_store(address):
        raise JobError(
            f"{bare(address)}: not a folder in a store; write s3://BUCKET/FOLDER, gs://…, az://… or file:///FOLDER"
        )
    try:
        if address.startswith("file://"):
            return LocalStore(Path(unquote(urlsplit(address).path)), mkdir=True)
        return from_url(address, retry_config=_RETRIES)
    except Exception as error:
        raise JobError(f"{bare(address)}: can't be used as a store: {reason_of(error)}") from error
