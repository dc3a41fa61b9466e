"""Exports to Lance and Delta, read back by their own libraries."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support import embed_runs
from tests.support.command_line import batchkit
from tests.support.dry_runs import LOG, RUN, finished, prepare, run, write_job, write_rows
from tests.support.environments import with_tables

pytestmark = [pytest.mark.release, pytest.mark.usefixtures("in_an_empty_folder")]

FORMATS = pytest.mark.parametrize("kind", ["lance", "delta"])
IMPORTED = dict[str, ModuleType]()  # Lance can't be imported twice in a process


@pytest.fixture(scope="module", autouse=True)
def _libraries() -> Iterator[None]:
    """Lance and Delta can be imported, by this module's tests only; all packages that they share with batchkit are those
    of the tests."""
    (site,) = with_tables().glob("lib/*/site-packages")
    sys.path.append(str(site))
    sys.modules.update(IMPORTED)
    yield
    sys.path.remove(str(site))
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(site)):
            IMPORTED[name] = sys.modules.pop(name)


def read(path: str, version: int | None = None) -> pa.Table:
    if path.endswith("lance"):
        import lance

        return lance.dataset(path, version=version).to_table()
    from deltalake import DeltaTable

    found = DeltaTable(path, version=None if version is None else version - 1)
    return found.to_pyarrow_table()


def write(path: str, table: pa.Table) -> None:
    if path.endswith("lance"):
        import lance

        lance.write_dataset(table, path)
    else:
        from deltalake import write_deltalake

        write_deltalake(path, table)


def export(*args: str, exit_code: int = 0) -> str:
    """What ``export`` prints."""
    done = batchkit("export", *args)
    assert done.exit_code == exit_code, done.stderr
    return done.stdout + done.stderr


@FORMATS
def test_a_table_has_the_rows_and_the_types_of_parquet(kind: str) -> None:
    write_rows([{"q": "x", "Text": "a", "n.m": "1"}, {"other": "y"}])
    write_job(output={"keep": ["Text", "n.m"]})
    assert run().exit_code == 3
    batchkit("export", RUN, "all.parquet").ok()
    wanted = pq.read_table("all.parquet")
    said = export(str(RUN), f"all.{kind}")
    assert re.search(rf"^all.{kind}: 2 rows, [\d,]+ bytes in all versions$", said, re.MULTILINE)
    found = read(f"all.{kind}")
    changed = {"Text": "fields_Text", "n.m": "n_m"}  # Delta ignores case, Lance has no dots
    names = [changed.get(name, name) for name in wanted.column_names]
    assert found.equals(wanted.rename_columns(names))
    assert found.schema.types == wanted.schema.types
    shown = json.loads(export(str(RUN), f"--{kind}", "--json"))
    assert (shown["rows"], shown["path"]) == (2, f"{RUN}/results.{kind}")
    found = [path for path in Path(shown["path"]).rglob("*") if path.is_file()]
    assert shown["bytes"] == sum(path.stat().st_size for path in found)
    assert shown["ratio"] is None  # the bytes are those of all versions


@FORMATS
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_table_has_the_vectors(kind: str, dtype: str) -> None:
    embed_runs.prepare(6, failing=(3,), output={"vector_dtype": dtype})
    assert run().exit_code == 3
    export(f"vectors.{kind}")
    found, stored = read(f"vectors.{kind}")["embedding"], embed_runs.stored()
    for row, vector in enumerate(found.to_pylist()):
        assert vector == (stored[row].tolist() if row in stored else None)
    wanted = pa.float16() if (kind, dtype) == ("lance", "float16") else pa.float32()
    assert found.type.value_type == wanted


@FORMATS
def test_a_second_export_is_a_new_version_of_the_table(kind: str) -> None:
    """An export that fails leaves the older version, or no table."""
    finished(3, output={"keep": "*"})
    path = f"a.{kind}"
    export(str(RUN), path)
    write_rows([{"key": "k0", "q": "question 0"}])
    there = set(Path().iterdir())
    export(str(RUN), f"new.{kind}", exit_code=2)
    assert set(Path().iterdir()) == there
    refused = export(str(RUN), path, exit_code=2)
    assert "restore the input, or give --without-input" in refused
    assert refused.count("\n") == 1
    before = read(path)
    assert before.equals(read(path, version=1))
    export(str(RUN), path, "--without-input")
    after = read(path)
    assert after.equals(read(path, version=2))
    assert after["key"].null_count == 2
    assert after["text"].equals(before["text"])
    assert read(path, version=1).equals(before)


@FORMATS
@pytest.mark.parametrize("name", ["other.{}", "other-{}"])
def test_a_table_of_another_program_is_replaced_only_with_force(kind: str, name: str) -> None:
    finished(3)
    path = name.format(kind)
    write(path, pa.table({"a": [1]}))
    refused = export(str(RUN), f"--{kind}", path, exit_code=2)
    assert "exists, and was not written by batchkit" in refused
    assert read(path).column_names == ["a"]
    export(str(RUN), f"--{kind}", path, "--force")
    assert read(path).num_rows == 3
    export(str(RUN), f"--{kind}", path)


@FORMATS
@pytest.mark.parametrize("name", ["notes.{}", "notes-{}"])
def test_a_folder_with_other_files_gets_a_table_only_with_force(kind: str, name: str) -> None:
    finished(3)
    path = name.format(kind)
    Path(path).mkdir()
    (note := Path(path, "note.txt")).write_text("x")
    refused = export(str(RUN), f"--{kind}", path, exit_code=2)
    assert "exists, and was not written by batchkit" in refused
    assert list(Path(path).iterdir()) == [note]
    export(str(RUN), f"--{kind}", path, "--force")
    assert (read(path).num_rows, note.read_text()) == (3, "x")


@FORMATS
def test_an_empty_folder_gets_a_table(kind: str) -> None:
    finished(3)
    Path(f"empty.{kind}").mkdir()
    export(str(RUN), f"empty.{kind}")
    assert read(f"empty.{kind}").num_rows == 3


def test_a_delta_table_that_was_cleaned_up_is_still_batchkits() -> None:
    from deltalake import DeltaTable, write_deltalake

    def clean_up() -> str:
        table = DeltaTable("a.delta")
        table.optimize.z_order(["id"])
        table.vacuum(0, dry_run=False, enforce_retention_duration=False)
        return str(table.history(1)[0]["operation"])

    finished(3)
    export(str(RUN), "a.delta")
    assert clean_up() == "VACUUM END"
    export(str(RUN), "a.delta")
    write_deltalake("a.delta", pa.table({"id": ["x"]}), mode="overwrite", schema_mode="overwrite")
    assert clean_up() == "VACUUM END"
    assert "not written by batchkit" in export(str(RUN), "a.delta", exit_code=2)


@FORMATS
def test_a_run_writes_a_table_at_its_end(kind: str) -> None:
    prepare(3, output={"export": [kind, f"end.{kind}"]})
    done = run("--output", f"out.{kind}").ok()
    for path in (f"{RUN}/results.{kind}", f"end.{kind}", f"out.{kind}"):
        assert f"{path}: 3 rows, " in done.stderr
        assert read(path).num_rows == 3
    run("--output", f"out.{kind}").ok()


@FORMATS
def test_tables_that_can_not_be_written_are_refused_in_one_line(kind: str) -> None:
    finished(3)
    Path(f"file.{kind}").write_text("x")
    place = f"s3://bucket/a.{kind}"
    for target, message in (
        (f"file.{kind}", f"is a file, but --{kind} writes a folder"),
        (place, f"FILE {place}: {kind} is written to local folders only"),
    ):
        refused = export(str(RUN), target, exit_code=2)
        assert message in refused
        assert refused.count("\n") == 1
    done = run("--output", f"file.{kind}")
    assert (done.exit_code, f"--output file.{kind}: exists" in done.stderr) == (2, True)
    other = {"lance": "delta", "delta": "lance"}[kind]
    refused = export(str(RUN), f"--{kind}", f"a.{other}", exit_code=2)
    assert f"--{kind} writes .{kind} files; " in refused
    assert f"or give --{other}" in refused
    LOG.write_bytes(LOG.read_bytes().splitlines(keepends=True)[0])
    (RUN / "checkpoint.json").unlink()
    partly = export(str(RUN), f"a.{kind}", "--only-finished", exit_code=2)
    assert "1 of 3 rows; 2 have no answer yet" in partly
    assert not Path(f"a.{kind}").exists()


@FORMATS
def test_a_missing_package_is_named_before_the_run_starts(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(3)
    package = {"lance": "lance", "delta": "deltalake"}[kind]
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    done = run("--output", f"out.{kind}")
    assert done.exit_code == 2
    assert f"--output out.{kind}: {package} is not installed: pip install" in done.stderr
    assert not RUN.exists()
