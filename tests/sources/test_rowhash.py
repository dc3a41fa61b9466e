"""The hash of a row's fields."""

from __future__ import annotations

import datetime
import io
import math
from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from batchkit.sources.rowhash import input_hash
from tests.support.images import BLUE, RED, png

ODD = [
    2**70,
    -(2**70),
    "lone \ud800 surrogate",
    float("inf"),
    b"bytes",
    bytearray(b"bytes"),
    memoryview(b"bytes"),
    datetime.datetime(2020, 1, 2, 3, 4, tzinfo=datetime.UTC),
    datetime.date(2020, 1, 2),
    datetime.timedelta(1),
    {"nested": [{"deeper": (1, None, True)}]},
    {1: "int key", 2: "other"},
    {(1, 2): "tuple key"},
    {None: 1},
    np.arange(5),
    Image.new("RGB", (2, 2), RED),
]
ODD_IDS = [str(n) for n in range(len(ODD))]


@pytest.mark.parametrize("value", ODD, ids=ODD_IDS)
def test_any_row_has_a_fingerprint(value: Any) -> None:
    found = input_hash({"x": value})
    assert len(found) == 16
    assert found == input_hash({"x": value})
    assert found != input_hash({"x": "something else"})


SHORT = st.text(max_size=3)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | SHORT | st.binary(max_size=4),
    lambda part: st.lists(part, max_size=3) | st.dictionaries(SHORT, part, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=4))
def test_equal_fields_have_equal_fingerprints_whatever_their_order(fields: dict[str, Any]) -> None:
    assert input_hash(fields) == input_hash(dict(reversed(fields.items())))


@given(VALUES, VALUES)
def test_other_fields_have_another_fingerprint(one: Any, other: Any) -> None:
    if repr(one) != repr(other) and one != other:
        assert input_hash({"x": one}) != input_hash({"x": other})


def looks(orientation: int = 1, mode: str = "P", palette: int = 0) -> Image.Image:
    """4 × 2 pixels of 0, which the rest shows in one way or another."""
    image = Image.new(mode, (4, 2))
    if mode == "P":
        image.putpalette([palette] * 768)
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    image.save(file, "TIFF" if mode == "CMYK" else "PNG", exif=exif)
    return Image.open(file)


def table(middle: float) -> pd.DataFrame:
    frame = pd.DataFrame({"a": np.zeros(500), "b": np.zeros(500)})
    frame.loc[250, "b"] = middle
    return frame


class Tensor:
    """As torch's: its repr leaves out the middle."""

    def __init__(self, content: Any) -> None:
        self._content = content

    def __array__(self) -> Any:
        return self._content

    def __repr__(self) -> str:
        return "tensor([0., 0., ..., 0., 0.])"


def middle_of(array: Any) -> Any:
    array[2500] = 0
    return array


OTHERS: dict[str, tuple[Any, Any]] = {
    "middle": (np.arange(5000), middle_of(np.arange(5000))),
    "bytes": (png(RED), png(BLUE)),
    "dtype": (np.array([1, 0], np.uint8), np.array([True, False])),
    "unit": (np.datetime64(50, "Y"), np.datetime64(50, "D")),
    "table": (table(0.0), table(1e-9)),
    "column": (table(0.0)["b"], table(1.0)["b"]),
    "column's name": (table(0.0), table(0.0).rename(columns={"b": "c"})),
    "index": (table(0.0), table(0.0).rename(index={250: 999})),
    "tensor": (Tensor(np.zeros(5000)), Tensor(table(1.0)["b"].to_numpy())),
    "objects": (np.array(["a", "b"], object), np.array(["a", "c"], object)),
    "colour": (Image.new("RGB", (2, 2), RED), Image.new("RGB", (2, 2), BLUE)),
    "palette": (looks(palette=0), looks(palette=255)),
    "mode": (looks(mode="CMYK"), looks(mode="RGBA")),
    "orientation": (looks(mode="RGB"), looks(mode="RGB", orientation=6)),
}
NUMBERS: list[Callable[[Any], Any]] = [
    lambda number: number,
    lambda number: {"deeper": [1.5, number]},
    lambda number: {number: 1},
    lambda number: pd.DataFrame({"a": [number, "x"]}, dtype=object),
    lambda number: np.array([number, "x"], dtype=object),
]
ORDERED: list[Callable[[Any], Any]] = [
    lambda keys: keys,
    lambda keys: [{"deeper": (1, keys)}],
    lambda keys: {"a": b"bytes", "b": keys},
    lambda keys: [math.nan, keys],
]
OTHERS |= {
    f"{one} for {other} {n}": (within(one), within(other))
    for n, within in enumerate(NUMBERS)
    for one, other in combinations([math.nan, math.inf, -math.inf, None], 2)
}
OTHERS |= {
    f"order of keys {n}": (within({"a": 1, "b": 2}), within({"b": 2, "a": 1}))
    for n, within in enumerate(ORDERED)
}


@pytest.mark.parametrize("beside", [1, 2**70], ids=["", "no JSON"])
@pytest.mark.parametrize("name", OTHERS)
def test_what_differs_or_looks_different_has_another_fingerprint(name: str, beside: int) -> None:
    """Two of the pictures have equal bytes."""
    one, other = OTHERS[name]
    assert input_hash({"x": one, "n": beside}) != input_hash({"x": other, "n": beside})


def words() -> Any:
    return np.array([f"word {n}" for n in range(3)], object)


EQUAL: list[Callable[[], Any]] = [
    words,
    lambda: table(1.0),
    lambda: Tensor(np.ones(3)),
    lambda: Image.new("RGB", (2, 2)),
]


@pytest.mark.parametrize("beside", [1, 2**70], ids=["", "no JSON"])
@pytest.mark.parametrize("make", EQUAL, ids=["objects", "table", "tensor", "picture"])
def test_equal_content_has_the_same_fingerprint(make: Callable[[], Any], beside: int) -> None:
    """Else a list of rows with PIL images could never be resumed."""
    one, other = make(), make()  # at two addresses
    assert input_hash({"x": one, "n": beside}) == input_hash({"x": other, "n": beside})
