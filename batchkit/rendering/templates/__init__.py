"""The job's templates, filled in with a row's fields.

A template whose work is bounded by the row's size (``linear``) is rendered in the caller's thread.
Any other may run forever or use all memory, and nothing in Python can stop it there: it is rendered
in a process that can be killed (``process``), within limits of time, memory and text.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import StrictUndefined, UndefinedError
from jinja2 import TemplateError as JinjaError

from batchkit.config.suggest import did_you_mean
from batchkit.config.terminal import shortened
from batchkit.config.values import reason_of
from batchkit.errors import JobError, RenderTimeoutError, TemplateError
from batchkit.rendering.row_size import size_of
from batchkit.rendering.templates.leaves import leaves_of, with_leaves
from batchkit.rendering.templates.linear import has_operators, is_linear, most_growth
from batchkit.rendering.templates.process import Refused, rendered_apart
from batchkit.rendering.templates.sandbox import (
    Unbounded,
    bounded,
    names_in_order,
    names_read,
    reading,
)

_LONE_EXPRESSION = re.compile(r"\A\s*\{\{[-+]?(?P<expression>[^{}]+?)[-+]?\}\}\s*\Z")
_MOST_HERE = 64_000_000  # bytes that a rendering may need in the run's own process
_UNKNOWN_NAME = re.compile(r"'(?:\{\{[-+]?\s*)?([^'{}]+?)(?:\s*[-+]?\}\})?' is undefined")
# What Jinja and Python raise for a template that can't be compiled.
_CANT_BE_COMPILED = (JinjaError, RecursionError, MemoryError, SyntaxError, ValueError)


class RowTemplate:
    """One template; ``key`` is its name in errors. Several threads may share it.

    ``keeps_type``: a lone ``{{ expression }}`` gives its value unchanged, for example bytes or a
    list. ``timeout_s`` is ``run.row_timeout_s``.

    Raises:
        JobError: it is not a valid template.
    """

    def __init__(
        self, key: str, source: str, *, timeout_s: float, keeps_type: bool = False
    ) -> None:
        self.key, self._source, self._timeout_s = key, source, timeout_s
        lone = _LONE_EXPRESSION.match(source) if keeps_type else None
        self._expression = None if lone is None else lone["expression"]
        try:
            self._check()
            tree = reading().parse(source)
            self.is_apart = not is_linear(tree)
            self.may_take_long = self.is_apart or has_operators(tree)
            self.names = names_read(tree)
            if "self" in names_in_order(source):  # Jinja fills in an object that lists its blocks
                raise JinjaError("self is a name of Jinja's own; rename the row's field")
            growth = 0 if self.is_apart else most_growth(tree)
            self._most = _MOST_HERE // growth if growth else None
            self._here = None if self.is_apart else self._compiled()
        except _CANT_BE_COMPILED as error:
            shown = repr(shortened(source))
            place = shown if lone is not None else f"line {getattr(error, 'lineno', 1)}"
            raise JobError(f"{key}: {place}: {reason_of(error)}") from error

    def text(self, names: Mapping[str, Any]) -> str:
        """The template filled in with ``names``.

        Raises:
            TemplateError: a name is missing, an expression fails, or memory or text is too much.
            RenderTimeoutError: it took too long.
        """
        return str(self.value(names))

    def value(self, names: Mapping[str, Any]) -> Any:
        """As ``text``; with ``keeps_type``, the value of a lone expression.

        A value from another process is text, bytes, numbers, None, the row's own values, or lists
        and tables of them.
        """
        if self._here is None or self._is_too_large(names):
            return self._value_apart(names)
        try:
            found = self._here(names)
        except Unbounded:
            return self._value_apart(names)
        except UndefinedError as error:
            raise _undefined(str(error), names) from error
        except Exception as error:  # a template may call any code on the row's values
            raise TemplateError(_named(error)) from error
        if isinstance(found, StrictUndefined):
            raise _undefined(self._is_undefined, names)
        return found

    def _is_too_large(self, names: Mapping[str, Any]) -> bool:
        if self._most is None:
            return False
        return size_of([names.get(name) for name in self.names], self._most) > self._most

    def _value_apart(self, names: Mapping[str, Any]) -> Any:
        read = {name: names[name] for name in self.names if name in names}
        leaves = [] if self._expression is None else leaves_of(read)
        try:
            question = pickle.dumps((self._source, self._expression, read, leaves), protocol=5)
        except Exception as error:  # pickling runs the objects' own code
            raise TemplateError(
                f"{self.key}: a field can't be given to the process that renders it: {_named(error)}"
            ) from error
        try:
            found = rendered_apart(question, self._timeout_s)
        except TimeoutError as error:
            raise RenderTimeoutError(
                f"{self.key}: not rendered within {self._timeout_s:g} s (run.row_timeout_s)"
            ) from error
        except Refused as refusal:
            if refusal.is_undefined:
                raise _undefined(str(refusal) or self._is_undefined, names) from refusal
            raise TemplateError(str(refusal)) from refusal
        return with_leaves(found, leaves)

    @property
    def _is_undefined(self) -> str:
        return f"{self.key}: {self._source!r} is undefined"

    def _check(self) -> None:
        """Raises an error if the template is wrong. Computes nothing in it."""
        if self._expression is None:
            reading().compile(self._source)
        else:
            reading().compile_expression(self._expression)

    def _compiled(self) -> Callable[[Mapping[str, Any]], Any]:
        """The compiled template. It takes the names as one table: a column may be called "self"."""
        if self._expression is not None:
            return bounded().compile_expression(self._expression, undefined_to_none=False)
        template = bounded().from_string(self._source)
        template.globals = dict(template.globals)  # a ChainMap would be searched for every row
        return template.render


def _undefined(message: str, names: Mapping[str, Any]) -> TemplateError:
    known = [*map(str, names)]
    name = _UNKNOWN_NAME.search(message)
    hint = "" if name is None else did_you_mean(name[1], known)
    return TemplateError(f"{message}; the row has {', '.join(known) or 'no fields'}{hint}")


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
