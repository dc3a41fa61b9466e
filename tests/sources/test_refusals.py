"""What stops the reading of a file: one line that names it and says what to do."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import socket
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from batchkit.errors import InputError
from tests.support.command_line import batchkit
from tests.support.model_runs import write_job
from tests.support.sources import rows_of, write

GZIP = partial(gzip.compress, mtime=0)
ZSTD = bytes.fromhex("28b52ffd0458410000") + b'{"a": 1}\x0a'  # one raw block, without its checksum


@pytest.mark.parametrize(
    ("name", "content", "keys", "problem"),
    [
        ("x.jsonl", b"", {}, "is empty"),
        ("x.jsonl", b"\xef\xbb\xbf", {}, "is empty"),
        ("x.csv", b"", {}, "is empty"),
        ("x.parquet", b"", {}, "is empty"),
        ("x.jsonl", '{"a": 1}'.encode("utf-16"), {}, "is UTF-16 text; save the file as UTF-8"),
        ("x.txt", "cat\ndog\n".encode("utf-16-le"), {}, "has zero bytes, as UTF-16 text does"),
        ("x.csv", "a,b".encode("utf-32"), {}, "is UTF-16 text; save the file as UTF-8"),
        ("x.jsonl", b"PAR1\x00", {}, 'set input.format = "parquet"'),
        ("x.csv", b"PK\x03\x04", {}, "an Excel workbook; unpack it, or name it .xlsx"),
        ("x.jsonl", GZIP(b"{}"), {}, "give its name the suffix .gz"),
        ("x.jsonl", b"\x28\xb5\x2f\xfd..", {}, "give its name the suffix .zst"),
        ("x.jsonl", bz2.compress(b"{}"), {}, "give its name the suffix .bz2"),
        ("x.jsonl", lzma.compress(b"{}"), {}, "give its name the suffix .xz"),
        ("x.jsonl.xz", lzma.compress(b"{}\n") * 2, {}, "more than one xz stream; compress it"),
        ("x.jsonl.xz", lzma.compress(b"{}" * 999)[:-9], {}, "the xz file is cut off"),
        ("x.csv", b"a,b\r1,2\r", {}, "line 1: has a carriage return (\\r) in a cell without quo"),
        # The package zstandard gives what is there; Python's own readers of bz2 and xz take a later stream's damaged
        # beginning for the end of the file.
        ("x.txt.zst", ZSTD, {}, "runcated"),
        *(
            (f"x.jsonl.{suffix}", pack(b"{}\n") + b"X" + pack(b"{}\n")[1:], {}, "can't be read: ")
            for suffix, pack in {"gz": GZIP, "bz2": bz2.compress, "xz": lzma.compress}.items()
        ),
        ("x.jsonl.gz", b"{}", {}, "the suffix .gz is for a compressed file, but this file is"),
        ("x.jsonl.gz", GZIP(b"{}" * 999)[:-9], {}, "can't be read: "),
        ("x.jsonl", b'[\n{"a": 1}]', {}, 'set input.format = "json"'),
        ("x.jsonl", b'[{"a": 1}]', {}, 'set input.format = "json"'),
        ("x.jsonl", b'{\n "a": 1}', {}, 'set input.format = "json"'),
        ("x.xyz", b"a", {}, "the suffix '.xyz' is unknown; set input.format to one of jsonl,"),
        ("x", b"a", {}, "the suffix '' is unknown"),
        ("x.json", b'{"a": 1}\n{"a": 2}', {}, 'set input.format = "jsonl"'),
        ("x.json", b'{"a": 1}\n{"a": 2}', {"records": "a"}, 'set input.format = "jsonl"'),
        ("x.json", b'{"n": 1, "rows": []}', {}, "with the keys n, rows; set input.records"),
        ("x.json", b'{"n": 1, "rows": []}', {"records": "row"}, "did you mean 'rows'?"),
        ("x.json", b'{"n": 1, "rows": []}', {"records": "zz"}, "known: n, rows"),
        (
            "x.json",
            b'{"n": 1, "rows": []}',
            {"records": "n"},
            "is 1, expected a list of rows; set input.records",
        ),
        ("x.json", b'[{"n": 1}]', {"records": "n"}, "leave input.records out"),
        ("x.json", b'"text"', {}, "expected a JSON list, found 'text'"),
        ("x.json", b"  \n ", {}, "broken JSON: "),
        ("x.json", b"[" * 100_000, {}, "nested more than 200 levels deep; flatten it"),
        ("x.json", b'[{"a": "\xff"}]', {}, "broken JSON: 'utf-8' codec can't decode"),
        ("x.json", b'[{"a": "\\ud83d"}]', {}, "broken JSON: "),
        ("x.csv", b"a,,b\n1,2,3\n", {}, "line 1: column 2 of 3 has no name"),
        ("x.csv", b"a,b,a\n1,2,3\n", {}, "line 1: two columns are named 'a'"),
        ("x.csv", b"\n\n", {}, "has only blank lines"),
        ("x.csv", b'{"a": 1}\n', {}, 'set input.format to "json" or "jsonl"'),
        ("x.csv", b"\xff,b\n1,2\n", {}, "line 1: the header is not UTF-8"),
        ("x.csv", b'a,b\n1,2\n3,"open\n4,5\n', {}, "lines 3-4: unexpected end of data; the quote"),
        ("x.csv", b'"a,b\n', {}, "line 1: the header can't be read"),
        ("x.csv", b"a,b\n1,cut\roff\n3,4\n", {}, "line 2: has a carriage return (\\r) in a cell"),
        ("x.csv", b'a,b\n1,cut\roff,"x\ny"\n', {}, "it is unknown where the row ends; put the"),
        ("x.parquet", b"a,b\n1,2\n" * 9, {}, "not a Parquet file"),
        ("x.jsonl", b'{"a": 1}', {"format": "parquet"}, "not a Parquet file"),
        ("x.jsonl", b'{"kind": 1}', {"where": {"knd": 1}}, "did you mean 'kind'?"),
        ("x.jsonl", b'{"kind": 1}', {"where": {"zz": 1}}, "the file's first readable row has no"),
    ],
)
def test_an_unreadable_input_is_named_with_a_way_out(
    tmp_path: Path, name: str, content: bytes, keys: dict[str, Any], problem: str
) -> None:
    path = write(tmp_path, name, content)
    with pytest.raises(InputError) as stop:
        rows_of(path, **keys)
    assert str(stop.value).startswith(str(path))
    assert problem in str(stop.value)


# A path that is no file is refused at once: a pipe would hang, a device has no end.

FIFO, SOCKET, DEVICE = "it is a named pipe", "it is a socket", "it is a device"


def make(path: Path, kind: str) -> None:
    if kind == FIFO:
        os.mkfifo(path)
    elif kind == SOCKET:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    else:
        path.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    ("path", "name", "kind"),
    [
        ("rows.jsonl", "rows.jsonl", FIFO),
        ("rows.csv", "rows.csv", SOCKET),
        ("rows.parquet", "rows.parquet", DEVICE),
        ("rows.jsonl.gz", "rows.jsonl.gz", FIFO),
        ("part-*.jsonl", "part-1.jsonl", FIFO),
        ("part-0.jsonl", "user.txt", FIFO),
        ("part-0.jsonl", "user.txt", DEVICE),
    ],
)
@pytest.mark.timeout(20)
@pytest.mark.usefixtures("in_an_empty_folder")
def test_what_is_no_file_is_refused_at_once(path: str, name: str, kind: str) -> None:
    write(Path(), "part-0.jsonl", '{"q": 1}\n')
    if name != "user.txt":
        write(Path(), "user.txt", "{{ q }}")
    make(Path(name), kind)
    prompt, engine = {"user_file": "user.txt"}, {"kind": "dry-run"}
    write_job(Path(), input={"path": path}, prompt=prompt, engine=engine)
    refused = batchkit("run", "job.toml").refused()
    assert f"{name}: can't be read: {kind}, not a file" in refused
    assert not Path("output").exists()
