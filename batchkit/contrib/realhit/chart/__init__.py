"""Scoring of charts that a model wrote as code: run in a sandbox, read from pyplot, compared with the reference.

A chart's code can falsify its own score: the values are read in the interpreter that ran the code, so malicious code
can return any values. It has no reference to copy, though, and can affect only its own row's score.

Two modes: ``official`` is what RealHiTBench's own runner does under numpy 1.26; ``fixed`` corrects what makes good
charts fail in that runner, and also reads everything that ``official`` reads. docs/scoring.md lists the differences.

The y values are compared as in RealHiTBench (chart_metric_util, from TableBench): lists are flattened by one level,
each value is rounded to two decimals, and the sorted lists must be equal. A pie's reference is divided by its sum
first.
"""

from __future__ import annotations

import ast
import json
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from batchkit.contrib.realhit.chart.answer import TABLE_NAME, Mode, chart_code, with_table
from batchkit.contrib.realhit.chart.sandbox import ProgramRun, Sandbox, check_sandbox

_AHEAD = 2  # charts per worker that are started before the first result is awaited
_MISSING = ("nan", "masked")
_ROUNDING = 0.05  # how far the sum of a pie's fractions, rounded to two decimals, may be from 1


class Chart(NamedTuple):
    """An answer with the code of a chart. ``table``: the file that its code reads, or None."""

    response: str
    chart_type: str  # LineChart, BarChart, ScatterChart or PieChart
    reference: str  # a Python list of y values, as text
    table: Path | None


class ChartScore(NamedTuple):
    """The score of a chart.

    ``ecr``: the code ran. ``passed``: its values are right; None (unscored) if the reference is unusable. ``y``: the
    values found, as text, or "". ``problem``: one line that says why it did not run or pass.
    """

    ecr: bool
    passed: bool | None
    y: str
    problem: str | None


def score_charts(
    charts: Iterable[Chart],
    *,
    mode: Mode,
    workers: int | None = None,
) -> Iterator[ChartScore]:
    """Yield the scores of ``charts`` in their order; only a few charts are read ahead.

    ``workers`` charts (None: one per core) run at the same time. Closing the iterator ends them.

    Raises:
        SandboxError: before any code runs, if code cannot be confined on this machine.
    """
    check_sandbox()
    return _scores(charts, mode, workers or len(os.sched_getaffinity(0)))


def score_chart(chart: Chart, sandbox: Sandbox, mode: Mode) -> ChartScore:
    """Run one chart in ``sandbox``, which no chart can harm, and return its score.

    Raises:
        SandboxError: the sandbox can't be started, or did not confine this chart.
    """
    reference = reference_values(chart.reference, mode)
    unscored = None if reference is None else False
    # In official mode names are replaced first, so that the extracted code has them replaced.
    response = with_table(chart.response, mode) if mode == "official" else chart.response
    code = chart_code(response, mode)
    if code is None:
        return ChartScore(False, unscored, "", "there is no code in the answer")
    if mode == "fixed":
        code = with_table(code, mode)
    missing = chart.table is not None and not chart.table.is_file()
    table = None if chart.table is None or missing else str(chart.table.resolve())
    outcome = sandbox.run(ProgramRun(code, chart.chart_type, mode, table))
    if outcome.problem is not None:
        problem = outcome.problem
        if missing and "FileNotFoundError" in problem and TABLE_NAME in problem:
            problem = f"table {chart.table.name if chart.table else ''} is missing"
        return ChartScore(False, unscored, "", problem)
    first = outcome.y[0] if outcome.y else ""
    if reference is None:
        return ChartScore(True, None, first, "the reference is not a list of y values")
    for y in outcome.y:
        if passes(chart.chart_type, reference, y, mode):
            return ChartScore(True, True, y, None)
    if not first:
        return ChartScore(True, False, "", f"no y values of a {chart.chart_type} can be read")
    return ChartScore(True, False, first, "the y values differ from the reference")


def _scores(charts: Iterable[Chart], mode: Mode, workers: int) -> Iterator[ChartScore]:
    sandbox = Sandbox()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="chart")
    running: deque[Future[ChartScore]] = deque()
    try:
        for chart in charts:
            running.append(pool.submit(score_chart, chart, sandbox, mode))
            if len(running) >= workers * _AHEAD:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        sandbox.close()  # the threads would wait for their charts otherwise
        pool.shutdown(cancel_futures=True)


def reference_values(text: str, mode: Mode) -> list[Any] | None:
    """Return the list of y values in ``text``, the data set's reference; None if it is not a usable list."""
    try:
        if mode == "official":
            values = ast.literal_eval(text.strip())
        else:
            values = _with_missing(ast.parse(text.strip(), mode="eval").body)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    if not isinstance(values, list):
        return None
    if mode == "fixed" and all(isinstance(v, float) and math.isnan(v) for v in _flat(values)):
        return None
    return values


def passes(chart_type: str, reference: list[Any], y: str, mode: Mode) -> bool:
    """Return whether ``y``, which may be any text, is a list of numbers that equals ``reference``."""
    try:
        # A list of numbers is the same in JSON and Python, and JSON's parser is safe here.
        values = json.loads(y, parse_constant=_refuse if mode == "official" else None)
        return same_values(chart_type, reference, values, mode)
    except (ValueError, TypeError, ArithmeticError, RecursionError):
        return False


def same_values(chart_type: str, reference: list[Any], prediction: list[Any], mode: Mode) -> bool:
    """Return whether a chart's values in ``prediction`` equal those of ``reference``, in any order.

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
    # Missing values last. Rounding keeps the order, so it can be done later.
    one, other = (sorted(v, key=lambda value: (math.isnan(value), value)) for v in (wanted, found))
    return all(_same(*pair, mode) for pair in zip(one, other, strict=True))


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
    """Return the value of a literal like ``ast.literal_eval``, which does not accept NaN in lists of numbers."""
    match node:
        case ast.List(elts=nodes) | ast.Tuple(elts=nodes):
            return [_with_missing(child) for child in nodes]
        case ast.Name(id=name) if name in _MISSING:
            return math.nan
        case _:
            return ast.literal_eval(node)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")
