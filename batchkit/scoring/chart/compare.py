"""Compares a chart's y values with those of its reference.

The rule is RealHiTBench's (chart_metric_util, from TableBench): lists flattened by one level, each
value rounded to two decimals, sorted, equal. A pie's reference is divided by its sum first.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from batchkit.scoring.overlap import Mode

_MISSING = ("nan", "masked")
_ROUNDING = 0.05  # how far the sum of a pie's fractions, rounded to two decimals, may be from 1


def reference_values(text: str, mode: Mode) -> list[Any] | None:
    """The list in ``text``, from the data set; None if it is not a list, or is unusable."""
    try:
        if mode == "official":
            values = ast.literal_eval(text.strip())
        else:
            values = _with_missing(ast.parse(text.strip(), mode="eval").body)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    if not isinstance(values, list):
        return None
    if mode == "fixed" and all(_is_missing(value) for value in _flat(values)):
        return None
    return values


def passes(chart_type: str, reference: list[Any], y: str, mode: Mode) -> bool:
    """Whether ``y``, any text at all, is a list of numbers equal to ``reference``."""
    try:
        # A list of numbers is the same in JSON and Python, and JSON's parser is safe here.
        values = json.loads(y, parse_constant=_refuse if mode == "official" else None)
        return same_values(chart_type, reference, values, mode)
    except (ValueError, TypeError, ArithmeticError, RecursionError):
        return False


def same_values(chart_type: str, reference: list[Any], prediction: list[Any], mode: Mode) -> bool:
    """Whether the values are equal, in any order.

    Raises:
        TypeError, ArithmeticError: they are not numbers, or a pie's reference sums to 0.
    """
    wanted, found = list(_flat(reference)), list(_flat(prediction))
    if chart_type != "PieChart":
        return _equal(wanted, found, mode)
    total = sum(wanted)
    if mode == "fixed" and abs(total - 1) <= _ROUNDING and _equal(wanted, found, mode):
        return True
    return _equal([value / total for value in wanted], found, mode)


def _equal(wanted: list[Any], found: list[Any], mode: Mode) -> bool:
    if len(wanted) != len(found):
        return False
    pairs = zip(_in_order(wanted), _in_order(found), strict=True)
    return all(_same(one, other, mode) for one, other in pairs)


def _in_order(values: Iterable[Any]) -> list[Any]:
    """Sorted, missing values last. Rounding keeps the order, so it can be done later."""
    return sorted(values, key=lambda value: (math.isnan(value), value))


def _same(one: Any, other: Any, mode: Mode) -> bool:
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    if bool(round(one, 2) == round(other, 2)):
        return True
    return mode == "fixed" and math.isclose(one, other, rel_tol=1e-9)


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list):
            yield from value
        else:
            yield value


def _with_missing(node: ast.expr) -> Any:
    """Like ``ast.literal_eval``, for lists of numbers with NaN among them."""
    match node:
        case ast.List(elts=nodes) | ast.Tuple(elts=nodes):
            return [_with_missing(child) for child in nodes]
        case ast.Name(id=name) if name in _MISSING:
            return math.nan
        case _:
            return ast.literal_eval(node)


def _is_missing(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")
