"""Rows come from any format, lazily; a broken row fails alone, a broken file stops by name."""

from __future__ import annotations

import bz2
import functools
import gzip
import io
import json
import lzma
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec import AbstractFileSystem
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchkit.config.tables import InputTable
from batchkit.config.urls import CHECK_KEYS
from batchkit.errors import InputError, RequestError
from batchkit.sources import count_rows, json_list, never, read_rows
from batchkit.sources.finding import input_files
from batchkit.sources.fingerprint import fingerprint
from batchkit.sources.reader import Found
from tests.support.sources import ROWS, rows_of, table, write, write_rows
from tests.support.web import Files, web_server

FORMATS = ["rows.jsonl", "rows.json", "rows.csv", "rows.parquet", "rows.xlsx"]
ALL_TEXT = ["rows.csv"]  # those whose values have no types
SUFFIX = {gzip.compress: "gz", bz2.compress: "bz2", lzma.compress: "xz"}


# Every format


@pytest.mark.parametrize("name", FORMATS)
def test_format_is_known_by_suffix(tmp_path: Path, name: str) -> None:
    rows = rows_of(write_rows(tmp_path, name), id="id")
    assert [(row.index, row.id, row.error) for row in rows] == [
        (n, "abcd"[n], None) for n in range(4)
    ]
    years = [row.fields["year"] for row in rows]
    expected = [2020, 2021, 2021, 2020]
    assert years == ([*map(str, expected)] if name in ALL_TEXT else expected)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("keys", "indices"),
    [
        ({}, [0, 1, 2, 3]),
        ({"limit": 2}, [0, 1]),
        ({"limit": 99}, [0, 1, 2, 3]),
        ({"where": {"kind": "Fact"}}, [0, 2]),
        ({"where": {"kind": ["Fact", "Trend"]}}, [0, 2, 3]),
        ({"where": {"year": 2020}}, [0, 3]),
        ({"where": {"year": "2021"}}, [1, 2]),
        ({"where": {"kind": "Fact", "year": 2021}}, [2]),
        ({"where": {"kind": ["Fact", "Trend"]}, "limit": 2}, [0, 2]),
        ({"where": {"kind": "none such"}}, []),
    ],
)
def test_where_and_limit_keep_the_index_of_the_unfiltered_input(
    tmp_path: Path, name: str, keys: dict[str, Any], indices: list[int]
) -> None:
    path = write_rows(tmp_path, name)
    assert [row.index for row in rows_of(path, **keys)] == indices
    assert count_rows(table(path, **keys)) == len(indices)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "keys",
    [{}, {"limit": 3}, {"where": {"year": 2021}}, {"where": {"year": [2020, 2021]}, "limit": 3}],
)
@pytest.mark.parametrize("skipped", [{0}, {0, 1}, {1, 3}, {0, 1, 2, 3}])
def test_skipped_rows_count_toward_the_limit(
    tmp_path: Path, name: str, keys: dict[str, Any], skipped: set[int]
) -> None:
    path = write_rows(tmp_path, name)
    rest = [row.index for row in read_rows(table(path, **keys), skip=skipped.__contains__)]
    assert rest == [row.index for row in rows_of(path, **keys) if row.index not in skipped]


def test_index_runs_on_over_the_sorted_files_of_a_glob(tmp_path: Path) -> None:
    write_rows(tmp_path, "part-1.csv", ROWS[2:])
    write_rows(tmp_path, "part-0.jsonl", ROWS[:2])
    (tmp_path / "part-folder").mkdir()
    source = table(tmp_path / "part-*", id="id")
    assert input_files(source) == [str(tmp_path / "part-0.jsonl"), str(tmp_path / "part-1.csv")]
    assert [(row.index, row.id) for row in read_rows(source)] == [*enumerate("abcd")]
    assert [row.index for row in read_rows(source, skip={0, 2}.__contains__)] == [1, 3]
    assert count_rows(source) == 4
    assert count_rows(table(tmp_path / "part-*", limit=3)) == 3


