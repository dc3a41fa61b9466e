"""What a glob can't list is an error, and never an empty folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from batchkit.errors import InputError
from batchkit.sources import input_files
from tests.support.sources import table, write_rows


@pytest.mark.parametrize("pattern", ["*/rows.jsonl", "**/rows.jsonl", "*/*/rows.jsonl"])
def test_folder_that_a_glob_can_not_list_is_an_error(tmp_path: Path, pattern: str) -> None:
    """A disk that is not mounted: else its rows would be missing."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    write_rows(tmp_path / "a" / "b", "rows.jsonl")
    write_rows(tmp_path / "a", "rows.jsonl")
    assert input_files(table(tmp_path / pattern))
    (tmp_path / "c").symlink_to("/mnt/nowhere")
    with pytest.raises(InputError, match=r"/c: can't be listed: No such file"):
        input_files(table(tmp_path / pattern))


def test_folder_at_a_url_that_can_not_be_listed_is_an_error(
    tmp_path: Path,
) -> None:
    class Broken(LocalFileSystem):
        """The disk's own files, as a store whose folder b can't be reached now."""

        protocol = "broken"

        def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
            if path.rstrip("/").endswith("/b"):
                raise ConnectionResetError("reset by peer")
            return super().ls(path, detail=detail, **options)

    fsspec.register_implementation("broken", Broken, clobber=True)
    for name in "ab":
        (tmp_path / name).mkdir()
        write_rows(tmp_path / name, "rows.jsonl")
    source = table(f"broken://{tmp_path}/*/rows.jsonl")
    with pytest.raises(InputError, match="reset by peer"):
        input_files(source)
