"""Decides whether a template's work and text grow no faster than the row.

Such a template can be rendered in a thread of the run: none of its steps can hang. The decision is
made from its syntax tree; if in doubt, the answer is no. Allowed are the row's names, their
attributes and members, comparisons, ``if``, ``set``, operators (``sandbox.bounded`` checks their
operands), and the filters and methods below, whose text is at most about ten times as long as their
input (``most_growth`` gives the factor, and ``row_size`` the size of the row). A loop may use the
row's names only as conditions, and otherwise only its own variable: so an inner loop iterates over
a part of the row, and nothing is multiplied.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import IntEnum
from itertools import chain
from typing import Any, NamedTuple

from jinja2 import nodes

from batchkit.rendering.templates.sandbox import is_plain_format

# fmt: off
_FILTERS = {
    "abs", "capitalize", "count", "d", "default", "first", "float", "int", "items", "last", "length",
    "list", "lower", "max", "min", "reverse", "round", "safe", "sort", "string", "title", "trim",
    "truncate", "upper", "wordcount",
}
_GROWING_FILTERS = {"e", "escape", "indent", "join", "replace", "tojson", "urlencode"}
_FILTERS_OF_EACH = {"reject", "rejectattr", "select", "selectattr"}
_TESTS_OF_KIND = {
    "boolean", "defined", "false", "float", "integer", "iterable", "mapping", "none", "number",
    "sequence", "string", "true", "undefined",
}
_TESTS = _TESTS_OF_KIND | {
    "divisibleby", "eq", "equalto", "even", "ge", "greaterthan", "gt", "in", "le", "lessthan", "lower",
    "lt", "ne", "odd", "upper", "==", "!=", ">", ">=", "<", "<=",
}
_METHODS = {
    "capitalize", "casefold", "count", "endswith", "find", "isalpha", "isdigit", "isnumeric",
    "isoformat", "items", "keys", "lower", "lstrip", "partition", "removeprefix", "removesuffix",
    "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "title", "upper",
    "values",
}
# fmt: on
_PLAIN_DATE = re.compile(r"(?:[^%]|%[A-Za-z%])*+")
_OPERATORS = (nodes.Add, nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod, nodes.Pow)
_MOST_NUMBER = 100_000
_MOST_GROWN_BY = 16  # characters of an argument that a filter may add at every position
_MOST_GROWTH = 2  # growing filters, one applied to the other
_SIZE_OF_ITEM = 64  # bytes that a part of a list takes


def is_linear(tree: nodes.Template) -> bool:
    """See above; ``tree`` must come from the sandbox's parser."""
    try:
        _Walk({}, in_loop=False).through(tree.body)
    except (_NotLinear, RecursionError):
        return False
    return True


def most_growth(tree: nodes.Template) -> int:
    """How many times as large as the row the template's text and lists may become; 0: no larger."""
    growing = sum(map(_grows, tree.find_all((nodes.Filter, nodes.Call))))
    loops = [*tree.find_all(nodes.For)]
    growth = _MOST_GROWN_BY ** min(growing, _MOST_GROWTH) if growing else 0
    if not loops:
        return growth
    texts = chain.from_iterable(loop.find_all(nodes.TemplateData) for loop in loops)
    values = (str(const.value) for const in tree.find_all(nodes.Const))
    text = sum(len(text.data) for text in texts) + max(growth, 1) * sum(map(len, values))
    return growth + _SIZE_OF_ITEM + text


def has_operators(tree: nodes.Template) -> bool:
    """True if ``sandbox.bounded`` may still send the template to a process, for its operands."""
    return next(tree.find_all(_OPERATORS), None) is not None


class _NotLinear(Exception):
    pass


class _Of(IntEnum):
    """How large a value can be."""

    TEMPLATE = 0  # no larger than the template
    PART = 1  # the innermost loop's own part of the row
    ROW = 2


class _Value(NamedTuple):
    of: _Of
    growth: int = 0


_CONSTANT = _Value(_Of.TEMPLATE)
_ROW = _Value(_Of.ROW)


