"""``export --realhit``: the file of the benchmark's own harness."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batchkit.commands.export import export
from batchkit.commands.score import score_run
from batchkit.commands.score.predictions import score_predictions
from batchkit.config.export_target import Target
from batchkit.errors import InputError, StoreError
from batchkit.storage.job_toml import job_of_run
from tests.support.chat_server import serving
from tests.support.command_line import batchkit
from tests.support.scored_runs import echo, engine, job, quiet, run

pytestmark = pytest.mark.slow

YEARS = ("35 to 44 years", "35 to 39 years")
ANSWERS = [("1955, 62170", "1955, 62170"), YEARS, ("x", None), ("a b c", "b")]
REALHIT = [
    {
        "id": n,
        "FileName": "t",
        "QuestionType": "Fact Checking" if n < 3 else "Data Analysis",
        "SubQType": "s",
        "Question": "?",
        "FinalAnswer": answer,
        "ProcessedAnswer": "",
        **({} if said is None else {"say": said}),
    }
    for n, (answer, said) in enumerate(ANSWERS)
]
METRICS = {"F1": "f1", "EM": "em", "ROUGE-L": "rouge-l", "SacreBLEU": "sacrebleu"}
REALHIT_SCORING = {
    "extract": "text",
    "reference": "FinalAnswer",
    "scorers": [*METRICS.values()],
    "group_by": "QuestionType",
}


@pytest.fixture
def realhit(tmp_path: Path) -> Path:
    with serving(echo) as server:
        made = job(
            tmp_path,
            REALHIT,
            engine=engine(server),
            scoring=REALHIT_SCORING,
            output={"keep": []},
            vars={"modality": "text"},
        )
        return run(made)


def test_the_harness_s_file_agrees_with_the_table(tmp_path: Path, realhit: Path) -> None:
    batchkit("export", realhit, "--realhit", tmp_path / "out", "--json").ok()
    (path,) = (tmp_path / "out").glob("results_*.json")
    content = json.loads(path.read_text())
    found = score_run(realhit, say=quiet).to_json()["metrics"]
    for kind, metrics in content["aggregate_metrics"].items():
        ours = {theirs: found[kind][name] for theirs, name in METRICS.items()}
        assert metrics == pytest.approx(ours)
    assert content["aggregate_metrics"]["Fact Checking"]["F1"] == 87.5
    assert [result["id"] for result in content["results"]] == [0, 1, 3]
    assert content["results"][1]["Metrics"]["EM"] == 0
    own = {name: REALHIT[1][name] for name in ("FileName", "QuestionType", "SubQType", "Question")}
    answers = {"Reference": "35 to 44 years", "Prediction": "35 to 39 years"}
    varies = {"Metrics": 0, "ProcessingTime": 0}
    assert content["results"][1] | varies == {"id": 1, **own, **answers, **varies}
    assert content["config"]["total_queries"] == 3
    assert content["config"]["modality"] == "text"
    assert content["config"]["throughput"] > 0
    checkpoint = json.loads((tmp_path / "out/checkpoint.json").read_text())
    assert checkpoint["processed_ids"] == [0, 1, 3]
    table, missing = score_predictions(job_of_run(realhit), path, quiet)  # and back again
    assert table.to_json()["metrics"]["Fact Checking"]["f1"] == 87.5
    assert missing == 1


def test_the_harness_s_file_goes_where_it_is_asked_to(tmp_path: Path, realhit: Path) -> None:
    (results, checkpoint) = export(realhit, Target("realhit", str(tmp_path / "x/mine.json")))
    assert (results.path, checkpoint.path) == (
        str(tmp_path / "x/mine.json"),
        str(tmp_path / "x/checkpoint.json"),
    )
    assert (results.rows, checkpoint.rows) == (3, 3)
    (results, _) = export(realhit, Target("realhit"))
    assert Path(results.path).parent == realhit / "realhit"


@pytest.mark.parametrize("name", ["", "mine.json"])
def test_the_harness_s_checkpoint_never_takes_the_place_of_ours(realhit: Path, name: str) -> None:
    before = (realhit / "checkpoint.json").read_bytes()
    with pytest.raises(
        StoreError, match=r"checkpoint\.json: belongs to a run, as one of its files or its input"
    ):
        export(realhit, Target("realhit", str(realhit / name)))
    assert (realhit / "checkpoint.json").read_bytes() == before


def test_a_run_whose_input_is_gone_has_no_harness_file(tmp_path: Path, realhit: Path) -> None:
    (tmp_path / "rows.jsonl").unlink()
    with pytest.raises(InputError):
        export(realhit, Target("realhit", str(tmp_path / "out")))
