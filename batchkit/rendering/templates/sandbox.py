"""Jinja's sandbox in two forms: for parsing and for rendering.

Both refuse private attributes, and changes to a row's values: a template that appended to a list
would change the row, and its fingerprint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Set
from functools import cache
from types import BuiltinMethodType, MethodType
from typing import Any, NoReturn

from jinja2 import StrictUndefined, nodes, pass_context
from jinja2.defaults import DEFAULT_NAMESPACE
from jinja2.filters import do_indent
from jinja2.meta import find_undeclared_variables
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

_OPERATORS = frozenset(ImmutableSandboxedEnvironment.default_binop_table)


class _Method:
    """A method that a template found. It can only be called: its text would be an address."""

    def __init__(self, method: Any) -> None:
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._method(*args, **kwargs)

    def _refuse(self, *args: Any) -> Any:
        """For ``data.items``, Jinja takes the method of dict, not the field."""
        name = self._method.__name__
        raise TypeError(
            f"{name} is a method of {type(self._method.__self__).__name__}; to read a field of that"
            f" name, write [{name!r}] instead of .{name}"
        )

    __str__ = __repr__ = __bool__ = __len__ = __iter__ = __hash__ = __eq__ = _refuse


class _Sandbox(ImmutableSandboxedEnvironment):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters = {**self.filters, "indent": _indented}

    def getattr(self, obj: Any, attribute: str) -> Any:
        return _only_called(super().getattr(obj, attribute))

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Of a table, only its keys: Jinja would go on to its methods."""
        if isinstance(obj, Mapping) and isinstance(argument, str) and argument not in obj:
            return self.undefined(obj=obj, name=argument)
        return _only_called(super().getitem(obj, argument))

    def handle_exception(self, source: str | None = None) -> NoReturn:
        """Called where an error is handled. Jinja would write a new traceback, which nobody reads."""
        raise


class _Reading(ImmutableSandboxedEnvironment):
    """Never renders. Jinja evaluates constants when it compiles, and `9**9**9` would never end."""

    intercepted_binops = _OPERATORS

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters = dict.fromkeys(self.filters, _never_called)
        self.globals = {}  # a row's field may have the name of a Jinja global, such as `range`


@pass_context  # with a context, a filter is not evaluated as a constant
def _never_called(context: Context, *args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError


def _indented(value: Any, *args: Any, **kwargs: Any) -> str:
    """Jinja's own filter adds a line break to its input in place: a list of the row would grow."""
    return do_indent(value if isinstance(value, str) else str(value), *args, **kwargs)


def _only_called(value: Any) -> Any:
    return _Method(value) if isinstance(value, MethodType | BuiltinMethodType) else value


def with_functions(names: Set[str] = frozenset()) -> ImmutableSandboxedEnvironment:
    """For rendering, with Jinja's functions of these names; without them, a row that lacks the field
    ``range`` has none. Only for templates that ``is_plain`` allows, compiling and rendering end."""
    made = _Sandbox(undefined=StrictUndefined, keep_trailing_newline=True)
    made.globals = {name: made.globals[name] for name in names}
    return made


@cache
def reading() -> ImmutableSandboxedEnvironment:
    """For parsing and for finding mistakes; its templates can't be rendered."""
    return _Reading(undefined=StrictUndefined, keep_trailing_newline=True)


def fields_read(source: str) -> set[str]:
    """The names that a template takes from outside, without Jinja's functions that are only called,
    such as `range(3)`."""
    return find_undeclared_variables(reading().parse(source)) - functions_called(source)


def functions_called(source: str) -> set[str]:
    """Jinja's functions without those that a template names as it names a field."""
    tree = reading().parse(source)
    called = Counter(
        call.node.name for call in tree.find_all(nodes.Call) if isinstance(call.node, nodes.Name)
    )
    named = Counter(name.name for name in tree.find_all(nodes.Name))
    return {name for name in DEFAULT_NAMESPACE if called[name] == named[name]}


def names_printed(source: str) -> Iterator[str]:
    """The names whose values a template writes as they are: ``{{ name }}``."""
    for output in reading().parse(source).find_all(nodes.Output):
        yield from (part.name for part in output.nodes if isinstance(part, nodes.Name))


def keys_read(source: str, table: str) -> Iterator[tuple[str | None, str | None]]:
    """The key and the part of each ``table.key.part``; None for what is left out or computed."""
    tree = reading().parse(source)
    if table not in find_undeclared_variables(tree):
        return
    found: list[Any] = [*tree.find_all((nodes.Getattr, nodes.Getitem))]
    reads = {id(node.node): node for node in found}
    for name in tree.find_all(nodes.Name):
        if name.name == table:
            key = reads.get(id(name))
            yield _key_of(key), _key_of(reads.get(id(key)))


def _key_of(node: Any) -> str | None:
    """What ``value.key`` or ``value["key"]`` names; None for any other node."""
    match node:
        case nodes.Getattr(attr=str(name)):
            return name
        case nodes.Getitem(arg=nodes.Const(value=value)):
            return str(value)
    return None


def names_in_order(source: str) -> list[str]:
    """Every name in a template, as often as it occurs."""
    return [name.name for name in reading().parse(source).find_all(nodes.Name)]
