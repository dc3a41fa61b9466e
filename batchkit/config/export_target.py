"""The target of an export: its format, and the file or fsspec URL to write to."""

from __future__ import annotations

from pathlib import PurePath
from typing import NamedTuple

from batchkit.config.seams import EXPORTS
from batchkit.config.urls import bare, check_user_info, is_remote
from batchkit.errors import JobError

SUFFIXES = {f".{name}": name for name in ("parquet", "jsonl", "csv", "npy", "lance", "delta")}
"""Formats by suffix. ``--as`` names any other format."""
HUB = "hf://datasets/"
PARTS = "parts"
"""The format of a folder in ``output.export``, which gets Parquet files during the run (``runs/parts.py``)."""
_WITH_BUCKETS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")


class Target(NamedTuple):
    """The target of an export. ``format``: the name of an export format, or ``PARTS``. ``place``: the path or URL to
    write to; None for the usual file in the run folder."""

    format: str
    place: str | None = None

    @property
    def is_remote(self) -> bool:
        return self.place is not None and is_remote(self.place)

    def __str__(self) -> str:
        return self.format if self.place is None else bare(self.place)


def target_of(text: str, format_name: str | None = None, *, key: str = "output.export") -> Target:
    """Return the target that ``text`` names. ``text`` is a format's name, a file (``answers.parquet``) or a URL. In
    ``output.export``, it may also be a folder (``answers/parts``, ``s3://bucket/answers``), which gets ``PARTS``.

    ``format_name``: the format of ``--as``; None if the suffix decides. A dataset on the Hugging Face hub
    (``hf://datasets/OWNER/NAME``) gets Parquet, in ``output.export`` as ``PARTS``.

    Raises:
        JobError: The format is unknown, or the URL can't be written to. The message begins with ``key``.
    """
    if format_name is not None:
        check_format(format_name, "--as")
    elif key == "output.export" and PurePath(text).name == text and not PurePath(text).suffix:
        check_format(text, key)
        return Target(text)
    if "://" in text:
        if not is_remote(text):
            raise JobError(
                f"{key} {bare(text)}: can't be written to; give s3://…, gs://…, az://… or {HUB}OWNER/NAME"
            )
        check_user_info(text, key)
        _check_complete(text, key)
    suffix = "" if text.endswith("/") or is_dataset(text) else PurePath(text).suffix.lower()
    known = format_name or SUFFIXES.get(suffix)
    if known is None and suffix == "" and key == "output.export":
        return Target(PARTS, text.rstrip("/"))
    if known is None and text.startswith(HUB) and suffix == "":
        known = "parquet"
    if known is None:
        raise JobError(
            f"{key} {bare(text)}: unknown suffix; use {', '.join(SUFFIXES)} (`batchkit export --as` has more formats:"
            f" {', '.join(EXPORTS.names())})"
        )
    return Target(known, text)


def is_dataset(address: str) -> bool:
    """Return True if ``address`` is a dataset on the hub, without a file or a folder in it."""
    return address.startswith(HUB) and address.removeprefix(HUB).strip("/").count("/") == 1


def _check_complete(address: str, key: str) -> None:
    """Raise JobError if ``address`` lacks its bucket or file, or the name of a dataset."""
    scheme, _, path = address.partition("://")
    bucket, _, file = path.partition("/")
    if scheme.lower() in _WITH_BUCKETS and not (bucket and file):
        lacking = "file" if bucket else "bucket"
        raise JobError(f"{key} {bare(address)}: names no {lacking}; give {scheme}://BUCKET/FILE")
    if address.startswith(HUB) and "/" not in address.removeprefix(HUB).strip("/"):
        raise JobError(f"{key} {bare(address)}: names no dataset; give {HUB}OWNER/NAME")


def check_format(name: str, key: str) -> None:
    """Raise JobError if no export format has this name."""
    try:
        EXPORTS.check(name)
    except ValueError as error:
        raise JobError(f"{key}: {error}") from None


def check_target(text: str) -> str:
    """Return ``text`` unchanged if it names a target. Otherwise raise ValueError, which pydantic reports for the
    key."""
    try:
        target_of(text)
    except JobError as error:
        raise ValueError(str(error).removeprefix("output.export").lstrip(": ")) from None
    return text
