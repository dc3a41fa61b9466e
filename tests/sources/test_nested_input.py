"""Values nested more deeply than 200 levels fail their row or their file."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchkit.errors import InputError
from tests.support.sources import rows_of, write

MAX_DEPTH = 200


def nested(depth: int) -> str:
    """A value of ``depth`` levels."""
    return "[" * depth + "1" + "]" * depth


def member(value: str) -> str:
    """An object, itself one level."""
    return f'{{"custom_id": "a", "body": {{}}, "deep": {value}}}'


FORMS = {
    "x.json": lambda members: f"[{', '.join(members)}]",
    "x.jsonl": "\n".join,
}


@pytest.fixture(params=["whole", "stream"])
def however_read(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A JSON list is read at once, or as one that is too large for that."""
    if request.param == "stream":
        monkeypatch.setattr("batchkit.sources.json_list.MAX_WHOLE_BYTES", 10)


@pytest.mark.usefixtures("however_read")
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("format_name", ["auto", "openai-batch"])
@pytest.mark.parametrize("deep", [nested(MAX_DEPTH), nested(300), '{"a": ' * 250 + "1" + "}" * 250])
def test_member_nested_too_deeply_fails_alone(
    tmp_path: Path, name: str, format_name: str, deep: str
) -> None:
    good = member(nested(MAX_DEPTH - 1))
    path = write(tmp_path, name, FORMS[name]([good, member(deep), good]))
    keys = {} if name == "x.json" else {"format": format_name}
    first, broken, last = rows_of(path, **keys)
    assert (first.error, last.error, last.index) == (None, None, 2)
    assert "200 levels" in str(broken.error)
    if keys.get("format") != "openai-batch":
        assert {**first.fields, "custom_id": "a"}.keys() <= json.loads(good).keys() | {"url"}


def test_file_of_more_levels_than_the_parser_takes_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "x.json", f"[{nested(100_000)}]")
    with pytest.raises(InputError, match=r"x.json: nested more than 200 levels deep"):
        rows_of(path)


@pytest.mark.parametrize("form", ["list", "struct"])
def test_parquet_of_many_levels_is_refused(tmp_path: Path, form: str) -> None:
    kind: pa.DataType = pa.int32()
    for _ in range(250):
        kind = pa.list_(kind) if form == "list" else pa.struct([("a", kind)])
    table = pa.table({"x": pa.array([None], kind)})
    pq.write_table(table, tmp_path / "x.parquet", store_schema=False)
    with pytest.raises(InputError, match="too deeply nested"):
        rows_of(tmp_path / "x.parquet")
