"""docs/how-to/systemd.md: a real systemd runs the unit of ``deploy/`` with real vLLM."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from pathlib import Path

import pytest
from openai import OpenAI

from tests.support.how_to import run_page
from tests.support.paths import ROOT
from tests.support.server_process import NotInstalledError, free_port
from tests.support.systemd import systemd_container
from tests.support.waiting import until

pytestmark = [pytest.mark.release, pytest.mark.vllm, pytest.mark.timeout(600)]

N_ROWS = 40
INSTALL = """python3 -m venv /opt/batchkit/.venv
    /opt/batchkit/.venv/bin/pip install '/usr/src/batchkit-vllm[vllm,serve]'"""
INSTALLED = f"""mkdir -p /opt/batchkit
    ln -s {ROOT}/.venv /opt/batchkit/.venv
    chmod o+x {Path.home()}"""
UNIT = "/etc/systemd/system/batchkit-serve.service"
# A service with a private /tmp does not see a checkout in it.
PRIVATE = "s/PrivateTmp=true//" if ROOT.is_relative_to("/tmp") else ""


def test_the_unit_starts_restarts_after_a_kill_and_continues_a_batch(tmp_path: Path) -> None:
    port = str(free_port())
    try:
        with systemd_container() as inside:
            replaced = {
                INSTALL: INSTALLED,
                "/usr/src/batchkit-vllm/deploy/batchkit-serve.service /etc/systemd/system/": f"{ROOT}/deploy/batchkit-serve.service /etc/systemd/system/"
                f"\n    sed -i 's/--port 8080/--port {port}/;{PRIVATE}' {UNIT}",
                "Qwen/Qwen3-4B": "batchkit-demo",
                "max_model_len = 8192": "max_model_len = 512, enforce_eager = true",
                "127.0.0.1:8080": f"127.0.0.1:{port}",
            }
            run_page("systemd", tmp_path, replaced=replaced, inside=inside)

            def told(*words: str) -> str:
                return subprocess.check_output([*inside, *words], text=True).strip()

            key = told("cat", "/root/team-a.key")
            client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key)
            batch = start_batch(client, N_ROWS)
            until(lambda: client.batches.retrieve(batch).status == "in_progress")
            main = told("systemctl", "show", "--property=MainPID", "--value", "batchkit-serve")
            told("kill", "-9", main)
            until(lambda: is_healthy(port), 120)
            assert (
                told("systemctl", "show", "--property=NRestarts", "--value", "batchkit-serve")
                == "1"
            )
            until(lambda: client.batches.retrieve(batch).status == "completed", 240)
            file = client.batches.retrieve(batch).output_file_id
            assert file is not None
            ids = [
                json.loads(line)["custom_id"] for line in client.files.content(file).iter_lines()
            ]
            assert sorted(ids, key=int) == [str(number) for number in range(N_ROWS)]
            told("systemctl", "stop", "batchkit-serve")
            assert (
                told("systemctl", "show", "--property=Result", "--value", "batchkit-serve")
                == "success"
            )
    except NotInstalledError as error:
        pytest.skip(str(error))


def start_batch(client: OpenAI, n_rows: int) -> str:
    lines = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": "batchkit-demo",
                "messages": [{"role": "user", "content": "How many rows are there?"}],
            },
        }
        for number in range(n_rows)
    ]
    text = "\n".join(map(json.dumps, lines))
    file = client.files.create(file=("batch.jsonl", text.encode()), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    ).id


def is_healthy(port: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as reply:
            return bool(reply.status == 200)
    except OSError:
        return False
