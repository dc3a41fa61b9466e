"""The tool loop of docs/cookbook.md: a model that calls a calculator."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.chat_server import Refused, serving
from tests.support.rollouts import errors, generations, records, run, write

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

PAGE = (Path(__file__).parents[2] / "docs" / "cookbook.md").read_text(encoding="utf-8")
FOUND = re.search(r'^```python title="calculator.py"\n(.*?)^```', PAGE, re.MULTILINE | re.DOTALL)
assert FOUND is not None
SOLVE = FOUND[1]
CLAIMS = {
    "12 * 17 * 3": "612",
    "-(2 + 3.5) / 2": "-2.75",
    "1 / 0": "error: division by zero",
    "9 ** 9 ** 9": "error: only numbers, + - * / and parentheses are known",
    "__import__('os').getcwd()": "error: only numbers",
    "2 +": "error: invalid syntax",
}


def calls(*expressions: str) -> Refused:
    """An answer that calls the calculator with each."""
    made = [
        {
            "id": f"call-{n}",
            "type": "function",
            "function": {"name": "calculate", "arguments": json.dumps({"expression": expression})},
        }
        for n, expression in enumerate(expressions)
    ]
    message = {"role": "assistant", "content": None, "tool_calls": made}
    choice = {"index": 0, "finish_reason": "tool_calls", "message": message}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return Refused(200, {"choices": [choice], "usage": usage})


def results_in(body: dict[str, Any]) -> list[str]:
    return [each["content"] for each in body["messages"] if each["role"] == "tool"]


def test_the_model_gets_what_the_calculator_says_until_it_answers() -> None:
    def model(text: str, body: dict[str, Any]) -> str:
        results = results_in(body)
        if len(results) < len(CLAIMS):
            raise calls(*list(CLAIMS)[len(results) : len(results) + 2])
        return "It is " + results[0]

    with serving(model) as server:
        write(SOLVE, [{"question": "How many?"}], server)
        assert run().exit_code == 0, errors()
        found = results_in(server.bodies[-1])
    assert [one[: len(claim)] for one, claim in zip(found, CLAIMS.values(), strict=True)] == [
        *CLAIMS.values()
    ]
    assert [body["tool_choice"] for body in server.bodies] == ["required", "auto", "auto", "auto"]
    (record,) = records()
    assert record["parsed"] == {"answer": "It is 612", "calls": 3}
    assert record["generations"] == len(generations()) == 4
    assert record["usage"]["completion_tokens"] == 3 + len(["It", "is", "612"])


def test_a_model_that_never_stops_calling_fails_its_row_alone() -> None:
    def model(text: str, body: dict[str, Any]) -> str:
        if body["messages"][0]["content"] == "again" or not results_in(body):
            raise calls("1 + 1")
        return "2"

    with serving(model) as server:
        write(SOLVE, [{"question": "again"}, {"question": "once"}], server)
        assert run().exit_code == 3
    assert [*errors()] == [0]
    assert "the model still calls tools after 8 turns" in errors()[0]
    assert records()[1]["parsed"] == {"answer": "2", "calls": 1}