def test_folder_of_files_that_a_glob_finds_is_refused(tmp_path: Path) -> None:
    """As Spark writes: else its rows would be missing."""
    write_rows(tmp_path, "a.jsonl", ROWS[:2])
    (tmp_path / "b.jsonl").mkdir()
    write_rows(tmp_path / "b.jsonl", "part-0.jsonl", ROWS[2:])
    with pytest.raises(InputError, match=r"b\.jsonl: is a folder; name its files"):
        input_files(table(tmp_path / "*.jsonl"))
    assert len(input_files(table(tmp_path / "*"))) == 1


def test_a_path_that_exists_is_no_glob(tmp_path: Path) -> None:
    assert len(rows_of(write_rows(tmp_path, "run[1].jsonl"))) == 4


def test_id_is_the_index_unless_a_field_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "x.jsonl", '{"n": 7}\n{"n": null}\n{"m": 1, "name": 2}\n')
    assert [row.id for row in rows_of(path)] == ["0", "1", "2"]
    seven, null, missing = rows_of(path, id="n")
    assert (seven.id, seven.error) == ("7", None)
    assert (null.id, missing.id) == ("no-id:1", "no-id:2")
    assert "row 1: the field 'n' (input.id) is null" in str(null.error)
    assert "known: m, name" in str(missing.error)


@pytest.mark.parametrize("pack", SUFFIX)
@pytest.mark.parametrize("name", FORMATS)
def test_file_of_any_format_may_be_compressed(
    tmp_path: Path, name: str, pack: Callable[[bytes], bytes]
) -> None:
    content = write_rows(tmp_path, name).read_bytes()
    packed = write(tmp_path, f"{name}.{SUFFIX[pack]}", pack(content))
    assert [row.id for row in rows_of(packed, id="id")] == ["a", "b", "c", "d"]
    assert count_rows(table(packed)) == 4


@pytest.mark.parametrize("name", FORMATS)
def test_urls_go_through_fsspec(tmp_path: Path, name: str) -> None:
    path = write_rows(tmp_path, name)
    with fsspec.open(f"memory://sources/{name}", "wb") as file:
        file.write(path.read_bytes())
    for url in (f"memory://sources/{name}", f"memory://sources/*{path.suffix}", f"file://{path}"):
        assert [row.id for row in rows_of(url, id="id")] == ["a", "b", "c", "d"]
        assert count_rows(table(url)) == 4
    assert fingerprint(table(f"memory://sources/{name}"))[0].size == path.stat().st_size
    fsspec.filesystem("memory").rm("/sources", recursive=True)


def test_an_unchanged_file_keeps_its_fingerprint_unread(tmp_path: Path) -> None:
    path = write(tmp_path, "x.jsonl", b"one\n")
    [old] = fingerprint(table(path))
    assert (old.path, old.size) == (str(path), 4)
    noted = replace(old, sha256="as it was noted")
    assert fingerprint(table(path), [noted]) == [noted]
    assert fingerprint(table(path), [replace(noted, ctime_ns=0)]) == [old]


# JSON lines


def test_skipped_lines_are_not_parsed(tmp_path: Path) -> None:
    path = write(tmp_path, "x.jsonl", b'not JSON\n\xff\n{"a": 1}\n')
    [row] = read_rows(table(path, format="jsonl"), skip=lambda index: index < 2)
    assert (row.index, row.fields) == (2, {"a": 1})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(), values, max_size=3),
    max_leaves=5,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    rows=st.lists(st.dictionaries(st.text(), json_values, max_size=3), min_size=1),
    ends=st.lists(st.sampled_from(["\n", "\r\n", "\n\n", "\n \t\n", "\r\n\v\r\n"]), min_size=1),
    skipped=st.sets(st.integers(0, 10)),
)
def test_json_lines_round_trip(
    tmp_path: Path, rows: list[dict[str, Any]], ends: list[str], skipped: set[int]
) -> None:
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    text = "".join(line + ends[i % len(ends)] for i, line in enumerate(lines))
    source = table(write(tmp_path, "x.jsonl", text), format="jsonl")
    read = {row.index: row.fields for row in read_rows(source, skip=skipped.__contains__)}
    assert read == {i: row for i, row in enumerate(rows) if i not in skipped}
    assert count_rows(source) == len(rows)


