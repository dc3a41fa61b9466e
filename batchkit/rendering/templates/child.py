"""The process that templates are rendered in: ``python -m batchkit.rendering.templates.child FD``.

It refuses a template that needs more memory or makes more text than any prompt has.
"""

from __future__ import annotations

import marshal
import pickle
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from jinja2 import StrictUndefined, UndefinedError

from batchkit.rendering.templates.leaves import numbers_of
from batchkit.rendering.templates.sandbox import functions_called, unbounded
from batchkit.sources.child_process import Answer, limit_memory, serve

MOST_MEMORY = 1 << 30  # bytes, plus eight times the size of the question
MOST_BYTES = 16_000_000  # of text, plus four times the size of the question: 4 million tokens


def main() -> None:
    serve(_answer)


def _answer(question: bytes) -> Answer:
    """The ``marshal`` bytes of "value" and the result, or of the kind and text of an error."""
    limit = limit_memory(MOST_MEMORY + 8 * len(question))
    try:
        source, expression, names, leaves = pickle.loads(question)
        found = _compiled(source, expression)(names)
        if isinstance(found, StrictUndefined):
            return _because("undefined", "")
        line = marshal.dumps(("value", _plain(found, numbers_of(leaves))))
        most = MOST_BYTES + 4 * len(question)
        if len(line) > most:
            return _because(
                "error", f"its template gives {len(line):,} bytes; the most is {most:,}"
            )
        return Answer(line)
    except UndefinedError as error:
        return _because("undefined", str(error))
    except MemoryError:
        message = f"its template needs more than {limit / (1 << 30):.1f} GiB of memory"
        return _because("error", message)._replace(is_last=True)
    except Exception as error:  # a template may call any code on the row's values
        return _because("error", f"{type(error).__name__}: {error}")


def _because(kind: str, message: str) -> Answer:
    return Answer(marshal.dumps((kind, message)))


@lru_cache(maxsize=64)
def _compiled(source: str, expression: str | None) -> Callable[[Mapping[str, Any]], Any]:
    environment, functions = unbounded().overlay(), functions_called(source)
    environment.globals = {
        name: value for name, value in environment.globals.items() if name in functions
    }
    if expression is not None:
        return environment.compile_expression(expression, undefined_to_none=False)
    return environment.from_string(source).render


def _plain(value: Any, numbers: Mapping[int, int]) -> Any:
    """``value`` in types that ``marshal`` takes; a leaf of the row as a tuple of its number."""
    match value:
        case str():
            return str(value)
        case None | bool() | int() | float() | bytes():
            return value
        case list() | tuple():
            return [_plain(part, numbers) for part in value]
        case dict():
            return {_plain(key, {}): _plain(part, numbers) for key, part in value.items()}
    if id(value) in numbers:
        return (numbers[id(value)],)
    raise TypeError(f"a {type(value).__name__} can't leave the process that renders this template")


if __name__ == "__main__":
    main()
