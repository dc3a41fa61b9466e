"""Jinja's sandbox in two forms: one for parsing and one for rendering.

Both refuse private attributes and changes to a row's values, because a template that appends to a list would change the
row and its hash.
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
    """A method of a row's value, as a template gets it. The method can only be called, because its text would contain a
    memory address."""

    def __init__(self, method: Any) -> None:
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._method(*args, **kwargs)

    def _refuse(self, *args: Any) -> Any:
        """Raise TypeError for a template that uses the method without calling it.

        The template may mean a field with the method's name: for ``data.items``, Jinja returns the method of dict.
        """
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
        """Return ``obj[argument]``. For a dict, only its keys are looked up, while Jinja would also look up its
        methods."""
        if isinstance(obj, Mapping) and isinstance(argument, str) and argument not in obj:
            return self.undefined(obj=obj, name=argument)
        return _only_called(super().getitem(obj, argument))

    def handle_exception(self, source: str | None = None) -> NoReturn:
        """Raise the current error again. Jinja would make a new traceback, which batchkit never shows."""
        raise


class _Reading(ImmutableSandboxedEnvironment):
    """An environment that only parses templates and computes no constants. Jinja would compute them when it compiles a
    template, and ``9**9**9`` never ends."""

    intercepted_binops = _OPERATORS

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters = dict.fromkeys(self.filters, _never_called)
        self.globals = {}  # a row's field may have the name of a Jinja global, such as `range`


@pass_context  # Jinja does not evaluate filters with a context as constants
def _never_called(context: Context, *args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError


def _indented(value: Any, *args: Any, **kwargs: Any) -> str:
    """Return the indented text. This filter replaces Jinja's own filter, which modifies a list that it gets."""
    return do_indent(value if isinstance(value, str) else str(value), *args, **kwargs)


def _only_called(value: Any) -> Any:
    return _Method(value) if isinstance(value, MethodType | BuiltinMethodType) else value


def with_functions(names: Set[str] = frozenset()) -> ImmutableSandboxedEnvironment:
    """Return an environment for rendering. Of Jinja's functions, such as ``range``, only the ones in ``names`` exist in
    it.

    If ``range`` is not in ``names``, a template that uses a missing field ``range`` fails, instead of getting the
    function. Only templates that ``is_plain`` allows are certain to end.
    """
    made = _Sandbox(undefined=StrictUndefined, keep_trailing_newline=True)
    made.globals = {name: made.globals[name] for name in names}
    return made


@cache
def reading() -> ImmutableSandboxedEnvironment:
    """Return the environment for parsing and for finding mistakes; it can't render."""
    return _Reading(undefined=StrictUndefined, keep_trailing_newline=True)


def fields_read(source: str) -> set[str]:
    """Return the row's fields that a template uses. A Jinja function that is only called, as in ``range(3)``, is not a
    field."""
    return find_undeclared_variables(reading().parse(source)) - functions_called(source)


def functions_called(source: str) -> set[str]:
    """Return the names of Jinja's functions, such as ``range``, that a template calls.

    A name that is also used without a call is a field of the row, so it is left out.
    """
    tree = reading().parse(source)
    called = Counter(
        call.node.name for call in tree.find_all(nodes.Call) if isinstance(call.node, nodes.Name)
    )
    named = Counter(name.name for name in tree.find_all(nodes.Name))
    return {name for name in DEFAULT_NAMESPACE if called[name] == named[name]}


def names_printed(source: str) -> Iterator[str]:
    """Yield the names whose values a template prints unchanged: ``{{ name }}``."""
    for output in reading().parse(source).find_all(nodes.Output):
        yield from (part.name for part in output.nodes if isinstance(part, nodes.Name))


def keys_read(source: str, table: str) -> Iterator[tuple[str | None, str | None]]:
    """Yield (key, part) for each ``table.key.part`` in a template. A key or part is None if it is missing or computed,
    as in ``table[name]``."""
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
    """Return the name in ``value.key`` or ``value["key"]``; None for any other node."""
    match node:
        case nodes.Getattr(attr=str(name)):
            return name
        case nodes.Getitem(arg=nodes.Const(value=value)):
            return str(value)
    return None


def names_in_order(source: str) -> list[str]:
    """Return every name in a template in the order of use; a name that is used twice is returned twice."""
    return [name.name for name in reading().parse(source).find_all(nodes.Name)]
