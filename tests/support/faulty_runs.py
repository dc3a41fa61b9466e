"""Runs of the real command on real vLLM, whose worker (``failing_worker.py``) is made to fail."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from batchkit.storage.log import RESULTS
from batchkit.storage.newest_lines import read_newest
from tests.support.dry_runs import manifest
from tests.support.forks import Fork
from tests.support.paths import ROOT
from tests.support.rows import write_jsonl
from tests.support.waiting import until

N_ROWS = 40
OWN, IN = "engine.in_process=false", "engine.in_process=true"

JOB = """
name = "faulty"
[input]
path = "rows.jsonl"
[prompt]
user = "{{ q }}"
[engine]
model = "MODEL"
[engine.options]
dtype = "float32"
enforce_eager = true
max_model_len = 512
max_num_seqs = 8
kv_cache_memory_bytes = 134217728
worker_cls = "tests.support.failing_worker.FailingWorker"
[sampling]
max_tokens = 12
sampling_column = "params"
[run]
stall_timeout_s = 6
deduplicate = false
"""


class Ended(NamedTuple):
    exit: int
    stdout: str
    stderr: str
    records: list[dict[str, Any]]
    log: str
    manifest: dict[str, Any]

    @property
    def reductions(self) -> Any:
        """The engine options that were reduced after out-of-memory errors."""
        return self.manifest.get("reductions", {}).get("", {}).get("options", [])

    @property
    def failed(self) -> dict[int, str]:
        return {
            record["index"]: record["error"]["kind"]
            for record in self.records
            if record["status"] == "failed"
        }

    @property
    def window(self) -> list[tuple[int, int]]:
        """Its history."""
        return [
            (int(old), int(new)) for old, new in re.findall(r"in flight (\d+) → (\d+)", self.log)
        ]


def question_rows(poison: dict[int, str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {"q": f"tell me of {n}" + " tea" * (n % 7)} for n in range(N_ROWS)
    ]
    for index, kind in poison.items():
        rows[index]["params"] = {"extra_args": {"poison": kind}}
    return rows


def start(*args: Any, **options: Any) -> Ended:
    """As ``running``, to the end."""
    with running(*args, **options) as process:
        return ended_in(args[0], process)


def ended_in(folder: Path, process: subprocess.Popen[str]) -> Ended:
    """How the run in ``folder`` ends, and what it leaves."""
    stdout, stderr = process.communicate(timeout=280)
    output = folder / "output/faulty"
    return Ended(
        process.returncode,
        stdout,
        stderr,
        list(read_newest(output / RESULTS)),
        (output / "run.log").read_text(),
        manifest(output),
    )


def wait_for_records(folder: Path, n: int) -> None:
    """Until the run in ``folder`` has so many."""
    log = folder / "output/faulty" / RESULTS
    until(lambda: log.exists() and log.read_bytes().count(b"\n") >= n, within_s=120)


def running(
    folder: Path,
    model: Path,
    rows: list[dict[str, Any]],
    faults: dict[str, Any],
    settings: Sequence[str],
    *,
    job: str = JOB,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> subprocess.Popen[str]:
    (folder / "job.toml").write_text(job.replace("MODEL", str(model)))
    (folder / "markers").mkdir(exist_ok=True)
    write_jsonl(folder / "rows.jsonl", rows)
    return Fork(
        [sys.executable, "-m", "batchkit", "run", "job.toml"]
        + [part for setting in settings for part in ("--set", setting)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "BATCHKIT_TEST_FAULTS": json.dumps({"folder": str(folder / "markers"), **faults}),
            **environment,
        },
    )


def assert_only_failed(ended: Ended, calm: list[str], failed: dict[int, str]) -> None:
    """Exactly ``failed`` failed, and every other row has the text of the undisturbed run."""
    assert ended.failed == failed, ended.log
    assert ended.exit == (3 if failed else 0), ended.stderr
    assert "Traceback" not in ended.stderr
    texts = [record["text"] for record in ended.records]
    assert texts == [None if n in failed else text for n, text in enumerate(calm)]
