"""What counts as rows from Python: lists of prompts, messages and dicts, tables; nothing else."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image

from batchkit.errors import ChangedError, JobError
from batchkit.execution.processor import ProductionBatchProcessor
from batchkit.execution.summary import RunSummary
from batchkit.sources.python_rows import python_rows
from tests.support.dry_runs import job

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


FIELDS = [
    {"key": "a", "q": "one", "n": 1.0},
    {"key": "b", "q": None, "n": None},
    {"key": "c", "q": "three", "n": 3.0},
]
FRAME = pd.DataFrame(FIELDS)


def process(rows: Any, **tables: dict[str, Any]) -> RunSummary:
    return ProductionBatchProcessor(job(**tables), quiet=True).process(rows)


def kept(summary: RunSummary) -> list[dict[str, Any]]:
    return [record["fields"] for record in summary.records()]


class Stream:
    """A table of any package that gives an Arrow stream, as polars and duckdb do."""

    def __init__(self, content: Any) -> None:
        self._content = content

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._content.__arrow_c_stream__(requested_schema)


class Dataset:
    """As much of a datasets.Dataset as is needed to recognise it."""

    column_names = ("key", "q", "n")

    def __init__(self, form: str | None = "torch") -> None:
        self._form = form

    def with_format(self, form: None) -> Dataset:
        return type(self)(form)

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, Any]:
        assert self._form is None, "values of Python"
        return FIELDS[index]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))


TABLES = {
    "pandas": FRAME,
    "pandas, other index": FRAME.set_index(pd.Index([7, 7, 9])),
    "pyarrow table": pa.Table.from_pylist(FIELDS),
    "pyarrow batch": pa.RecordBatch.from_pylist(FIELDS),
    "an Arrow stream": Stream(pa.Table.from_pylist(FIELDS)),
    "datasets": Dataset(),
}


@pytest.mark.parametrize("rows", [list, iter], ids=["list", "iterator"])
def test_a_column_called_id_names_the_rows(rows: Any) -> None:
    summary = process(rows([{"id": 7, "q": "tea"}, {"q": "coffee"}]), prompt={"user": "{{ q }}"})
    assert [record["id"] for record in summary.records()] == ["7", "no-id:1"]


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_rows_of_a_table_are_rows_and_resume(name: str) -> None:
    tables: dict[str, Any] = {
        "input": {"id": "key"},
        "prompt": {"user": "{{ q }} {{ n }}"},
        "output": {"keep": ["key", "q", "n"]},
    }
    summary = process(TABLES[name], **tables)
    assert (summary.ok, summary.total) == (3, 3)
    assert kept(summary) == FIELDS
    assert [record["id"] for record in summary.records()] == ["a", "b", "c"]
    again = process(TABLES[name], **tables)
    assert (again.skipped, again.ok) == (3, 3)
    with pytest.raises(ChangedError, match=r"rows from Python\): 3 rows, \w+ → 2 rows"):
        process(FRAME.iloc[:2], **tables)


def test_a_dataset_gives_what_its_transform_makes_of_the_rows() -> None:
    class Transformed(Dataset):
        format = {"type": "custom"}  # noqa: RUF012 - it is only read

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {**FIELDS[index], "q": "new" if self._form else "as stored"}

    summary = process(Transformed("custom"), prompt={"user": "{{ q }}"}, output={"keep": ["q"]})
    assert kept(summary) == [{"q": "new"}] * 3


class Undecodable(Dataset):
    """Row 1 has a broken image."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 1:
            raise OSError("image file is truncated")
        return super().__getitem__(index)


