"""File systems that are mounted for a test."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(path: Path, *options: str, source: str | Path) -> Iterator[Path]:
    """``source`` at ``path``; skips the test where mounting is not allowed."""
    mount = ["mount", *options, str(source), str(path)]
    try:
        refused = subprocess.run(mount, capture_output=True).returncode
    except FileNotFoundError:
        refused = 1
    if refused:
        pytest.skip("mounting is not allowed here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@contextmanager
def small_disk(path: Path, size: str = "256k") -> Iterator[Path]:
    path.mkdir()
    with mounted(path, "-t", "tmpfs", "-o", f"size={size}", source="tmpfs"):
        yield path
