"""Hashes of the files of models and adapters."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from batchkit.config.regular_file import open_regular

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_WHOLE_BYTES = 8 * 2**20  # of a larger file only blocks are read
_BLOCKS, _BLOCK_BYTES, _END_BYTES = 64, 2**16, 2**20


def adapter_fingerprint(folder: str) -> str | None:
    """Return a hash of the adapter files in ``folder`` that vLLM reads. Other files, which trainers write, are ignored.

    Returns None if ``folder`` has no such files, or is a name on the hub.
    """
    paths = [path for name in ADAPTER_FILES if (path := Path(folder, name)).is_file()]
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        with open_regular(path) as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16] if paths else None


def model_fingerprint(model: str) -> str | None:
    """Return a hash of a model's file, or of the files in its folder; None if ``model`` is a name.

    Small files are read completely. For large files only both ends and evenly spread blocks are read, since reading a
    whole large model would take minutes.
    """
    place = Path(model)
    if not model or not (place.is_file() or place.is_dir()):
        return None
    digest = hashlib.sha256()
    for path in [place] if place.is_file() else sorted(filter(Path.is_file, place.iterdir())):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with open_regular(path) as file:
            for start, length in _spans(size):
                file.seek(start)
                digest.update(file.read(length))
    return digest.hexdigest()[:16]


def _spans(size: int) -> Iterator[tuple[int, int]]:
    if size <= _WHOLE_BYTES:
        yield 0, size
        return
    yield 0, _END_BYTES
    yield size - _END_BYTES, _END_BYTES
    for n in range(_BLOCKS):
        yield n * (size - _BLOCK_BYTES) // (_BLOCKS - 1), _BLOCK_BYTES
