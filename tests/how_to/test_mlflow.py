"""Runs in a real MLflow, read back with its own client."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.client_environment import reader_environment
from tests.support.dry_runs import write_job
from tests.support.how_to import run_page
from tests.support.paths import ROOT
from tests.support.rows import write_jsonl

pytestmark = [pytest.mark.release, pytest.mark.timeout(900)]

N_ROWS = 40
READ = """
import json
import mlflow

client = mlflow.MlflowClient("sqlite:///mlflow.db")
(experiment,) = client.search_experiments(filter_string="name = 'batchkit'")
(run,) = client.search_runs([experiment.experiment_id])
found = run.to_dictionary()["data"] | {"name": run.info.run_name, "status": run.info.status}
found["rows_ok"] = [point.value for point in client.get_metric_history(run.info.run_id, "rows_ok")]
found["files"] = [file.path for file in client.list_artifacts(run.info.run_id)]
print(json.dumps(found))
"""


def logged(environment: Path, folder: Path, command: str) -> dict[str, Any]:
    """Run the page, with another command. Return its run of MLflow."""
    run_page(
        "mlflow",
        folder,
        environment=environment,
        replaced={"batchkit run job.toml": command},
        variables={"PYTHONPATH": str(ROOT)},
        timeout_s=600,
    )
    read = [environment / "bin" / "python", "-c", READ]
    return json.loads(subprocess.check_output(read, cwd=folder, stderr=subprocess.DEVNULL))


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    environment = reader_environment("mlflow", "mlflow==3.17.2")
    answers = [f"dry-run: no model answered row {n}" if n % 2 else "A" for n in range(N_ROWS)]
    rows = [{"q": f"question {n}", "a": answer} for n, answer in enumerate(answers)]
    write_jsonl(Path("in.jsonl"), rows)
    write_job(
        engine={"kind": "dry-run", "options": {"latency_s": 0.5, "max_num_seqs": 8}},
        sampling={"max_tokens": 16},
        scoring={"reference": "a", "scorers": ["em"]},
    )
    before, after = [
        logged(environment, tmp_path, command)
        for command in (
            "batchkit run job.toml --limit 16",
            "batchkit run job.toml",
        )
    ]
    assert (after["name"], after["status"]) == ("a", "FINISHED")
    assert after["params"]["max_num_seqs"] == "8"
    assert after["params"]["max_tokens"] == "16"
    assert after["metrics"]["score/em"] == 50
    assert after["metrics"]["rows_per_s"] > 0
    assert before["rows_ok"][-1] == 16
    assert after["rows_ok"][-1] == N_ROWS
    assert after["rows_ok"][: len(before["rows_ok"])] == before["rows_ok"]  # no point twice
    assert {"job.toml", "report.html", "results.parquet"} == set(after["files"])