class OnlyIndexed:
    """As a torch.utils.data.Dataset with a row that can't be read."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, Any]:
        return Undecodable(None)[index]


@pytest.mark.parametrize("rows", [Undecodable(), OnlyIndexed()])
def test_row_of_a_dataset_that_cannot_be_decoded_fails_alone(rows: Any) -> None:
    tables: dict[str, Any] = {"prompt": {"user": "{{ q }}"}, "output": {"keep": ["key"]}}
    first, bad, last = process(rows, **tables).records()
    assert [first["fields"], last["fields"]] == [{"key": "a"}, {"key": "c"}]
    message = "(rows from Python) row 1: OSError: image file is truncated"
    assert (bad["status"], bad["error"]["message"]) == ("failed", message)
    assert process(rows, **tables).skipped == 3


class Tensor:
    """Not a value of Python."""


def test_streamed_dataset_gives_values_of_python_whatever_its_format() -> None:
    class Streamed:
        column_names = None

        def __init__(self, form: str | None) -> None:
            self._form = form

        def with_format(self, form: None) -> Streamed:
            return Streamed(form)

        def __iter__(self) -> Iterator[dict[str, Any]]:
            return iter([{"n": 1 if self._form is None else Tensor()}])

    summary = process(Streamed("torch"), prompt={"user": "{{ n }}"}, output={"keep": ["n"]})
    assert kept(summary) == [{"n": 1}]


def test_every_kind_of_missing_value_of_a_table_is_none() -> None:
    columns = {
        "time": [pd.NaT, pd.NaT],
        "count": pd.array([None, 5], dtype="Int64"),
        "flag": pd.array([None, True], dtype="boolean"),
        "kind": pd.Categorical([None, "x"]),
        "list": [[1, 2], None],
    }
    keep = {"keep": [*columns]}
    frame = pd.DataFrame(columns)
    first, second = kept(process(frame, prompt={"user": "{{ list }}"}, output=keep))
    assert first == {"time": None, "count": None, "flag": None, "kind": None, "list": [1, 2]}
    assert second == {"time": None, "count": 5, "flag": True, "kind": "x", "list": None}


def test_long_table_is_read_whole() -> None:
    frame = pd.DataFrame({"prompt": [f"prompt {n}" for n in range(2500)]})
    summary = process(frame, output={"keep": ["prompt"]})
    assert [fields["prompt"] for fields in kept(summary)] == list(frame["prompt"])


class Column:
    """As much of a polars.Series as is needed to recognise it."""

    dtype = str

    def __len__(self) -> int:
        return 2

    def to_list(self) -> list[str]:
        return ["a", "b"]


class Connection:
    """duckdb's has a method of this name, and is no column."""

    def dtype(self) -> None: ...


@pytest.mark.parametrize(
    "rows", [pd.Series(["a", "b"]), np.array(["a", "b"]), pa.array(["a", "b"]), Column()]
)
def test_a_column_of_prompts_is_a_list_of_prompts(rows: Any) -> None:
    keep = {"keep": ["prompt"]}
    assert kept(process(rows, output=keep)) == [{"prompt": "a"}, {"prompt": "b"}]
    assert process(rows, output=keep).skipped == 2


def test_arrow_batches_are_read_as_they_come() -> None:
    table = pa.table({"prompt": [f"prompt {n}" for n in range(2500)]})
    for _ in range(2):
        summary = process(table.to_reader(max_chunksize=100), output={"keep": ["prompt"]})
        assert [f["prompt"] for f in kept(summary)] == table["prompt"].to_pylist()
        assert summary.skipped == 0, "what can be read only once is a new run each time"


