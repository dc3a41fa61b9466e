"""What a glob can't list is an error, and never an empty folder; and it finds each file once."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from batchkit.config.loading import load_job
from batchkit.errors import InputError
from batchkit.sources import read_rows
from batchkit.sources.finding import input_files
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


@contextmanager
def no_root() -> Iterator[None]:
    """Root may list and search any folder."""
    mine = os.geteuid()
    if mine == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(mine)


@pytest.mark.parametrize("pattern", ["*/rows.jsonl", "*/*.jsonl", "**/rows.jsonl", "**"])
@pytest.mark.parametrize("mode", [0o644, 0o711])
def test_folder_that_may_not_be_searched_or_listed_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str, mode: int
) -> None:
    """As after ``chmod -R 644``: its names can be listed, and to a glob no file in it exists."""
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        Path(name).mkdir()
        write_rows(Path(name), "rows.jsonl")
    tmp_path.chmod(0o755)
    Path("b").chmod(mode)
    with no_root(), pytest.raises(InputError, match=r"b: can't be listed: Permission denied"):
        input_files(table(pattern))


def test_file_that_a_glob_finds_in_several_ways_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "a" / "b" / "a").mkdir(parents=True)
    rows = write_rows(tmp_path / "a" / "b" / "a", "rows.jsonl")
    assert input_files(table(tmp_path / "**" / "a" / "**" / "*.jsonl")) == [str(rows)]


@pytest.mark.parametrize("link", ["latest", "3/again.jsonl"])
def test_file_that_a_glob_finds_under_two_names_is_an_error(tmp_path: Path, link: str) -> None:
    """Each of its rows would be answered twice."""
    (tmp_path / "3").mkdir()
    rows = write_rows(tmp_path / "3", "rows.jsonl")
    (tmp_path / link).symlink_to(rows if link.endswith(".jsonl") else "3")
    with pytest.raises(InputError, match=r"are the same file, so its rows would be answered twice"):
        input_files(table(tmp_path / "*" / "*.jsonl"))


def test_folder_at_a_url_that_can_not_be_listed_is_an_error(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("store", ["{}/", "memory://hidden/", "zip://"])
def test_hidden_files_are_passed_over_on_a_disk_and_in_a_store(tmp_path: Path, store: str) -> None:
    """Jupyter's copy of a file has the same rows, and a Mac's archive has a second part of each file."""
    hidden = ["b/.d/e.jsonl", ".ipynb_checkpoints/a.jsonl", "__MACOSX/._a.jsonl"]
    names = ["a.jsonl", "b/c.jsonl", *hidden]
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        for name in names:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            archive.write(write_rows(path.parent, path.name), name)
            fsspec.filesystem("memory").pipe_file(f"/hidden/{name}", path.read_bytes())
    place, archived = store.format(tmp_path), f"::{tmp_path}/x.zip" if store == "zip://" else ""
    for pattern, found in {
        "**/*.jsonl": ["a.jsonl", "b/c.jsonl"],
        "*/*.jsonl": ["b/c.jsonl"],
        ".*/a.jsonl": [".ipynb_checkpoints/a.jsonl"],
        "*/.d/*": ["b/.d/e.jsonl"],
        "b/.d/*": ["b/.d/e.jsonl"],
    }.items():
        files = input_files(table(f"{place}{pattern}{archived}"))
        assert files == [f"{place}{name}{archived}" for name in found]


def test_stars_and_brackets_in_the_query_of_a_url_are_no_glob() -> None:
    url = "https://host/rows.jsonl?columns=*&filter[day]=1"
    assert input_files(table(url)) == [url]


@pytest.mark.parametrize("name", ["rows.csv", "*.csv"])
def test_brackets_in_the_name_of_the_jobs_folder_lead_to_no_other_folder(
    tmp_path: Path, name: str
) -> None:
    for folder in ("a[1]", "a1"):
        (tmp_path / folder).mkdir()
    job, rows, others = (tmp_path / n for n in ("a[1]/job.toml", "a[1]/rows.csv", "a1/rows.csv"))
    job.write_text(f'[input]\npath = "{name}"\n[engine]\nkind = "dry-run"\n')
    others.touch()
    with pytest.raises(InputError, match="no file matches"):
        input_files(load_job(job).input)
    rows.touch()
    assert input_files(load_job(job).input) == [str(rows)]
    job.write_text(job.read_text().replace(name, "*.png"))
    assert load_job(job).media.root == str(job.parent)


def test_archive_with_a_relative_path_is_the_one_beside_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("job", "elsewhere"):
        (tmp_path / folder).mkdir()
        with zipfile.ZipFile(tmp_path / folder / "x.zip", "w") as archive:
            archive.writestr("rows.jsonl", f'{{"q": "{folder}"}}')
    job = tmp_path / "job" / "job.toml"
    job.write_text('[input]\npath = "zip://*.jsonl::x.zip"\n[engine]\nkind = "dry-run"\n')
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert [row.fields for row in read_rows(load_job(job).input)] == [{"q": "job"}]
    given = load_job(job, given={"input.path": "zip://*.jsonl::x.zip"})
    assert [row.fields for row in read_rows(given.input)] == [{"q": "elsewhere"}]


def test_where_finds_its_column_in_each_table(tmp_path: Path) -> None:
    """All rows of the second one would be missing. Rows of JSON may lack a field."""
    (tmp_path / "1.csv").write_text("q,lang\na,en\nb,de\n")
    (tmp_path / "2.csv").write_text("q,Lang\na,en\n")
    of_tables = table(tmp_path / "*.csv", where={"lang": "en"})
    with pytest.raises(InputError, match=r"2\.csv: input\.where names 'lang'.* mean 'Lang'"):
        list(read_rows(of_tables))
    (tmp_path / "1.jsonl").write_text('{"lang": "en"}\n{}\n')
    (tmp_path / "2.jsonl").write_text('{}\n{"lang": "en"}\n')
    of_json = table(tmp_path / "*.jsonl", where={"lang": "en"})
    assert [row.index for row in read_rows(of_json)] == [0, 3]
