"""``run.metrics_port``: what Prometheus gets from a run, and what the dashboard draws of it."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from batchkit.config.loading import make_job
from batchkit.execution.prometheus import FAMILIES, HOST, exporting
from batchkit.storage.metrics import GpuLoad, Metrics
from tests.support.dry_runs import RUN, n_records, prepare, run
from tests.support.waiting import until

DOCS = Path(__file__).parents[2] / "docs"

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


@pytest.fixture
def port() -> int:
    with socket.create_server((HOST, 0)) as free:
        found: int = free.getsockname()[1]
        return found


def scraped(port: int) -> dict[str, Metric]:
    answer = httpx.get(f"http://{HOST}:{port}/metrics").raise_for_status()
    return {found.name: found for found in text_string_to_metric_families(answer.text)}


def values(found: dict[str, Metric], name: str, label: str) -> dict[str, float]:
    return {sample.labels[label]: sample.value for sample in found[name].samples}


@pytest.mark.slow
def test_a_run_is_scraped_while_it_works(start: Any, port: int) -> None:
    prepare(
        40, engine={"options": {"latency_s": 0.5}}, run={"max_in_flight": 4, "metrics_port": port}
    )
    start("run", "job.toml")
    until(lambda: n_records() >= 8)
    until(lambda: values(scraped(port), "batchkit_rows", "status").get("ok", 0) >= 4)
    found = scraped(port)
    assert values(found, "batchkit_rows", "status")["failed"] == 0
    assert values(found, "batchkit_rows_expected", "run") == {"a": 40}
    assert values(found, "batchkit_num_requests_allowed", "run") == {"a": 4}
    (info,) = found["batchkit_run_info"].samples
    assert (
        info.labels | {"run": "a", "engine": "dry-run", "gen_ai_operation_name": "chat"}
        == info.labels
    )
    assert found["batchkit_generation_tokens"].type == "counter"
    assert values(found, "batchkit_generation_tokens", "run")["a"] % 6 == 0


def test_every_metric_is_of_its_kind_and_its_units_are_those_of_prometheus(port: int) -> None:
    job = {
        "name": "a",
        "task": "embed",
        "engine": {"kind": "dry-run"},
        "run": {"metrics_port": port},
    }
    gpus = [GpuLoad(2**30, 0.5), GpuLoad(2**31)]
    with exporting(make_job(job, "the test")) as show:
        assert set(scraped(port)) == {"batchkit_run_info"}  # the model is loading
        socket.create_server(("127.0.0.2", port)).close()  # free: nobody elsewhere can read them
        show(Metrics("x", 1, 2.5, 3, 1, 9, host_bytes=2**20, gpus=gpus))
        found = scraped(port)
    kinds = {
        metric.name + "_total" * (metric.type == "counter"): metric.type
        for metric in found.values()
    }
    assert kinds == {"batchkit_run_info": "gauge"} | {
        name: "counter" if name.endswith("_total") else "gauge" for name in FAMILIES
    }
    assert all(not re.search(r"_(ms|gb|mb|perc|percent)$", name) for name in kinds)
    assert values(found, "batchkit_gpu_memory_bytes", "gpu") == {"0": 2**30, "1": 2**31}
    assert values(found, "batchkit_gpu_utilization_ratio", "gpu") == {"0": 0.5}
    assert values(found, "batchkit_run_info", "gen_ai_operation_name") == {"embeddings": 1}
    with pytest.raises(httpx.ConnectError):
        scraped(port)


def test_the_dashboard_and_the_docs_have_these_names() -> None:
    dashboard = json.loads((DOCS / "grafana.json").read_text())
    drawn = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"batchkit_\w+", target["expr"])
    }
    assert drawn == set(FAMILIES)
    asked = re.findall(r"batchkit_\w+", json.dumps(dashboard["templating"]))
    assert set(asked) == {"batchkit_run_info"}
    told = set(re.findall(r"`(batchkit_\w+)", (DOCS / "run-folder.md").read_text()))
    assert told == {"batchkit_run_info", *FAMILIES}


def test_a_taken_port_is_said_before_there_is_a_run() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        prepare(3, run={"metrics_port": port})
        found = run()
        assert found.exit_code == 2
        assert (
            f"run.metrics_port = {port}: can't listen on 127.0.0.1: Address already in use"
            in found.stderr
        )
        assert not RUN.exists()
    assert run().exit_code == 0
