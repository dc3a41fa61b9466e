"""The Jinja templates of a job, rendered with a row's fields.

A template that can't hang (``plain``) is rendered in the caller's thread. Any other template may run forever or use all
memory, and Python can't stop it in a thread. It is therefore rendered in a process that can be killed (``child``), with
limits for its time, its memory and the size of its result.
"""

from __future__ import annotations

import os
import pickle
import re
import threading
from collections.abc import Callable, Mapping, Sequence, Set
from functools import lru_cache
from typing import Any

from jinja2 import StrictUndefined, UndefinedError, nodes
from jinja2 import TemplateError as JinjaError

from batchkit.config.suggest import called_here, did_you_mean, nearest
from batchkit.config.tables import JobConfig
from batchkit.config.terminal import shortened
from batchkit.config.values import reason_of
from batchkit.errors import JobError, RenderTimeoutError, TemplateError
from batchkit.isolation import client
from batchkit.rendering.templates.plain import is_plain
from batchkit.rendering.templates.sandbox import (
    fields_read,
    names_in_order,
    reading,
    with_functions,
)

_LONE_EXPRESSION = re.compile(r"\A\s*\{\{[-+]?(?P<expression>[^{}]+?)[-+]?\}\}\s*\Z")
ROW = "row"  # the name in templates for all fields of the row
_HANDLER = "batchkit.rendering.templates.child"
# Limits the number of child processes that render at the same time to the number of cores: more would be slower.
_CORES = threading.BoundedSemaphore(len(os.sched_getaffinity(0)))
_UNKNOWN_NAME = re.compile(
    r"'(?:\{\{[-+]?\s*)?([^'{}]+?)(?:\s*[-+]?\}\})?' is undefined|'dict object' has no attribute '(\w+)'"
)
# Exceptions of Jinja and Python for a template that can't be compiled.
_CANT_BE_COMPILED = (JinjaError, RecursionError, MemoryError, SyntaxError, ValueError)


