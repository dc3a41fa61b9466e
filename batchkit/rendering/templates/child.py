"""The process that renders templates which may hang or need too much memory.

The process refuses a template that needs too much memory, or whose result is larger than any prompt.
"""

from __future__ import annotations

import marshal
import pickle
from collections.abc import Callable, Mapping
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

from jinja2 import StrictUndefined, UndefinedError

from batchkit.isolation.child import ChildRefusal, answer_all, limit_memory
from batchkit.rendering.templates.sandbox import functions_called, with_functions

MOST_MEMORY = 1 << 30  # bytes; the limit is this plus eight times the size of the input
MOST_BYTES = 16_000_000  # of the result (4 million tokens); the limit is this plus four times the size of the input


def main(connection: Connection) -> None:
    answer_all(connection, _answer)


def _answer(question: bytes) -> Any:
    limit = limit_memory(MOST_MEMORY + 8 * len(question))
    try:
        source, expression, names = pickle.loads(question)
        found = _compiled(source, expression)(names)
        if isinstance(found, StrictUndefined):
            raise ChildRefusal("undefined", "")
        plain = _plain(found)
        most, n_bytes = MOST_BYTES + 4 * len(question), len(marshal.dumps(plain))
        if n_bytes > most:
            raise ChildRefusal(
                "error",
                f"the template's value has {n_bytes:,} bytes, but the limit is {most:,}; make its text shorter",
            )
        return plain
    except UndefinedError as error:
        raise ChildRefusal("undefined", str(error)) from None
    except MemoryError:
        message = f"the template needs more than {limit / (1 << 30):.1f} GiB of memory"
        raise MemoryError(message) from None


@lru_cache(maxsize=64)
def _compiled(source: str, expression: str | None) -> Callable[[Mapping[str, Any]], Any]:
    environment = with_functions(functions_called(source))
    if expression is not None:
        return environment.compile_expression(expression, undefined_to_none=False)
    return environment.from_string(source).render


def _plain(value: Any) -> Any:
    """Return ``value`` converted to types that ``marshal`` supports. Raises TypeError for any other type."""
    match value:
        case str():
            return str(value)
        case None | bool() | int() | float() | bytes():
            return value
        case list() | tuple():
            return [_plain(part) for part in value]
        case dict():
            return {_plain(key): _plain(part) for key, part in value.items()}
    raise TypeError(
        f"the value is of type {type(value).__name__}, which only simple templates can return; use a template"
        " that only names a field or a list's entry, without loops, functions, and operators except +"
    )
