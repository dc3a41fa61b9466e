"""Run the gold code of RealHiTBench's charts, in both modes: do the harness or the data fail?

    python benchmarks/gold_charts.py --qa QA_final.json --tables tables/

Prints a table, a line for each gold chart that did not pass, and one JSON line. The authors' own
runner has ECR 128 and PASS 115 of 154. Charts whose table is not in the folder are counted
separately: they are run too, because the code of some holds the values and reads no table.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, NamedTuple, get_args

from batchkit.contrib.realhit.chart import Chart, ChartScore, score_charts
from batchkit.contrib.realhit.chart.answer import Mode, chart_code, fixed


class Gold(NamedTuple):
    row_id: int
    chart: Chart


class Result(NamedTuple):
    gold: Gold
    score: ChartScore
    has_table: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--qa", type=Path, required=True, help="QA_final.json")
    parser.add_argument("--tables", type=Path, required=True, help="folder of the .xlsx tables")
    parser.add_argument("--workers", type=int, default=None, help="default: one a core")
    arguments = parser.parse_args()
    golds = read_golds(arguments.qa, arguments.tables)
    print(
        f"{'mode':<10}{'charts':>8}{'compile':>9}{'missing':>9}{'with table':>12}{'ECR':>6}{'PASS':>6}"
    )
    summaries = {}
    failures: list[str] = []
    for mode in get_args(Mode):
        summaries[mode] = run(golds, mode, arguments.workers, failures)
    print(*failures, sep="\n")
    print(json.dumps(summaries))


def read_golds(qa: Path, tables: Path) -> list[Gold]:
    rows: list[dict[str, Any]] = json.loads(qa.read_text(encoding="utf-8"))["queries"]
    return [
        Gold(
            row["id"],
            Chart(
                row["FinalAnswer"],
                row["SubQType"].split()[0],
                row["ProcessedAnswer"],
                tables / f"{row['FileName']}.xlsx",
            ),
        )
        for row in rows
        if row["QuestionType"] == "Visualization"
    ]


def run(
    golds: list[Gold], mode: Mode, workers: int | None, failures: list[str]
) -> dict[str, float | int]:
    began = time.monotonic()
    scores = list(score_charts((gold.chart for gold in golds), mode=mode, workers=workers))
    seconds = time.monotonic() - began
    results = [
        Result(gold, score, gold.chart.table is not None and gold.chart.table.is_file())
        for gold, score in zip(golds, scores, strict=True)
    ]
    there = [result for result in results if result.has_table]
    summary = {
        "charts": len(golds),
        "compile": sum(compiles(gold.chart.response, mode) for gold in golds),
        "table_missing": len(results) - len(there),
        "with_table": len(there),
        "ecr": sum(result.score.ecr for result in there),
        "pass": sum(result.score.passed is True for result in there),
        "unscored": sum(result.score.passed is None for result in results),
        "table_missing_ecr": sum(r.score.ecr for r in results if not r.has_table),
        "table_missing_pass": sum(r.score.passed is True for r in results if not r.has_table),
        "seconds": round(seconds, 1),
    }
    columns = ("charts", "compile", "table_missing", "with_table", "ecr", "pass")
    print(
        f"{mode:<10}"
        + "".join(f"{summary[c]:>{w}}" for c, w in zip(columns, (8, 9, 9, 12, 6, 6), strict=True))
    )
    failures += [
        f"{mode}: {result.gold.row_id} ({result.gold.chart.chart_type}): {result.score.problem}"
        for result in results
        if result.score.problem is not None
    ]
    return summary


def compiles(response: str, mode: Mode) -> bool:
    """Return whether the code compiles. It is compiled outside the sandbox, because it is from the
    data set, not from a model."""
    code = chart_code(response, mode)
    if code is None:
        return False
    if mode == "official":
        code = "if True:\n" + "".join(f"    {line}\n" for line in code.strip().split("\n"))
    try:
        compile(fixed(code) if mode == "fixed" else code, "<gold>", "exec")
    except (SyntaxError, ValueError):
        return False
    return True


if __name__ == "__main__":
    main()