# JSON


def streamed(path: Path, **keys: Any) -> Iterator[Found]:
    """The rows of a JSON file that is parsed as a stream because it is larger than 10 bytes."""
    return json_list.read(str(path), table(path, **keys), never, 0, max_whole_bytes=10)


@pytest.mark.parametrize("tail", ['{"a": 2}, {"a"', '{"a": 2}, {"a": NaN}]', '{"a": 2}] x'])
def test_rows_before_the_break_in_a_large_json_file_are_yielded(tmp_path: Path, tail: str) -> None:
    path = write(tmp_path, "x.json", '[{"a": 1}, ' + tail)
    with pytest.raises(InputError, match=r"broken JSON: "):
        next(read_rows(table(path)))
    rows = streamed(path)
    assert [next(rows), next(rows)] == [{"a": 1}, {"a": 2}]
    with pytest.raises(InputError, match="broken JSON after 2 rows"):
        next(rows)


# Parquet


def test_a_parquet_value_that_python_cannot_hold_fails_its_row_alone(tmp_path: Path) -> None:
    text = pa.array([b"ok", b"\xff", b"fine"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"t": text}), tmp_path / "x.parquet")
    first, broken, last = rows_of(tmp_path / "x.parquet")
    assert (first.fields, last.fields) == ({"t": "ok"}, {"t": "fine"})
    assert "row 1, column 't': 'utf-8' codec can't decode" in str(broken.error)


# What a file holds

BATCH_LINE = {
    "custom_id": "r-1",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
}
BATCH_FIELDS = {name: value for name, value in BATCH_LINE.items() if name != "method"}
RECORDS = {"meta": {"n": [0]}, "data": {"queries": [{"a": 1, "b": 2.5}, {"a": 2**62}]}}
USUAL = [{"q": "one\r2", "a": "3\n4"}, {"q": "5", "a": "6"}]


def prompts(*texts: str) -> list[dict[str, str]]:
    return [{"prompt": text} for text in texts]


@pytest.mark.parametrize(
    ("name", "content", "keys", "expected"),
    [
        ("x.jsonl", b'\xef\xbb\xbf\r\n{"a": 1}\r\n\r\n \t\r\n{"a": "\xc3\xa9"}', {}, [{"a": 1}, {"a": "é"}]),
        ("x.JSONL.gz", gzip.compress(b'{"a": 1}\n{"a": 2}\n'), {}, [{"a": 1}, {"a": 2}]),
        (
            "x.csv",
            '\ufeffq,a\r\n"one, ""two""\r\nthree",é\r\n\r\n,\r\n'.encode(),
            {},
            [{"q": 'one, "two"\r\nthree', "a": "é"}, {"q": "", "a": ""}],
        ),
        *(
            ("x.csv", end.join(["q,a", '"one\r2","3\n4"', "5,6", ""]).encode(), {}, USUAL)
            for end in ("\n", "\r\n", "\r\r\n")
        ),
        ("x.tsv", b"a\tb\n1,5\t2\n", {}, [{"a": "1,5", "b": "2"}]),
        ("x.csv", b"a\n" + b"x" * 1_000_000 + b"\n", {}, [{"a": "x" * 1_000_000}]),
        ("x.json", json.dumps(RECORDS, indent=2).encode(), {"records": "data.queries"}, RECORDS["data"]["queries"]),
        ("x.json", b"[]", {}, []),
        ("x.json", b'{"rows": []}', {"records": "rows"}, []),
        ("x.txt", b"  Hi there \r\n\n{not json}\nlast", {}, prompts("  Hi there ", "{not json}", "last")),
        ("x.jsonl", b"\n" + json.dumps(BATCH_LINE).encode() + b"\n", {}, [BATCH_FIELDS]),
        ("x.jsonl", json.dumps(BATCH_LINE).encode(), {"format": "openai-batch"}, [BATCH_FIELDS]),
        ("x.jsonl", json.dumps(BATCH_LINE).encode(), {"format": "jsonl"}, [BATCH_LINE]),
    ],
    ids=range(15),
)  # fmt: skip
def test_what_a_file_holds(
    tmp_path: Path, name: str, content: bytes, keys: dict[str, Any], expected: list[Any]
) -> None:
    path = write(tmp_path, name, content)
    rows = rows_of(path, **keys)
    assert [row.fields for row in rows] == expected
    assert [row.index for row in rows] == [*range(len(rows))]
    for row, fields in zip(rows, expected, strict=True):
        assert all(type(value) is type(fields[name]) for name, value in row.fields.items())
    assert count_rows(table(path, **keys)) == len(expected)
    batch = [row.id for row in rows if expected == [BATCH_FIELDS]]
    assert batch in ([], ["r-1"])