class RowTemplate:
    """A Jinja template. Several threads may share it.

    - ``source``: the template's text. ``key``: its name in errors.
    - ``keeps_type``: True if a template that is only ``{{ expression }}`` gives the value of the expression, for
      example bytes or a list, instead of text.
    - ``marks``: names of place marks, which are not fields of the row. The attribute ``marks`` holds the ones that the
      template uses.

    Raises:
        JobError: ``source`` is not a valid template.
    """

    def __init__(
        self,
        job: JobConfig,
        key: str,
        source: str,
        *,
        keeps_type: bool = False,
        marks: Set[str] = frozenset(),
    ) -> None:
        self.key, self.source = key, source
        self._timeout_s, self._defaults = job.run.row_timeout_s, job.vars
        lone = _LONE_EXPRESSION.match(source) if keeps_type else None
        self._expression = None if lone is None else lone["expression"]
        try:
            self._check()
            tree = reading().parse(source)
            self.is_apart = not is_plain(tree)
            if any(tree.find_all((nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends))):
                raise JinjaError(
                    "include is not available: prompt.user_file reads the prompt from a file, prompt.texts reads"
                    " a text for each row"
                )
            read = fields_read(source)
            self.names, self.marks = read - marks, read & marks
            # For the name "self", Jinja would fill in the object with the template's blocks.
            if "self" in names_in_order(source):
                raise JinjaError("self is a reserved name of Jinja; rename the row's field")
            self._here = None if self.is_apart else self._compiled()
        except _CANT_BE_COMPILED as error:
            shown = repr(shortened(source))
            place = shown if lone is not None else f"line {getattr(error, 'lineno', 1)}"
            reason = reason_of(error).removesuffix(".")
            raise JobError(f"{key}: {place}: {reason}{_how_to_write(reason)}") from error

    def text(self, names: Mapping[str, Any]) -> str:
        """Return the template filled in with ``names``.

        Raises:
            TemplateError: a name is missing, an expression fails, or the template needs too much memory or gives too
                much text.
            RenderTimeoutError: rendering took longer than ``run.row_timeout_s``.
        """
        return str(self.value(names))

    def value(self, names: Mapping[str, Any]) -> Any:
        """Return the text of the template; with ``keeps_type``, the value of a lone ``{{ expression }}``.

        A value computed in the child process is text, bytes, a number, None, or a list or dict of such values. Raises
        the exceptions of ``text``.
        """
        if self._defaults:
            names = {**self._defaults, **names}
        if ROW in self.names and ROW not in names:
            names = {**names, ROW: names}
        if self._here is None:
            return self._value_apart(names)
        try:
            found = self._here(names)
        except UndefinedError as error:
            raise _undefined(str(error), names) from error
        except Exception as error:  # a template may call any code on the row's values
            raise TemplateError(_with_remedy(_named(error))) from error
        if isinstance(found, StrictUndefined):
            raise _undefined(self._is_undefined, names)
        return found

    def _value_apart(self, names: Mapping[str, Any]) -> Any:
        read = {name: names[name] for name in self.names | self.marks if name in names}
        try:
            question = pickle.dumps((self.source, self._expression, read), protocol=5)
        except Exception as error:  # pickling runs the objects' own code
            raise TemplateError(
                f"{self.key}: a field can't be sent to the process that renders the template: {_named(error)}"
            ) from error
        try:
            with _CORES:
                kind, value = client.ask(_HANDLER, "rendering templates", question, self._timeout_s)
        except TimeoutError as error:
            raise RenderTimeoutError(
                f"{self.key}: not rendered within {self._timeout_s:g} s (run.row_timeout_s)"
            ) from error
        except client.Gone as error:
            raise TemplateError(
                f"{self.key}: the process that rendered the template died twice; the template may need too much"
                " memory"
            ) from error
        if kind == "undefined":
            raise _undefined(value or self._is_undefined, names)
        if kind != "value":
            raise TemplateError(_with_remedy(value))
        return value

    @property
    def _is_undefined(self) -> str:
        return f"{self.key}: {self.source!r} is undefined"

    def _check(self) -> None:
        """Raise Jinja's exception if the template has a mistake. Constants are not computed, because that may never
        end."""
        if self._expression is None:
            reading().compile(self.source)
        else:
            reading().compile_expression(self._expression)

    def _compiled(self) -> Callable[[Mapping[str, Any]], Any]:
        """Return a function that renders the template. The function takes a dict instead of keywords, because a column
        may be named "self"."""
        environment = with_functions()
        if self._expression is not None:
            return environment.compile_expression(self._expression, undefined_to_none=False)
        template = environment.from_string(self.source)
        if "{" not in self.source:
            text = template.render()
            return lambda names: text
        template.globals = dict(template.globals)  # looking names up in Jinja's ChainMap is slow
        return template.render


def _how_to_write(reason: str) -> str:
    """Return advice on Jinja's syntax error ``reason``, as the end of a message; "" if there is none."""
    if "'}'" in reason:
        return "; write {{ name }}, with two braces on both sides"
    if "'end of print statement'" in reason:
        return '; write {{ row["my column"] }} for a column whose name is not a plain word'
    if reason.startswith("No filter named"):
        return did_you_mean(reason.split("'")[1], reading().filters)
    return ""


def _undefined(message: str, names: Mapping[str, Any]) -> TemplateError:
    return TemplateError(_of_unknown_name(message, tuple(map(str, names))))


@lru_cache(maxsize=256)  # often all rows lack the same field
def _of_unknown_name(message: str, known: tuple[str, ...]) -> str:
    name = _UNKNOWN_NAME.search(message)
    hint = "" if name is None else _hint(name[1] or name[2], known)
    return f"{message}; the row has {', '.join(known) or 'no fields'}{hint}"


def _hint(name: str, known: Sequence[str]) -> str:
    """Return advice on the unknown ``name``, such as a similar name, as the end of a message; "" if there is none."""
    longer = [k for k in known if re.match(rf"{re.escape(name)}\W", k)]
    if near := next(iter(longer), nearest(name, known)):
        is_word = near.isidentifier()
        return f"; did you mean {near!r}?" if is_word else f'; write {{{{ row["{near}"] }}}}'
    if here := called_here(name, kind="|"):
        return f"; in templates this function is a filter: {{{{ … {here} }}}}"
    if any(k[:1].isdigit() or " " in k for k in known):
        return "; if the input is a CSV file without a header, add a header line"
    return ""


def _with_remedy(error: str) -> str:
    is_text = "not supported between" in error and "'str'" in error
    return error + "; the column is text, not a number: write … | int > 3" * is_text


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
