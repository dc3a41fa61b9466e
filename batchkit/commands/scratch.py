"""A temporary folder for the engines that a command starts, kept only if an error names a file in it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from batchkit.errors import EngineError


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """A new folder, removed at the end unless the EngineError that ends the block names it."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    is_kept = False
    try:
        yield folder
    except EngineError as error:
        is_kept = str(folder) in str(error)
        raise
    finally:
        if not is_kept:
            shutil.rmtree(folder, ignore_errors=True)