@pytest.mark.parametrize(
    "one",
    [
        "hi",
        {"prompt": "ho", "list": [1, 2]},
        {"messages": [{"role": "user", "content": "hi"}]},
        {"prompt": "hi", "list": np.zeros(2)},
        [{"images": ["a.png"], "names": ["a"], "prompt": "hi"}],
    ],
)
def test_one_prompt_and_one_dict_are_one_row(one: Any) -> None:
    summary = process(one)
    assert (summary.ok, summary.total) == (1, 1)


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        (b"bytes", "bytes"),
        (5, "int"),
        (np.zeros((2, 3)), "ndarray"),
        (np.array([1, 2, 3]), "ndarray of int"),
        ([1, 2, 3], "list of int"),
        ([["a", "b"], ["c"]], "list of list"),
        (iter([1, 2]), "list_iterator of int"),
        (io.StringIO("a\nb\n"), "StringIO"),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), "two columns are named 'a'"),
        (Stream(pa.table([[1], [2]], names=["a", "a"])), "two columns are named 'a'"),
        (Stream(pa.chunked_array([[1]])), "Stream: "),
        ({"train": Dataset(), "test": Dataset()}, "dict of columns or of datasets; pass one"),
        ({"q": ["a", "b"], "n": (1, 2)}, "dict of columns or of datasets; pass one"),
        ({"q": np.array(["a", "b"])}, "dict of columns"),
        ({"q": Column()}, "dict of columns"),
        (pd.DataFrame({("a", "b"): [1]}), "has no name: found ('a', 'b'), expected a text"),
        (Connection(), "found Connection"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_anything_else_is_refused_before_anything_is_run(rows: Any, found: str) -> None:
    process(["an earlier run"])
    with pytest.raises(JobError) as stop:
        process(rows)
    assert found in str(stop.value)
    assert stop.value.exit_code == 2
    assert [path.name for path in Path("output").iterdir() if path.is_dir()] == ["a"]


def test_one_bad_row_among_good_ones_fails_alone() -> None:
    chat = [{"role": "user", "content": "hi"}]
    summary = process(["a", 7, b"x", chat, ["no", "messages"], {"prompt": "b"}])
    assert (summary.ok, summary.failed) == (3, 3)
    found = {r["index"]: r["error"]["message"] for r in summary.records() if r["error"]}
    kinds = {1: "int", 2: "bytes", 4: "list of str"}
    give = "give a prompt, chat messages, or a dict"
    assert found == {n: f"row {n} is {kind}; {give}" for n, kind in kinds.items()}


def test_row_nested_too_deeply_or_in_itself_fails_alone() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    loop: dict[str, Any] = {"prompt": "hi"}
    loop["twice"] = [loop, loop]
    rows = [{"prompt": "a", "x": deep}, loop]
    fine = [MappingProxyType({"prompt": "fine", "x": 1}), "b"]
    summary = process([*rows, *fine], output={"keep": ["x"]})
    assert (summary.ok, summary.failed) == (2, 2)
    assert all("200 levels" in r["error"]["message"] for r in summary.records() if r["error"])


def reused() -> Iterator[dict[str, Any]]:
    row: dict[str, Any] = {"list": []}
    for n in range(5):
        row["prompt"] = f"prompt {n}"
        row["list"][:] = [{"n": n}]
        yield row


def test_generator_may_yield_one_dict_again_and_again() -> None:
    found = kept(process(reused(), output={"keep": ["prompt", "list"]}))
    assert found == [{"prompt": f"prompt {n}", "list": [{"n": n}]} for n in range(5)]


NOT_UTF8 = pa.Array.from_buffers(pa.string(), 2, pa.array([b"\xff", b"b"]).buffers())


@pytest.mark.parametrize(
    "column", [pa.array([10**7, 1], pa.date32()), NOT_UTF8, pa.chunked_array([NOT_UTF8])]
)
def test_arrow_value_that_python_cannot_hold_fails_its_row_alone(column: Any) -> None:
    summary = process(pa.table({"q": column}), prompt={"user": "{{ q }}"})
    bad, good = summary.records()
    assert (bad["status"], good["status"]) == ("failed", "ok")
    assert "(rows from Python) row 0, column 'q': " in bad["error"]["message"]
    lone = process(pa.table({"q": column[:1]}), prompt={"user": "{{ q }}"}, output={"dir": "lone"})
    assert lone.failed == 1


def chat(*keys: str) -> list[Any]:
    return [[dict.fromkeys(keys, "user")]]


ORDERS = chat("role", "content"), chat("content", "role")


@pytest.mark.parametrize(("rows", "others"), [([{"q": math.nan}], [{"q": None}]), ORDERS])
def test_rows_that_json_takes_for_equal_are_others(rows: list[Any], others: list[Any]) -> None:
    tables = {"prompt": {"user": "{{ q }}"}} if isinstance(rows[0], dict) else {}
    assert process(rows, **tables).ok == 1
    assert process(rows, **tables).skipped == 1
    with pytest.raises(ChangedError, match="rows from Python"):
        process(others, **tables)


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("it has no text")

    __repr__ = __str__


OWN = {"sampling": {"sampling_column": "own"}}


def with_image(image: Any) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": image}, {"type": "text", "text": "what is it?"}]
    return [{"role": "user", "content": parts}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("good", "bad", "tables"),
    [
        ({"q": "a"}, {"q": Unprintable()}, {"prompt": {"user": "{{ q }}"}}),
        ({"prompt": "a"}, {"prompt": Unprintable()}, {}),
        ({"prompt": "a", "id": 1}, {"prompt": "b", "id": Unprintable()}, {"input": {"id": "id"}}),
        ({"prompt": "a", "own": {}}, {"prompt": "b", "own": np.zeros(2)}, OWN),
        (with_image(Image.new("RGB", (4, 4))), with_image(np.zeros((4, 4, 3))), {}),
    ],
    ids=["field", "prompt", "id", "sampling", "image"],
)
@pytest.mark.parametrize("kind", [list, iter])
def test_value_whose_own_code_fails_fails_its_row_alone(
    kind: Any, good: Any, bad: Any, tables: dict[str, Any]
) -> None:
    summary = process(kind([good, bad, good]), **tables)
    assert (summary.ok, summary.failed, summary.exit) == (2, 1, 3)
    assert [record["index"] for record in summary.records() if record["status"] == "failed"] == [1]


def test_lists_of_a_parquet_file_in_a_dataframe_are_lists(tmp_path: Path) -> None:
    """pandas makes arrays of them: ``messages`` were refused, and a prompt had ``['a' 'b']``."""
    rows = [
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
        {"tags": ["a", "b"], "numbers": [1, 2**60], "deep": {"inner": [["x"], []]}},
        {"tags": [], "numbers": None, "deep": None},
    ]
    pa.parquet.write_table(pa.Table.from_pylist(rows[:1]), tmp_path / "chat.parquet")
    pa.parquet.write_table(pa.Table.from_pylist(rows[1:]), tmp_path / "lists.parquet")
    frames = [pd.read_parquet(tmp_path / f"{name}.parquet") for name in ("chat", "lists")]
    assert [row.fields for frame in frames for row in python_rows(frame, None).read()] == rows
