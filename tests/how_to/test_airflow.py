"""A DAG of Airflow against ``batchkit serve``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.api_server import texts_of
from tests.support.client_environment import answered, client_environment, run_client

pytestmark = pytest.mark.release


def test_a_dag_of_airflow_runs_a_batch_and_downloads_its_answers(tmp_path: Path) -> None:
    airflow = client_environment(
        "airflow", "apache-airflow==3.3.2", "apache-airflow-providers-openai==2.2.0"
    )
    run_client("airflow", tmp_path, airflow)
    lines = (tmp_path / "answers.jsonl").read_text().splitlines()
    answers = texts_of([json.loads(line) for line in lines])
    assert answers == {f"row-{row}": f"dry-run: no model answered row {row}" for row in range(2)}
    assert answered(tmp_path) == [2]
