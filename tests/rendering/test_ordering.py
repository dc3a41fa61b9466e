"""What is alike travels together, long answers come first at the end, and no row is lost on the way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchkit.errors import InputError
from batchkit.execution.processor import ProductionBatchProcessor
from batchkit.rendering.ordering import LOOK_AHEAD_BYTES, size_of, well_ordered
from batchkit.types import Row, RowHint
from tests.support.dry_runs import job
from tests.support.rendering import renderer
from tests.support.rows import read_jsonl, write_jsonl


def rows_of(hints: list[RowHint]) -> list[Row]:
    return [Row(n, str(n), {"hint": hint}) for n, hint in enumerate(hints)]


def ordered(hints: list[RowHint], look_ahead: int = 100) -> list[int]:
    rows = iter(rows_of(hints))
    found = well_ordered(rows, lambda row: row.fields["hint"], look_ahead)
    return [row.index for row, _ in found]


def test_neighbours_that_begin_alike_have_one_number() -> None:
    hints = [RowHint(beginning, 0) for beginning in ("a.png", "b.png", "a.png", "c.png")]
    found = [*well_ordered(iter(rows_of(hints)), lambda row: row.fields["hint"], 100)]
    assert [row.index for row, _ in found] == [0, 2, 1, 3]
    a, again, b, c = (group for _, group in found)
    assert a == again
    assert len({a, b, c}) == 3


def test_rows_that_begin_alike_stand_together_in_the_order_of_their_first() -> None:
    texts = ["You read: cats. Who?", "You read: dogs. Who?"]
    documents = [text.replace("Who?", "x" * 300) for text in texts]
    beginnings = [f"{documents[n % 2]} {n}" for n in range(6)]
    assert ordered([RowHint(b, 0) for b in beginnings]) == [0, 2, 4, 1, 3, 5]


def test_rows_of_one_adapter_stand_together_and_blocks_begin_with_the_last_one() -> None:
    hints = [RowHint(beginning, 0, lora) for beginning in "xy" for lora in ("a", "b", "")] * 2
    assert ordered(hints) == [2, 8, 5, 11, 0, 6, 3, 9, 1, 7, 4, 10]
    loras = [hints[index].lora for index in ordered(hints, look_ahead=6)]
    assert sum(a != b for a, b in pairwise(loras)) == 4


def test_the_longest_answers_come_first_at_the_end_only() -> None:
    lengths = [1, 5, 2, 6, 3, 7, 4, 8]
    assert ordered([RowHint("same", n) for n in lengths], look_ahead=4) == [0, 1, 2, 3, 4, 7, 5, 6]
    assert ordered([RowHint("same", n) for n in lengths]) == [7, 5, 3, 1, 6, 4, 2, 0]


@given(
    st.lists(
        st.tuples(st.sampled_from(["", "a", "ab", "b" * 300, "b" * 300 + "c"]), st.integers())
    ),
    st.integers(2, 9),
)
def test_every_row_comes_once_and_none_is_overtaken_by_more_than_twice_the_look_ahead(
    seen: list[tuple[str, int]], look_ahead: int
) -> None:
    order = ordered([RowHint(*pair) for pair in seen], look_ahead)
    assert sorted(order) == list(range(len(seen)))
    for place, index in enumerate(order):
        assert sum(other > index for other in order[:place]) < 2 * look_ahead


_LARGE = b"x" * (LOOK_AHEAD_BYTES // 4)


@pytest.mark.parametrize(
    "value",
    [[{"data": _LARGE}], (_LARGE,), {_LARGE}, bytearray(_LARGE), np.frombuffer(_LARGE, np.uint8)],
)
def test_large_rows_are_not_all_held(value: Any) -> None:
    read = 0

    def rows() -> Iterator[Row]:
        nonlocal read
        for n in range(100):
            read += 1
            yield Row(n, str(n), {"image": value})

    found = well_ordered(rows(), lambda row: RowHint("", 0), 1000)
    for n in range(90):
        assert next(found)[0].index == n
        assert read <= n + 5


def test_a_list_that_contains_itself_is_large() -> None:
    circle: list[Any] = []
    circle.append(circle)
    assert size_of([circle], 1000) > 1000


def test_what_was_read_before_an_error_comes_before_it() -> None:
    def rows() -> Iterator[Row]:
        yield from rows_of([RowHint("a", 1), RowHint("a", 2)])
        raise InputError("the rest is unreadable")

    found = well_ordered(rows(), lambda row: row.fields["hint"], 100)
    assert [next(found)[0].index, next(found)[0].index] == [1, 0]
    with pytest.raises(InputError):
        next(found)


def hint(prompt: Mapping[str, Any], fields: Mapping[str, Any], **tables: Any) -> RowHint:
    return renderer(prompt=prompt, **tables).hint(Row(0, "0", fields))


def test_the_hint_of_a_row_comes_from_what_its_prompt_names() -> None:
    one_image = {"user": "{{ q }}", "images": ["{{ file }}"]}
    assert hint(one_image, {"q": "a", "file": "1.png"}).beginning == "1.png"
    holds_it = {"user": "{{ q }}", "images": ["{{ image }}"]}
    both = [hint(holds_it, {"q": q, "image": b"pixels"}).beginning for q in "ab"]
    assert both[0] == both[1] != hint(holds_it, {"q": "a", "image": b"others"}).beginning
    text = {"user": "{{ table }} {{ q }}", "texts": {"table": "{{ file }}"}}
    assert hint(text, {"q": "a", "file": "1.html"}).beginning == "1.html"
    assert hint({"user": "{{ b }} {{ a }}"}, {"a": 1, "b": "x"}).beginning == "x\n1"
    assert hint({}, {"prompt": "p"}).beginning == "p"
    messages = [{"role": "user", "content": "hello"}]
    assert "hello" in hint({}, {"messages": messages}).beginning
    sampling = {"max_tokens": 5, "sampling_column": "own"}
    assert hint({}, {"prompt": "p"}, sampling=sampling).max_tokens == 5
    own = {"prompt": "p", "own": {"max_tokens": 9}}
    assert hint({}, own, sampling=sampling).max_tokens == 9


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"q": "a"},
        {"q": "a", "file": None},
        {"q": "a", "file": "1.png", "own": "no table"},
        {"q": "a", "file": "1.png", "own": {"max_tokens": "many"}},
        {"messages": "none"},
    ],
)
def test_a_row_that_cannot_be_rendered_has_a_hint_too(fields: dict[str, Any]) -> None:
    prompt = {"user": "{{ q }}", "images": ["{{ file }}"]}
    found = hint(prompt, fields, sampling={"sampling_column": "own"})
    assert found.max_tokens == 0


def test_rows_that_fail_are_like_no_other_so_that_they_do_not_all_come_at_once() -> None:
    made = renderer(prompt={"user": "{{ a }} {{ b }}"}, vars={"b": "same"})
    for fields, n_kinds in (({"other": 1}, 5), ({"a": 1}, 1)):
        assert len({made.hint(Row(n, str(n), fields)).beginning for n in range(5)}) == n_kinds


@pytest.mark.parametrize("given", ["file", "list", "iterator"])
def test_a_run_reorders_what_it_can_read_again(given: str, tmp_path: Path) -> None:
    asked = [{"prompt": f"{n}", "own": {"max_tokens": n}} for n in range(1, 30)]
    table: dict[str, Any] = {
        "sampling": {"sampling_column": "own"},
        "run": {"max_in_flight": 1, "render_threads": 1},
        "output": {"dir": str(tmp_path)},
    }
    rows: Any = None if given == "file" else asked if given == "list" else iter(asked)
    if given == "file":
        table["input"] = {"path": str(write_jsonl(tmp_path / "rows.jsonl", asked))}
    summary = ProductionBatchProcessor(job(**table), quiet=True).process(rows)
    assert summary.ok == len(asked)
    order = [record["index"] for record in read_jsonl(Path(summary.folder) / "results.jsonl")]
    assert order == (list(range(29)) if given == "iterator" else list(range(28, -1, -1)))
