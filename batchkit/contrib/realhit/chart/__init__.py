"""Scoring of charts that a model wrote as code. The code is run in a sandbox, the y values are read from pyplot, and
compared with the reference.

Malicious code can falsify the score of its own row, because the values are read in the interpreter that ran the code.
But the code can't see the reference, and can't affect the scores of other rows.

There are two modes. ``official`` scores like RealHiTBench's own runner under numpy 1.26. ``fixed`` corrects errors of
that runner that make good charts fail, and also accepts the values that ``official`` reads. docs/scoring.md lists the
differences.

The y values are compared as in RealHiTBench (chart_metric_util, from TableBench): lists are flattened by one level,
each value is rounded to two decimals, and the sorted lists must be equal. Before, the reference values of a pie are
divided by their sum.
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
    """An answer that should contain the code of a chart."""

    response: str  # the whole answer of the model
    chart_type: str  # LineChart, BarChart, ScatterChart or PieChart
    reference: str  # a Python list of y values, as text
    table: Path | None  # the file that the code reads; None if it reads none


class ChartScore(NamedTuple):
    """The score of a chart.

    ``ecr``: True if the code ran without an error. ``passed``: True if the chart's values equal the reference; None
    (unscored) if the reference is unusable. ``y``: the chart's values as text, or "" if there are none. ``problem``:
    one line that says why the code did not run or the chart did not pass; None if it passed.
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
    """Yield the score of each chart, in the order of ``charts``. Only a few charts are read ahead.

    ``workers``: number of charts that run at the same time; None for one per core. Closing the iterator ends the
    running charts.

    Raises:
        SandboxError: code can't be confined on this machine. No code is run.
    """
    check_sandbox()
    return _scores(charts, mode, workers or len(os.sched_getaffinity(0)))


def score_chart(chart: Chart, sandbox: Sandbox, mode: Mode) -> ChartScore:
    """Run the code of one chart in ``sandbox`` and return the chart's score. The sandbox stays usable for later charts,
    whatever the code does.

    Raises:
        SandboxError: the sandbox can't be started, or can't confine the process for this chart; the code is then not
            run.
    """
    reference = reference_values(chart.reference, mode)
    unscored = None if reference is None else False
    # In official mode, the names of tables are replaced before the code is extracted; in fixed mode, after.
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
        sandbox.close()  # otherwise, shutdown would wait until the threads have finished their charts
        pool.shutdown(cancel_futures=True)


def reference_values(text: str, mode: Mode) -> list[Any] | None:
    """Return the list of y values in ``text``, the reference in the data set; None if ``text`` is not a usable list."""
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
        TypeError, ArithmeticError: a value is not a number, or the reference values of a pie have the sum 0.
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
    # Missing values (NaN) are sorted to the end. Values are rounded after sorting, which does not change their order.
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
    """Return the value of a literal like ``ast.literal_eval``, but also accept ``nan`` and ``masked``, as NaN."""
    match node:
        case ast.List(elts=nodes) | ast.Tuple(elts=nodes):
            return [_with_missing(child) for child in nodes]
        case ast.Name(id=name) if name in _MISSING:
            return math.nan
        case _:
            return ast.literal_eval(node)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")
