"""A test for templates that can't hang, so that the run's own process can render them.

Only the constructs listed here are allowed. A filter that makes its input longer may add at most 16 characters at each
position, and at most two such filters may be applied to each other. A loop may use only its own item and may contain no
other loop, so that sizes are not multiplied.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from jinja2 import nodes

# fmt: off
_NODES = {
    nodes.Output, nodes.TemplateData, nodes.If, nodes.For, nodes.Assign, nodes.Name, nodes.Const, nodes.Getattr,
    nodes.Getitem, nodes.Slice, nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair, nodes.Keyword,
    nodes.Concat, nodes.Add, nodes.Sub, nodes.Div, nodes.FloorDiv, nodes.Neg, nodes.Pos, nodes.And,
    nodes.Or, nodes.Not, nodes.Compare, nodes.Operand, nodes.CondExpr,
}
_FILTERS = {
    "abs", "capitalize", "count", "first", "float", "int", "items", "last", "length", "list", "lower",
    "map", "max", "min", "reverse", "round", "safe", "sort", "string", "title", "trim", "truncate",
    "upper", "wordcount",
}
_TESTS = {
    "boolean", "defined", "divisibleby", "eq", "even", "false", "float", "ge", "gt", "in", "integer",
    "iterable", "le", "lower", "lt", "mapping", "ne", "none", "number", "odd", "sequence", "string",
    "true", "undefined", "upper",
}
_METHODS = {
    "capitalize", "casefold", "count", "endswith", "find", "isalpha", "isdigit", "isoformat", "items",
    "keys", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "rsplit", "rstrip", "split",
    "splitlines", "startswith", "strftime", "strip", "title", "upper", "values",
}
_GROWING = {"e", "escape", "indent", "join", "replace", "tojson", "urlencode"}
# fmt: on
_PADDED_DATE = re.compile(r"%[^A-Za-z%]")
_MOST_NUMBER = 100_000
_MOST_GROWN_BY = 16  # maximum characters of an argument, which a filter may add at every position
_MOST_GROWTH = 2  # maximum number of growing filters that are applied to each other


def is_plain(tree: nodes.Template) -> bool:
    """Return whether the template ``tree`` can't hang. The tree must come from the parser of ``sandbox.reading``."""
    return (
        all(map(_is_known, tree.find_all(nodes.Node)))
        and all(map(_is_simple, tree.find_all(nodes.For)))
        and all(_growth(node) <= _MOST_GROWTH for node in tree.find_all(nodes.Expr) if _grows(node))
    )


def _is_known(node: nodes.Node) -> bool:
    match node:
        case nodes.Test(name=name, dyn_args=None, dyn_kwargs=None):
            return name in _TESTS
        case nodes.Filter(name="d" | "default", dyn_args=None, dyn_kwargs=None):
            return node.node is not None
        case nodes.Filter(name=name, dyn_args=None, dyn_kwargs=None):
            arguments = [*node.args, *(pair.value for pair in node.kwargs)]
            return node.node is not None and _is_known_call(name, _FILTERS, arguments)
        case nodes.Call(node=nodes.Getattr(attr="get"), kwargs=[], dyn_args=None, dyn_kwargs=None):
            return True
        case nodes.Call(node=nodes.Getattr(attr="join", node=text), args=[_], kwargs=[]):
            return node.dyn_args is None and node.dyn_kwargs is None and _is_short(text)
        case nodes.Call(node=nodes.Getattr(attr=name), kwargs=[], dyn_args=None, dyn_kwargs=None):
            return _is_known_call(name, _METHODS, node.args)
    return type(node) in _NODES


def _is_known_call(name: str, known: set[str], arguments: list[nodes.Expr]) -> bool:
    """Return whether a filter or method with these arguments is allowed."""
    given: list[Any] = [arg.value for arg in arguments if isinstance(arg, nodes.Const)]
    if len(given) < len(arguments):
        return False
    match name:
        case "strftime":
            return not any(_PADDED_DATE.search(str(text)) for text in given)
        case "tojson":
            return not given  # an indent grows with the nesting of its input
        case "replace" if not given or not given[0]:
            return False  # an empty text is found between any two characters
    if name in _GROWING:
        return all(map(_is_short, arguments))
    return name in known and not any(
        isinstance(value, int | float) and abs(value) > _MOST_NUMBER for value in given
    )


def _is_simple(loop: nodes.For) -> bool:
    """Return whether the time of ``loop`` is linear in the size of its iterable, and no growing filter makes the
    iterable."""
    own = {"loop", *(name.name for name in _names([loop.target]))}
    parts = [*loop.body, *([loop.test] if loop.test else [])]
    return (
        not loop.recursive
        and loop.find(nodes.For) is None
        and all(name.name in own for name in _names(parts))
        and not _growth(loop.iter)
    )


def _growth(node: nodes.Node) -> int:
    """Return the number of filters and methods in ``node`` that make a text longer."""
    return sum(map(_grows, [node, *node.find_all(nodes.Expr)]))


def _grows(node: nodes.Node) -> bool:
    match node:
        case nodes.Filter(name=name) | nodes.Call(node=nodes.Getattr(attr=name)):
            return name in _GROWING
    return False


def _is_short(argument: nodes.Expr) -> bool:
    if not isinstance(argument, nodes.Const):
        return False
    value = argument.value
    return bool((len(value) if isinstance(value, str) else abs(value or 0)) <= _MOST_GROWN_BY)


def _names(parts: Iterable[nodes.Node]) -> Iterable[nodes.Name]:
    within = (node for part in parts for node in (part, *part.find_all(nodes.Name)))
    return (node for node in within if isinstance(node, nodes.Name))