# A row that is broken fails alone


def nested(levels: int, opening: bytes = b"[", end: bytes = b"]") -> bytes:
    """The value of a field, in an object that is one level more."""
    return (
        b'{"custom_id": "x", "body": {}, "deep": ' + opening * levels + b"1" + end * levels + b"}"
    )


TOO_DEEP = "nested more than 200 levels deep; flatten it"
BROKEN_LINES = [
    (b'{"a": 1,}', "not valid JSON: "),
    (b'{"a": 1', "not valid JSON: "),
    (b'{"a": NaN}', "in '{\"a\": NaN}'; fix or remove the line"),
    (b'{"a": 1} {"a": 2}', "(byte 10)"),
    (b"[1, 2]", "expected a JSON object, found [1, 2]; fix or remove the line"),
    (b"null", "expected a JSON object, found None"),
    (b'"text"', "expected a JSON object, found 'text'"),
    (b'{"a": "\xff"}', "not UTF-8: byte 0xff at byte 8; save the file as UTF-8"),
    (b'{"n": ' + b"9" * 5000 + b"}", "Integer value out of range"),
    (b"[" * 5000, TOO_DEEP),
    (nested(200), TOO_DEEP),
    (nested(250, b'{"a": ', b"}"), TOO_DEEP),
]
BROKEN_CELLS = [
    (b"1", "line 4: found 1 cells for 2 columns: ['1']"),
    (b"1,2,3", "line 4: found 3 cells for 2 columns: ['1', '2', '3']"),
    (b'"x\ny"', "lines 4-5: found 1 cells for 2 columns"),
    (b"1,\xff", "line 4: not UTF-8 in column 'b'"),
    (b'"a"b,2', "line 4: ',' expected after '\"'; check the quotes in this line"),
    (b"x" * 999, "…; add the missing cells"),
]
BROKEN_REQUESTS = [
    (b'{"body": {}}', "line 2: custom_id must be a text, found None"),
    (b'{"custom_id": 5, "body": {}}', "custom_id must be a text, found 5"),
    (b'{"custom_id": "", "body": {}}', "custom_id must be a text, found ''"),
    (b'{"custom_id": "x"}', "line 2: body must be an object, found None"),
    (b'{"custom_id": "x", "body": "hi"}', "body must be an object, found 'hi'"),
    (b"{", "line 2: not valid JSON"),
    (nested(200), TOO_DEEP),
]
REQUEST = json.dumps(BATCH_LINE).encode()


