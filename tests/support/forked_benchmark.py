"""A benchmark whose commands are forks: ``python -m tests.support.forked_benchmark SCRIPT …``."""

from __future__ import annotations

import importlib
import sys

from tests.support.forks import Fork


def main() -> None:
    importlib.import_module("bounded").start = Fork  # type: ignore[attr-defined]
    del sys.argv[0]
    importlib.import_module(sys.argv[0]).main()
