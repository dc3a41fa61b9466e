"""Values that JSON has no word for, in a record."""

from __future__ import annotations

import base64
import json
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from batchkit.storage.log import RESULTS
from batchkit.storage.newest import read_newest
from batchkit.types import Choice, line_of_choice
from tests.support.records import indexes, record, reopened, write


class Colour:
    def __str__(self) -> str:
        return "red"


NEST: Any = "leaf"
for _ in range(300):
    NEST = [NEST]

ODD_VALUES = {
    "bytes": (b"\x00\xff", base64.b64encode(b"\x00\xff").decode()),
    "NaN": (float("nan"), None),
    "infinity": (float("-inf"), None),
    "an integer past 64 bits": (2**70, str(2**70)),
    "the largest that JSON readers agree on": (2**64 - 1, 2**64 - 1),
    "a lone surrogate": ("a\ud800b", "a?b"),
    "a lone surrogate in a key": ({"a\ud800": 1}, {"a?": 1}),
    "Decimal": (Decimal("1.50"), "1.50"),
    "datetime": (datetime(2026, 1, 2, 3, 4, tzinfo=UTC), "2026-01-02T03:04:00+00:00"),
    "date": (date(2026, 1, 2), "2026-01-02"),
    "a number as key": ({1: "a"}, {"1": "a"}),
    "a tuple as key": ({(1, 2): "a"}, {"(1, 2)": "a"}),
    "a foreign object": ({"c": [Colour()]}, {"c": ["red"]}),
    "NaN beside a foreign object": ([float("nan"), Colour()], [None, "red"]),
    "newlines": ("a\nb\r\n\u2028\x85", "a\nb\r\n\u2028\x85"),
    "NUL": ("a\0b", "a\0b"),
    "true": (True, True),
}


@pytest.mark.parametrize(("value", "stored"), ODD_VALUES.values(), ids=ODD_VALUES)
def test_values_json_has_no_word_for_are_stored_as_json(
    tmp_path: Path, value: Any, stored: Any
) -> None:
    log = write(tmp_path, record(0, fields={"v": value, "w": 1}), record(1))
    assert log.count(b"\n") == 2
    first = log.split(b"\n")[0].decode("utf-8")
    found = json.loads(first, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert found["fields"] == {"v": stored, "w": 1}
    assert reopened(tmp_path)["completed"] == [0, 1]


def test_deeply_nested_value_does_not_stop_the_run(tmp_path: Path) -> None:
    write(tmp_path, record(0, fields={"v": NEST}), record(1))
    assert reopened(tmp_path)["completed"] == [0, 1]
    assert indexes(tmp_path) == [0, 1]


@pytest.mark.parametrize("text", ["a\ud800b", "\0", "\u2028\n", "é🙂", ""])
def test_any_text_of_a_model_is_one_line(tmp_path: Path, text: str) -> None:
    choices = [Choice(text, "stop"), Choice("b", "length", [{"token": "b", "logprob": -0.5}])]
    several = replace(record(1, text), choices=[*map(line_of_choice, choices)])
    write(tmp_path, record(0, text), several)
    assert indexes(tmp_path) == [0, 1]
    kept = text.replace("\ud800", "?")
    found = list(read_newest(tmp_path / RESULTS))
    assert [r["text"] for r in found] == [kept, kept]
    assert found[1]["choices"][0]["text"] == kept
    assert found[1]["choices"][1]["logprobs"] == [{"token": "b", "logprob": -0.5}]