@pytest.mark.parametrize(
    ("name", "before", "broken", "after", "where", "problem"),
    [
        *(("x.jsonl", b'{"a": 1}\n', broken, b'\n{"a": 3}\n', {"a": [1, 3]}, problem) for broken, problem in BROKEN_LINES),
        *(("x.csv", b'a,b\n"1\n1",2\n', broken, b"\n3,4\n", {"b": ["2", 4]}, problem) for broken, problem in BROKEN_CELLS),
        *(("x.jsonl", REQUEST + b"\n", broken, b"\n" + REQUEST, {}, problem) for broken, problem in BROKEN_REQUESTS),
        ("x.json", b'[{"a": 1}, ', b'"text"', b', {"a": 3}]', {}, "row 1 of the list (counted from 0): expected a JSON object, found 'text'"),
        ("x.json", b"[%b, " % nested(199), nested(200), b", %b]" % nested(199), {}, TOO_DEEP),
        ("x.txt", b"  Hi there \r\n\n", b"\xff", b"\n{not json}", {}, "line 3: not UTF-8: byte 0xff at byte 1"),
    ],
)  # fmt: skip
def test_a_broken_row_fails_alone(
    tmp_path: Path,
    name: str,
    before: bytes,
    broken: bytes,
    after: bytes,
    where: dict[str, Any],
    problem: str,
) -> None:
    path = write(tmp_path, name, before + broken + after)
    first, bad, last = rows_of(path, where=where)
    assert (first.error, first.index, last.error, last.index) == (None, 0, None, 2)
    assert first.fields
    assert last.fields
    assert (bad.index, bad.fields) == (1, {})
    assert isinstance(bad.error, RequestError)
    assert str(bad.error).startswith(f"{path} ")
    assert problem in str(bad.error)
    assert len(str(bad.error)) < 400


# Inputs that stop the run