class _Walk:
    """Walks through the statements of one scope; ``names`` holds what the template has set."""

    def __init__(self, names: Mapping[str, _Value], *, in_loop: bool) -> None:
        self._names = dict(names)
        self._in_loop = in_loop

    def through(self, body: Iterable[nodes.Node], *, always: bool = True) -> None:
        """Raises _NotLinear. ``always``: the statements run in any case."""
        for node in body:
            match node:
                case nodes.Output():
                    for part in node.nodes:
                        self._value(part)
                case nodes.If():
                    self._condition(node.test)
                    self.through([*node.body, *node.elif_, *node.else_], always=False)
                case nodes.Assign():
                    self._set(node.target, self._value(node.node), always=always)
                case nodes.For(recursive=False):
                    self._loop(node)
                case _:
                    raise _NotLinear

    def _loop(self, node: nodes.For) -> None:
        items = self._value(node.iter)
        if self._in_loop and items.of is not _Of.PART:
            raise _NotLinear  # the same work again in each iteration
        outside = {
            name: _ROW if value.of is _Of.PART else value for name, value in self._names.items()
        }
        item = _Value(min(items.of, _Of.PART), items.growth)
        inside = _Walk(outside, in_loop=True)
        inside._set(nodes.Name("loop", "store"), item)
        inside._set(node.target, item)
        if node.test is not None:
            inside._condition(node.test)
        inside.through(node.body)
        self.through(node.else_, always=False)

    def _set(self, target: nodes.Node, value: _Value, *, always: bool = True) -> None:
        match target:
            case nodes.Name():
                before = [] if always else [self._names.get(target.name, _ROW)]
                self._names[target.name] = _largest([value, *before])
            case nodes.Tuple():
                for part in target.items:
                    self._set(part, value, always=always)
            case _:
                raise _NotLinear

    def _condition(self, node: nodes.Node) -> None:
        """As ``_value``; but a check of a name that does not iterate over it costs nothing."""
        match node:
            case nodes.Name():
                return
            case nodes.Not():
                self._condition(node.node)
            case nodes.And() | nodes.Or():
                self._condition(node.left)
                self._condition(node.right)
            case nodes.Test(node=nodes.Name()) if node.name in _TESTS_OF_KIND:
                return
            case nodes.Compare(
                expr=nodes.Name(), ops=[nodes.Operand(op="eq" | "ne", expr=nodes.Const())]
            ):
                return
            case _:
                self._value(node)

    def _value(self, node: nodes.Node) -> _Value:
        value = self._any_value(node)
        if value.growth > _MOST_GROWTH:
            raise _NotLinear
        return value

    def _any_value(self, node: nodes.Node) -> _Value:
        match node:
            case nodes.Const() | nodes.TemplateData():
                return _CONSTANT
            case nodes.Name():
                value = self._names.get(node.name, _ROW)
                if self._in_loop and value.of is _Of.ROW:
                    raise _NotLinear
                return value
            case nodes.Getattr():
                return self._value(node.node)
            case nodes.Getitem():
                self._value(node.arg)
                return self._value(node.node)
            case nodes.Slice():
                self._all([part for part in (node.start, node.stop, node.step) if part is not None])
                return _CONSTANT
            case nodes.List() | nodes.Tuple():
                return _grown(self._all(node.items))
            case nodes.Dict():
                return _grown(self._all([part for p in node.items for part in (p.key, p.value)]))
            case nodes.Concat():
                return _grown(self._all(node.nodes))
            case nodes.BinExpr():  # And and Or are BinExpr, too
                return self._all([node.left, node.right])
            case nodes.Not():
                self._condition(node)
                return _CONSTANT
            case nodes.Neg() | nodes.Pos():
                return self._value(node.node)
            case nodes.Compare():
                self._all([node.expr, *(operand.expr for operand in node.ops)])
                return _CONSTANT
            case nodes.CondExpr():
                self._condition(node.test)
                return self._all([node.expr1, *([node.expr2] if node.expr2 else [])])
            case nodes.Test() if node.name in _TESTS and _is_plain_call(node):
                self._all([node.node, *node.args])
                return _CONSTANT
            case nodes.Filter() if node.node is not None and _has_no_star(node):
                return self._filtered(node, node.node)
            case nodes.Call(node=nodes.Getattr() as function) if _is_plain_call(node):
                return self._called(function, node.args)
            case _:
                raise _NotLinear

    def _filtered(self, node: nodes.Filter, given: nodes.Expr) -> _Value:
        arguments = [*node.args, *(pair.value for pair in node.kwargs)]
        if node.name in ("d", "default"):
            return self._all([given, *arguments])
        if node.name == "format":
            if not isinstance(given, nodes.Const) or not is_plain_format(str(given.value)):
                raise _NotLinear
            return _grown(self._all([given, *arguments]))
        if not all(map(_is_constant, arguments)):
            raise _NotLinear
        if node.name == "map":
            name = node.args[0].as_const() if node.args else "first"  # … or attribute = "…"
            if len(node.args) > 1 or name not in _FILTERS | {"tojson"}:
                raise _NotLinear
            value = self._value(given)
            return _grown(value) if name == "tojson" else value
        if node.name in _FILTERS_OF_EACH:
            place = 1 if node.name.endswith("attr") else 0
            if any(test.as_const() not in _TESTS for test in node.args[place : place + 1]):
                raise _NotLinear
            return self._value(given)
        if node.name in _FILTERS:
            return self._value(given)
        if node.name == "tojson" and arguments:
            raise _NotLinear  # an indent grows with the nesting of its input
        if node.name in _GROWING_FILTERS and all(map(_is_short, arguments)):
            if node.name == "replace":
                _check_old(arguments[:1])
                _check_old([pair.value for pair in node.kwargs if pair.key in ("old", "s")])
            return _grown(self._value(given))
        raise _NotLinear

    def _called(self, function: nodes.Getattr, arguments: list[nodes.Expr]) -> _Value:
        if function.attr == "get":
            return self._all([function.node, *arguments])
        if function.attr == "join" and _is_short(function.node):
            return _grown(self._all(arguments))
        if function.attr == "strftime" and all(map(_is_plain_date, arguments)):
            return self._value(function.node)
        if function.attr in _METHODS and all(map(_is_constant, arguments)):
            return self._value(function.node)
        if function.attr == "replace" and all(map(_is_short, arguments)):
            _check_old(arguments[:1])
            return _grown(self._value(function.node))
        raise _NotLinear

    def _all(self, parts: Iterable[nodes.Node]) -> _Value:
        return _largest([self._value(part) for part in parts])


