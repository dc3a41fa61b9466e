"""The scores of charts in a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchkit.commands.run import run_job
from batchkit.commands.score import score_run
from tests.support.chat_server import serving
from tests.support.scored_runs import echo, engine, job, scored

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
