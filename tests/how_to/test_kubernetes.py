"""The manifests against the API's schema, and the command of the job's pods in two processes. No cluster is at hand."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from batchkit.storage.store.ranges import RANGE
from tests.support.command_line import batchkit
from tests.support.dry_runs import write_job
from tests.support.how_to import run_page
from tests.support.paths import ROOT
from tests.support.rows import write_jsonl

pytestmark = pytest.mark.release

JOB = ROOT / "deploy" / "kubernetes-job.yaml"
SERVER = ROOT / "deploy" / "kubernetes.yaml"
VALIDATE = [sys.executable, "-m", "uv", "tool", "run", "kubernetes-validate@1.37.0"]


def test_the_page(tmp_path: Path) -> None:
    for manifest in (JOB, SERVER):
        shutil.copy(manifest, tmp_path)
    words = {"uvx kubernetes-validate": " ".join(VALIDATE)}
    printed = run_page("kubernetes", tmp_path, replaced=words)
    for resource in ("job/reviews", "statefulset/batchkit", "service/batchkit"):
        assert f"passed for resource {resource}" in printed


@pytest.mark.parametrize(
    ("manifest", "right", "wrong"),
    [
        (JOB, "completionMode", "completionsMode"),
        (JOB, "backoffLimitPerIndex", "backoffLimitByIndex"),
        (SERVER, "containerPort", "port"),
    ],
)
def test_a_wrong_key_is_refused(tmp_path: Path, manifest: Path, right: str, wrong: str) -> None:
    text = manifest.read_text("utf-8")
    assert right in text
    (tmp_path / "wrong.yaml").write_text(text.replace(right, wrong), "utf-8")
    command = [*VALIDATE, "--strict", tmp_path / "wrong.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert wrong in done.stdout + done.stderr


def test_pods_share_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    n_rows = 8 * RANGE
    write_jsonl(Path("in.jsonl"), [{"q": f"question {n}"} for n in range(n_rows)])
    write_job(
        engine={"kind": "dry-run", "options": {"latency_s": 0.02, "max_num_seqs": 8}},
        run={"store_interval_s": 0.5},
        output={"store": f"file://{tmp_path}/store"},
    )
    (pod,) = yaml.safe_load(JOB.read_text("utf-8"))["spec"]["template"]["spec"]["containers"]
    command = " ".join(pod["command"]).replace("/job/", "")
    programs = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    pods = [
        subprocess.Popen(
            command.replace("/scratch", f"scratch{n}").split(), env=os.environ | programs
        )
        for n in range(2)
    ]
    assert [pod.wait(200) for pod in pods] == [0, 0]
    listed = batchkit("status", f"file://{tmp_path}/store/a.joined", "--json").ok().json
    assert len(listed["runs"]) == 2
    found = batchkit("verify", f"file://{tmp_path}/store/a", "--json").json
    assert found["ok"] == found["rows"] == found["records"] == n_rows
