"""A folder or a glob of images or texts: a row for each file, in a fixed order, named by its path."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import fsspec
import pytest

from batchkit.config.loading import make_job
from batchkit.errors import InputError
from batchkit.sources import read_rows
from batchkit.sources.finding import input_files, listing
from tests.support import dry_runs
from tests.support.dry_runs import records, run
from tests.support.images import BLUE, RED, png
from tests.support.sources import rows_of, table, write

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def write_files(folder: str, *names: str, content: bytes = b"x") -> Path:
    for name in names:
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return Path(folder).resolve()


def write_job(path: str, **tables: dict[str, Any]) -> None:
    prompt = tables.pop("prompt", {"images": ["{{ path }}"], "user": "{{ name }}"})
    keys = {"path": path, **tables.pop("input", {})}
    dry_runs.write_job(input=keys, prompt=prompt, output={"keep": ["name"]}, **tables)


def names(path: Path | str, **keys: Any) -> list[str]:
    return [Path(file).name for file in input_files(table(path, **keys))]


def test_each_file_is_a_row_with_the_parts_of_its_name() -> None:
    folder = write_files("photos", "a.b.JPG")
    (row,) = rows_of(folder / "*.JPG")
    assert row.id == row.fields["path"] == f"{folder}/a.b.JPG"
    assert [row.fields[key] for key in ("name", "stem", "suffix")] == ["a.b.JPG", "a.b", ".JPG"]


def test_files_are_in_natural_order() -> None:
    folder = write_files("photos", "p10.png", "p9.png", "p09.png", "q.png", "P1.png", "p.png")
    assert names(folder) == ["P1.png", "p.png", "p09.png", "p9.png", "p10.png", "q.png"]
    write_files("photos", "2/p1.png", "10/p1.png")
    found = [os.path.relpath(file, folder) for file in input_files(table(folder / "*/*.png"))]
    assert found == ["2/p1.png", "10/p1.png"]


def test_the_images_of_a_folder_are_the_rows_and_the_rest_is_named() -> None:
    folder = write_files(
        "photos", "a.png", "b.jpg", ".c.png", "d.heic", "e.heic", "f.csv", "g/h.png"
    )
    found = listing(table(folder))
    assert [Path(file).name for file in found.files] == ["a.png", "b.jpg"]
    assert found.left_out == f"{folder}: 2 images; left out: 2 .heic, 1 .csv, 1 folder"
    write_job("photos")
    assert "photos: 2 images; left out: 2 .heic, 1 .csv, 1 folder" in run().stderr


def test_the_format_files_takes_every_file_that_is_not_hidden() -> None:
    folder = write_files("texts", "a.txt", "b.md", ".c.txt", "d/e.txt", "f.csv")
    assert names(folder, format="files") == ["a.txt", "b.md", "f.csv"]
    assert names(folder / "*.txt", format="files") == ["a.txt"]
    assert names(folder / "**/*.txt", format="files") == ["a.txt", "e.txt"]


@pytest.mark.parametrize(
    ("files", "path", "problem"),
    [
        (["a.png", "b.pdf"], "in", 'has images and PDFs; choose one kind .*"pdf"'),
        (["a.png", "b.csv"], "in/*", "matches images and also .*/in/b.csv, which contains rows"),
        (["a.txt", "b.md"], "in", r'is a folder; name its files, .*/in/\*.txt, .*"files"'),
        (["a.heic"], "in/*.png", "no file matches; check input.path"),
    ],
)
def test_a_folder_whose_rows_are_unclear_is_an_error(
    files: list[str], path: str, problem: str
) -> None:
    write_files("in", *files)
    with pytest.raises(InputError, match=problem):
        input_files(table(Path(path).resolve()))


def test_a_folder_without_files_is_an_error() -> None:
    folder = write_files("in", ".hidden.png", "inner/a.png")
    with pytest.raises(InputError, match=r"no file matches; check .*; it has 1 folder"):
        input_files(table(folder, format="files"))


# Paths and media.root


def paths(job: dict[str, Any]) -> list[str]:
    made = make_job({"engine": {"kind": "dry-run"}, **job}, "the test")
    return [row.fields["path"] for row in read_rows(made.input)]


def test_a_path_is_below_the_media_root() -> None:
    folder = write_files("photos", "a.png")
    assert paths({"input": {"path": "photos"}}) == ["photos/a.png"]
    assert paths({"input": {"path": "photos/*.png"}, "media": {"root": "photos"}}) == ["a.png"]
    assert paths({"input": {"path": f"{folder}/../photos/a.png"}}) == ["photos/a.png"]


def test_the_folder_of_files_elsewhere_is_the_media_root(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    write(elsewhere, "a.png", png())
    for path in (elsewhere, elsewhere / "*.png"):
        assert paths({"input": {"path": str(path)}}) == ["a.png"]
        write_job(str(path))
        assert run("--fresh").exit_code == 0
    outside = {"input": {"path": str(elsewhere)}, "media": {"root": "."}}
    assert paths(outside) == [f"{elsewhere}/a.png"]
    write_job(str(elsewhere), media={"root": "."})
    assert run("--fresh").exit_code == 3
    assert "outside media.root" in records()[0]["error"]["message"]


def test_files_of_a_remote_folder_are_rows() -> None:
    store = fsspec.filesystem("memory")
    store.pipe({"/shots/p10.png": png(), "/shots/p9.png": png(BLUE), "/shots/notes.txt": b"x"})
    store.pipe("/shots/inner/p1.png", png())
    try:
        for path in ("memory://shots/", "memory://shots/*.png"):
            write_job(path)
            assert run("--fresh").exit_code == 0
            assert {r["index"]: r["id"] for r in records()} == {0: "p9.png", 1: "p10.png"}
            assert len(records()) == 2
    finally:
        store.rm("/shots", recursive=True)


# A run over files


def test_an_empty_or_broken_image_fails_alone() -> None:
    write_files("photos", "a.png", "c.png", content=png())
    write_files("photos", "b.png", content=b"")
    write_files("photos", "d.png", content=png()[:40])
    write_job("photos")
    assert run().exit_code == 3
    found = {record["id"]: record for record in records()}
    ok = {name for name, record in found.items() if record["status"] == "ok"}
    assert ok == {"photos/a.png", "photos/c.png"}
    assert "photos/b.png: the file is empty" in found["photos/b.png"]["error"]["message"]
    assert found["photos/d.png"]["error"]["kind"] == "media"


def test_a_changed_image_is_answered_again_and_the_others_are_kept() -> None:
    write_files("photos", "a.png", "b.png", "c.png", content=png())
    write_job("photos")
    assert run().exit_code == 0
    assert run().json["skipped"] == 3
    write_files("photos", "b.png", content=png(BLUE))
    write_files("photos", "aa.png", content=png(RED, (8, 8)))
    refused = run()
    assert refused.exit_code == 2
    assert "photos/b.png: " in refused.stderr
    kept = run("--on-change", "requeue")
    assert "2 records kept, 1 rows to run again" in kept.stderr
    names = ("a", "aa", "b", "c")
    assert sorted((r["index"], r["id"]) for r in records()) == [
        (n, f"photos/{name}.png") for n, name in enumerate(names)
    ]


def test_a_renamed_image_is_a_changed_input() -> None:
    write_files("photos", "a.png", content=png())
    write_job("photos")
    assert run().exit_code == 0
    Path("photos/a.png").rename("photos/z.png")
    assert run().exit_code == 2
    assert run("--on-change", "requeue").exit_code == 0
    assert [record["id"] for record in records()] == ["photos/z.png"]


@pytest.mark.parametrize("path", ["pictures", "pictures/*.png"])
def test_a_file_whose_name_is_no_text_is_named(path: str) -> None:
    write_files("pictures", "a.png", os.fsdecode(b"caf\xe9.png"))
    with pytest.raises(InputError, match=r"caf\\xe9.png: its name is not UTF-8"):
        input_files(table(path))