def _largest(values: list[_Value]) -> _Value:
    of = max((value.of for value in values), default=_Of.TEMPLATE)
    return _Value(of, max((value.growth for value in values), default=0))


def _grown(value: _Value) -> _Value:
    return value._replace(growth=value.growth + 1)


def _grows(node: nodes.Node) -> bool:
    match node:
        case nodes.Filter(name="map"):
            return any(isinstance(arg, nodes.Const) and arg.value == "tojson" for arg in node.args)
        case nodes.Filter():
            return node.name in _GROWING_FILTERS or node.name == "format"
        case nodes.Call(node=nodes.Getattr() as function):
            return function.attr in ("join", "replace")
    return False


def _check_old(arguments: list[nodes.Expr]) -> None:
    """An empty text is found between any two characters."""
    if any(isinstance(argument, nodes.Const) and not argument.value for argument in arguments):
        raise _NotLinear


def _has_no_star(node: Any) -> bool:
    return node.dyn_args is None and node.dyn_kwargs is None


def _is_plain_call(node: Any) -> bool:
    return _has_no_star(node) and not node.kwargs


def _is_constant(argument: nodes.Node) -> bool:
    if not isinstance(argument, nodes.Const):
        return False
    value = argument.value
    return not isinstance(value, int | float) or abs(value) <= _MOST_NUMBER


def _is_short(argument: nodes.Node) -> bool:
    if not isinstance(argument, nodes.Const):
        return False
    value = argument.value
    size = len(value) if isinstance(value, str) else abs(value or 0)
    return bool(size <= _MOST_GROWN_BY)


def _is_plain_date(argument: nodes.Node) -> bool:
    return isinstance(argument, nodes.Const) and bool(_PLAIN_DATE.fullmatch(str(argument.value)))
