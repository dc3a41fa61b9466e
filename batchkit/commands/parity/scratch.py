"""A folder for the engines' output, kept only if an error message refers to it."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from types import TracebackType


class Scratch:
    """Removed at the end, unless ``kept_files`` found any files."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="batchkit-parity-"))
        self._is_kept = False

    def kept_files(self) -> list[str]:
        """The files in it. If there are any, they are kept."""
        files = [str(path) for path in self.path.rglob("*") if path.is_file()]
        self._is_kept = bool(files)
        return files

    def __enter__(self) -> Scratch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._is_kept:
            shutil.rmtree(self.path, ignore_errors=True)