@pytest.mark.parametrize("suffix", ["gz", "bz2", "zst"])
def test_packed_streams_are_one_file(tmp_path: Path, suffix: str) -> None:
    zstd = functools.partial(pa.compress, codec="zstd", asbytes=True)
    pack: Any = {"gz": gzip.compress, "bz2": bz2.compress, "zst": zstd}[suffix]
    streams = [pack(b'{"a": %d}\n' % n * 30_000) for n in range(3)]
    path = write(tmp_path, f"x.jsonl.{suffix}", b"".join(streams))
    assert [row.fields["a"] for row in rows_of(path)] == [n // 30_000 for n in range(90_000)]


@pytest.mark.parametrize("store", ["{}", "memory://c.zip"])
def test_members_of_a_zip_archive_are_named_and_the_archive_itself_is_refused(
    tmp_path: Path, store: str
) -> None:
    """Of one in a store, fsspec reads the first member alone."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for n, name in enumerate(["a.jsonl", "b.jsonl.gz", "c.csv"]):
            line = b"n\n2\n" if name == "c.csv" else b'{"n": %d}' % n
            archive.writestr(name, gzip.compress(line) if name.endswith("gz") else line)
    local = write(tmp_path, "c.zip", content.getvalue())
    fsspec.filesystem("memory").pipe_file("/c.zip", content.getvalue())
    place = store.format(local)
    for pattern, found in (("*", [0, 1, "2"]), ("*.jsonl", [0]), ("c.csv", ["2"])):
        url = f"zip://{pattern}::{place}"
        assert [row.fields["n"] for row in rows_of(url)] == found
    with pytest.raises(InputError, match="is a zip archive or an Excel workbook; unpack it"):
        rows_of(place, format="jsonl")


def test_packed_file_is_read_by_its_name_in_a_signed_url(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    name = "x.jsonl.gz"
    write(tmp_path, name, gzip.compress(b'{"a": 1}'))
    with web_server(functools.partial(Files, directory=str(tmp_path))) as url:
        (row,) = rows_of(f"{url}/{name}?v=1&X-Sig=a.b")
    assert row.fields == {"a": 1}


def test_missing_files_are_named(tmp_path: Path) -> None:
    write_rows(tmp_path, "queries.jsonl")
    for call in (rows_of, lambda path: count_rows(table(path)), lambda p: fingerprint(table(p))):
        with pytest.raises(InputError, match=r"no file matches; .*did you mean 'queries.jsonl'\?"):
            call(tmp_path / "querys.jsonl")
    for path, problem in {
        f"{tmp_path}/*.csv": "no file matches",
        "memory://nowhere/*.csv": "no file matches",
        "memory://nowhere/x.csv": "no such file",
        str(tmp_path): "is a folder; name its files",
        "nosuch://x.jsonl": r"nosuch://x\.jsonl: can't be opened: Protocol not known",
        "simplecache::memory://nowhere/x.csv": "may keep an old copy of a file; remove simplecache:: from input.path",
    }.items():
        with pytest.raises(InputError, match=problem):
            rows_of(path, format="jsonl")
    with pytest.raises(InputError, match=r"input\.path is not set"):
        list(read_rows(InputTable()))


class Closed(AbstractFileSystem):  # type: ignore[misc]
    """A store that refuses the keys, with a text of two lines."""

    protocol = "closed"

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        raise PermissionError("Forbidden\nRequest 7.")

    ls = _open = info


@pytest.mark.parametrize("read", [rows_of, lambda p: fingerprint(table(p))])
@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("memory://nowhere/x.csv", "no such file; check input.path"),
        ("closed://bucket/x.csv", f"can't be opened: Forbidden Request 7; {CHECK_KEYS}"),
        ("closed://bucket/*.csv", f"can't be opened: Forbidden Request 7; {CHECK_KEYS}"),
    ],
)
def test_a_store_s_error_has_advice_whoever_reads_first(
    read: Callable[[str], object], path: str, problem: str
) -> None:
    fsspec.register_implementation("closed", Closed, clobber=True)
    with pytest.raises(InputError) as caught:
        read(path)
    assert str(caught.value) == f"{path}: {problem}"


def test_where_is_checked_on_the_first_row_even_if_that_row_is_skipped(tmp_path: Path) -> None:
    path = write(tmp_path, "x.jsonl", '{"a": 1, "b": 1}\n{"a": 2}\n{"a": 3, "b": 1}\n')
    source = table(path, where={"b": 1})
    assert [row.index for row in read_rows(source)] == [0, 2]
    assert [row.index for row in read_rows(source, skip={0}.__contains__)] == [2]


@pytest.mark.parametrize("place", ["{}", "[{}]", '{{"deep": {}}}'])
@pytest.mark.parametrize("number", [10**19 + 1, -(10**22) - 3, 12345678901234567890123])
def test_whole_numbers_beyond_64_bits_keep_their_digits(
    tmp_path: Path, place: str, number: int
) -> None:
    other = '{"n": 1.5e300, "t": "12345678901234567890123"}'
    path = write(tmp_path, "x.jsonl", f'{{"n": {place.format(number)}}}\n{other}\n')
    first, second = rows_of(path)
    assert str(number) in str(first.fields["n"])
    assert second.fields == {"n": 1.5e300, "t": "12345678901234567890123"}


def test_json_list_keeps_them_too_unless_it_is_large(tmp_path: Path) -> None:
    path = write(tmp_path, "x.json", '[{"n": 12345678901234567890123}]')
    assert rows_of(path)[0].fields == {"n": 12345678901234567890123}
    with pytest.raises(InputError, match="beyond 64 bits; write it as text"):
        list(streamed(path))
    write(tmp_path, "x.json", '{"rows": [{"n": 1}, {"n": 2}]}')
    assert list(streamed(path, records="rows")) == [{"n": 1}, {"n": 2}]
    with pytest.raises(InputError, match=r"has no list of rows at input\.records = 'row'; check"):
        list(streamed(path, records="row"))
