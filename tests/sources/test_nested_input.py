"""Values nested more deeply than 200 levels fail their row, in bounded memory, in every format."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchkit.config.tables import InputTable
from batchkit.errors import InputError
from batchkit.sources import read_rows
from batchkit.sources.depth import ShallowJson, is_too_deep
from batchkit.types import Row
from tests.support.own_process import batchkit
from tests.support.rows import read_jsonl

MAX_DEPTH = 200
MEASURED = """
import re, sys
from pathlib import Path
from batchkit.config.tables import InputTable
from batchkit.errors import InputError
from batchkit.sources import read_rows
path, records = sys.argv[1], sys.argv[2] or None
try:
    for row in read_rows(InputTable(path=path, records=records)):
        print(row.index, "error" if row.error else "ok")
except InputError as error:
    print("stopped", str(error)[-200:])
print(int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10)
"""


def nested(depth: int, opening: str = "[", inner: str = "1") -> str:
    """A value of ``depth`` levels."""
    closing = "]" if opening == "[" else "}"
    return opening * depth + inner + closing * depth


def member(value: str) -> str:
    """An object, itself one level."""
    return f'{{"q": "]}}[{{ \\\\ \\" \\\\", "deep": {value}}}'


def read(path: Path, text: str, records: str | None = None) -> list[Row]:
    path.write_text(text)
    return list(read_rows(InputTable(path=str(path), records=records)))


def of_json(folder: Path, members: list[str]) -> list[Row]:
    return read(folder / "x.json", f"[{', '.join(members)}]")


def of_records(folder: Path, members: list[str]) -> list[Row]:
    text = f'{{"a": {{"n": [1], "b": [{", ".join(members)}]}}}}'
    return read(folder / "x.json", text, "a.b")


def of_lines(folder: Path, members: list[str]) -> list[Row]:
    return read(folder / "x.jsonl", "\n".join(members))


@pytest.mark.parametrize("read_all", [of_json, of_records, of_lines])
@pytest.mark.parametrize("depth", [MAX_DEPTH, 300, 1000, 100_000])
def test_member_nested_too_deeply_fails_alone(tmp_path: Path, read_all: object, depth: int) -> None:
    assert callable(read_all)
    good = member(nested(MAX_DEPTH - 1))
    members = [good, member(nested(depth)), member('{"a": ' * depth + "1" + "}" * depth), good]
    first, lists, objects, last = read_all(tmp_path, members)
    assert first.error is None
    assert first.fields == last.fields == json.loads(good)
    assert last.index == 3
    for row in (lists, objects):
        assert "200 levels" in str(row.error) or "depth limit" in str(row.error)
        assert len(str(row.error)) < 500


def test_deep_line_with_a_number_beyond_64_bits_fails_alone(tmp_path: Path) -> None:
    deep = nested(1010, '{"a":', str(2**70))  # few enough levels for orjson, too many for json
    first, row, last = of_lines(tmp_path, ['{"n": 1}', deep, '{"n": 2}'])
    assert (first.error, "200 levels" in str(row.error), last.error) == (None, True, None)


json_values = st.recursive(
    st.none() | st.integers() | st.text('"\\\\[]{}é', max_size=6),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=3), values),
    max_leaves=20,
)


@settings(deadline=None)
@given(value=json_values, depth=st.sampled_from([0, 150, 195, 260]), size=st.integers(1, 40))
def test_only_what_is_too_deep_is_left_out(value: Any, depth: int, size: int) -> None:
    text = nested(depth, inner=json.dumps([value, 1], ensure_ascii=False)).encode()
    shallow = ShallowJson(io.BytesIO(text))
    kept = b"".join(iter(lambda: shallow.read(size), b""))
    if depth == 260:
        assert shallow.is_deep
        assert kept == nested(250, inner="[]").encode()
    else:
        assert kept == text
        assert shallow.is_deep == is_too_deep(json.loads(text))


@pytest.mark.parametrize("text", ["x" * 10, r"\"[\n\\"])
def test_long_text_comes_in_few_blocks(text: str) -> None:
    """The parser starts again with a text at each block of it; once 4.5 s for 8 MB."""
    size, long = 1000, f'[{{"q": "{text * 100_000}"}}, {{"q": "short"}}, {"[1], " * 300_000} 2]'
    shallow = ShallowJson(io.BytesIO(long.encode()))
    blocks = list(iter(lambda: shallow.read(size), b""))
    assert b"".join(blocks) == long.encode()
    in_text = [block for block in blocks if len(block) > size]
    assert len(in_text) < 30
    assert sum(map(len, in_text)) > len(text) * 99_000
    assert len(blocks[-2]) == size  # the text is over


def test_member_that_is_no_object_and_deep_fails_alone(tmp_path: Path) -> None:
    deep, last = of_json(tmp_path, [nested(5000), member("1")])
    assert deep.error is not None
    assert last.error is None


def test_run_over_a_deep_member_answers_its_neighbours(tmp_path: Path) -> None:
    members = [member("1"), member(nested(1000)), member(nested(150)), member("2")]
    (tmp_path / "x.json").write_text(f"[{', '.join(members)}]")
    (tmp_path / "job.toml").write_text(
        'name = "a"\n[input]\npath = "x.json"\n[prompt]\nuser = "{{ q }} {{ deep }}"\n'
        '[output]\nkeep = ["deep"]\n[engine]\nkind = "dry-run"\n'
    )
    ended = batchkit("run", "job.toml", cwd=tmp_path)
    assert ended.returncode == 3, ended.stderr
    log = tmp_path / "output/a/results.jsonl"
    found = {r["index"]: r["status"] for r in read_jsonl(log)}
    assert found == {0: "ok", 1: "failed", 2: "ok", 3: "ok"}


@pytest.mark.parametrize(
    ("text", "records", "message"),
    [
        ("[" * 100_000 + "]" * 100_000, "", "0 error"),
        ("[" * 200_000, "", "stopped"),
        (f'[{{"a": 1}}, {nested(100_000)}, {{"a": 1}}]', "", "0 ok 1 error 2 ok"),
        ('[{"a": 1}, ' + '{"a":' * 100_000, "", "0 ok stopped"),
        (f'{{"b": {nested(100_000)}, "rows": [{{"a": 1}}]}}', "rows", "0 ok"),
        (f'{{"b": {nested(100_000)}, "rows": [{{"a": 1}}]}}', "", "stopped"),
        (f'{{"b": {nested(100_000)}, "rows": [{{"a": 1}}]}}', "row", "stopped"),
    ],
    ids=["closed", "open", "member", "open member", "beside", "no records", "wrong records"],
)
def test_deep_file_takes_no_memory(tmp_path: Path, text: str, records: str, message: str) -> None:
    """Once 23.9 GB for 200 KB."""
    path = tmp_path / "x.json"
    path.write_text(text)
    limit = [f"--as={6 * 2**30}", sys.executable, "-c", MEASURED, str(path), records]
    ended = subprocess.run(
        ["prlimit", *limit], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr[-500:]
    *lines, peak_mb = ended.stdout.splitlines()
    assert " ".join(lines).startswith(message)
    assert int(peak_mb) < 300


@pytest.mark.parametrize("form", ["list", "struct"])
def test_parquet_of_many_levels_is_refused(tmp_path: Path, form: str) -> None:
    kind: pa.DataType = pa.int32()
    for _ in range(250):
        kind = pa.list_(kind) if form == "list" else pa.struct([("a", kind)])
    table = pa.table({"x": pa.array([None], kind)})
    pq.write_table(table, tmp_path / "x.parquet", store_schema=False)
    with pytest.raises(InputError, match="too deeply nested"):
        list(read_rows(InputTable(path=str(tmp_path / "x.parquet"))))


def test_batch_request_nested_too_deeply_fails_alone(tmp_path: Path) -> None:
    def line(row_id: str, value: str) -> str:
        return f'{{"custom_id": "{row_id}", "body": {{"messages": {value}}}}}'

    good, deep, last = read(
        tmp_path / "x.jsonl", "\n".join([line("a", "[]"), line("b", nested(400)), line("c", "[]")])
    )
    assert (good.error, last.error, last.id) == (None, None, "c")
    assert "200 levels" in str(deep.error)


@pytest.mark.parametrize("before", range(65_500, 65_540))
def test_half_of_a_surrogate_pair_fails_its_row_alone(tmp_path: Path, before: int) -> None:
    """In a prompt it would be a question mark; ijson reads blocks of 65,536 bytes."""
    texts = [rb"\ud83d\ude00", rb"\ud83d", rb"\\ud83d", rb"\\ud83d\ude00", rb"\ud83d\ude00\\"]
    path = tmp_path / "in.json"
    rows = [b'{"t": "%b"}' % text for text in [b" " * before, *texts]]
    path.write_bytes(b"[" + b",".join(rows) + b"]")
    _, *found = read_rows(InputTable(path=str(path)))
    assert [row.fields.get("t") for row in found] == ["😀", None, r"\ud83d", None, "😀\\"]
    assert "row 2 of the list: a text has half of a surrogate pair" in str(found[1].error)
