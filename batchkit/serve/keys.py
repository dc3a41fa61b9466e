"""The API keys of a server. Each line of the key file has the hash of a key (not the key itself), its name and its
limits."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from batchkit.config.regular_file import read_bytes
from batchkit.errors import JobError
from batchkit.storage.files import open_private

_LINE = re.compile(
    r"([0-9a-f]{64}) ([A-Za-z0-9][A-Za-z0-9._-]*)((?: (?:batches|rows|bytes)=[0-9]{1,18})*)"
)


class KeyLimits(NamedTuple):
    """The limits of an API key: number of open ``batches``, ``rows`` per batch, and ``bytes`` of stored files."""

    batches: float = float("inf")
    rows: float = float("inf")
    bytes: float = float("inf")


class Key(NamedTuple):
    name: str
    limits: KeyLimits = KeyLimits()


def new_key(path: Path, name: str) -> str:
    """Make a key of 256 random bits, add its hash to the file, and return the key. The file does not contain the key
    itself, so it can't be shown again.

    Raises:
        JobError: The name is taken or invalid, or the file can't be read or written.
    """
    if not _LINE.fullmatch(f"{'0' * 64} {name}"):
        raise JobError(f"--new-key {name}: expected letters, digits and . _ -")
    if path.exists() and name in {known.name for known in read_keys(path).values()}:
        raise JobError(
            f"{path}: already has a key {name!r}; remove its line first, or choose another name"
        )
    key = f"bk-{secrets.token_urlsafe(32)}"
    try:
        with os.fdopen(open_private(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as file:
            file.write(f"{hashed(key)} {name}\n".encode())
        path.chmod(0o600)
    except OSError as error:
        raise JobError(f"{path}: can't be written: {error.strerror}") from error
    return key


def read_keys(path: Path) -> Mapping[str, Key]:
    """Return the keys in the file, keyed by their hash.

    Raises:
        JobError: The file can't be read, or a line is not a valid key.
    """
    try:
        lines = read_bytes(path).decode(errors="replace").splitlines()
    except OSError as error:
        creates = f"; `batchkit serve --api-key-file {path} --new-key NAME` creates the file"
        advice = creates * isinstance(error, FileNotFoundError)
        raise JobError(f"{path}: can't be read: {error.strerror}{advice}") from error
    found: dict[str, Key] = {}
    for number, line in enumerate(lines, start=1):
        if not (key := _LINE.fullmatch(line.strip())):
            raise JobError(
                f"{path}: line {number} is not a key; expected a hash and a name, as --new-key writes them, optionally"
                " followed by batches=N rows=N bytes=N"
            )
        limits = dict(limit.split("=") for limit in key[3].split())
        found[key[1]] = Key(key[2], KeyLimits(**{name: int(n) for name, n in limits.items()}))
    return found


def hashed(key: str) -> str:
    return sha256(key.encode()).hexdigest()
