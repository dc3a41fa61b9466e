"""The scores of charts in a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchkit.commands.run import run_job
from batchkit.commands.score import score_run
from tests.support.chat_server import serving
from tests.support.scored_runs import echo, engine, job, run, scored

pytestmark = pytest.mark.slow

pytest.importorskip("pandas")
pytest.importorskip("matplotlib")


def test_charts_are_run_only_where_that_is_allowed_and_one_that_can_t_be_spares_the_others(
    tmp_path: Path,
) -> None:
    program = "import matplotlib.pyplot as plt\nplt.bar(['a', 'b'], [3, 4])\nplt.show()"
    row = {"kind": "Chart", "say": program, "a": "[3, 4]"}
    rows = [{**row, "id": "q0", "SubQType": "BarChart Generation"}, {**row, "id": "q1"}]
    scoring = {"extract": "code", "reference": "a", "scorers": ["chart"], "mode": "fixed"}
    said: list[str] = []
    with serving(echo) as server:
        made = job(tmp_path, rows, engine=engine(server), scoring=scoring)
        run_job(made, say=said.append).checked()
    none = {"ecr": None, "pass": None}
    assert [scores for _, scores in scored(made.folder).values()] == [none, none]
    assert "2 charts are unscored: set scoring.allow_code = true to run their code" in said
    allowed = made.scoring.model_copy(update={"allow_code": True})
    score_run(made.folder, made.model_copy(update={"scoring": allowed}), say=said.append)
    assert [scores for _, scores in scored(made.folder).values()] == [{"ecr": 1, "pass": 1}, none]
    assert any(t.startswith("row q1: its chart is unscored: 'SubQType' is undef") for t in said)


def test_rows_of_each_rule_are_scored_with_its_parameters(tmp_path: Path) -> None:
    program = "import matplotlib.pyplot as plt\nplt.bar(['a', 'b'], [3, 4])\nplt.show()"
    kinds = ("BarChart", "LineChart")
    rows = [{"id": f"q{n}", "kind": kinds[n % 2], "say": program, "a": "[3, 4]"} for n in range(4)]
    rules = [
        {"where": {"kind": kind}, "scorers": [{"chart": {"chart_type": kind}}]} for kind in kinds
    ]
    scoring = {"extract": "code", "reference": "a", "allow_code": True, "rules": rules}
    with serving(echo) as server:
        folder = run(job(tmp_path, rows, engine=engine(server), scoring=scoring))
    passes = [scores["pass"] for _, scores in scored(folder).values()]
    assert passes == [1, 0, 1, 0]
