"""The fingerprint of an input: its content, read again only if the file changed."""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import replace
from pathlib import Path

import fsspec

from batchkit.sources.fingerprint import fingerprint
from tests.support.sources import table, write, write_rows


def test_fingerprint_is_the_content_of_each_file(tmp_path: Path) -> None:
    path = write_rows(tmp_path, "x.jsonl")
    [old] = fingerprint(table(path))
    assert (old.path, old.size) == (str(path), path.stat().st_size)
    assert old.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    path.write_text('{"a": 1}\n')
    [new] = fingerprint(table(path), [old])
    assert new.sha256 == hashlib.sha256(path.read_bytes()).hexdigest() != old.sha256


def test_an_unchanged_file_keeps_its_fingerprint_unread(tmp_path: Path) -> None:
    path = write(tmp_path, "x.jsonl", b"one\n")
    [old] = fingerprint(table(path))
    noted = replace(old, sha256="as it was noted")
    assert fingerprint(table(path), [noted]) == [noted]
    assert fingerprint(table(path), [replace(noted, ctime_ns=0)]) == [old]


def test_a_file_rewritten_with_its_old_size_and_time_has_another_fingerprint(
    tmp_path: Path,
) -> None:
    path = write(tmp_path, "x.jsonl", b"one\n")
    [old] = fingerprint(table(path))
    time.sleep(0.02)  # a kernel's clock for files may tick a hundred times a second only
    path.write_bytes(b"two\n")
    os.utime(path, ns=(old.mtime_ns, old.mtime_ns))
    [new] = fingerprint(table(path), [old])
    assert (new.size, new.mtime_ns) == (old.size, old.mtime_ns)
    assert new.sha256 == hashlib.sha256(b"two\n").hexdigest()


def test_a_changed_remote_file_has_another_fingerprint() -> None:
    url = "memory://sources/print.jsonl"
    fsspec.filesystem("memory").pipe(url, b"{}\n")
    old = fingerprint(table(url))
    assert fingerprint(table(url), old) == old
    fsspec.filesystem("memory").pipe(url, b'{"a": 1}\n')
    assert fingerprint(table(url), old) != old
    fsspec.filesystem("memory").rm(url)
