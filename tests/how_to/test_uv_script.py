"""``examples/uv/batchkit-generate.py``, run by the real uv, which installs the wheel of this checkout.

vLLM is too large to install here, and needs a GPU. So the copy of the script that is run has two more lines in its header,
which leave out vLLM and torch, and its model is on a server (``--set engine.kind=openai-server``).
"""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support import environments
from tests.support.chat_server import ChatServer, serving
from tests.support.how_to import run_page
from tests.support.hub_server import HubServer, hub
from tests.support.object_servers import ObjectServer, moto_server
from tests.support.paths import ROOT
from tests.support.waiting import until

pytestmark = pytest.mark.release

SCRIPT = "batchkit-generate.py"
SOURCE = ROOT / "examples" / "uv" / SCRIPT
UV = [sys.executable, "-m", "uv"]
WITHOUT_CUDA = """# [tool.uv]
# override-dependencies = ["vllm; python_version < '3'", "torch; python_version < '3'", "transformers; python_version < '3'"]
"""
INPUT = "hf://datasets/me/comments"
OUTPUT = "hf://datasets/me/moods"
N_ROWS = 200


class Place(NamedTuple):
    """``folder`` has the script. ``variables`` lead to the wheel, the hub and the store."""

    folder: Path
    hub: HubServer
    store: ObjectServer
    variables: dict[str, str]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environments.wheel(tmp_path_factory.mktemp("dist")).parent


@pytest.fixture
def place(dist: Path, tmp_path: Path) -> Iterator[Place]:
    start, end, rest = SOURCE.read_text("utf-8").partition("# ///\n")
    (tmp_path / SCRIPT).write_text(start + WITHOUT_CUDA + end + rest, "utf-8")
    with hub() as server, moto_server(tmp_path) as store:
        reviews = pa.table({"review": [f"review {n}" for n in range(N_ROWS)]})
        server.datasets["me/comments"] = {"data/train-00000-of-00001.parquet": parquet(reviews)}
        variables = {
            "HF_ENDPOINT": server.url,
            "HF_TOKEN": server.token,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_DISABLE_XET": "1",
            "UV_FIND_LINKS": str(dist),
            "UV_PYTHON": sys.executable,
            "PYTHONPATH": "",
            **store.environment(),
        }
        yield Place(tmp_path, server, store, variables)


def parquet(table: pa.Table) -> bytes:
    written = io.BytesIO()
    pq.write_table(table, written)
    return written.getvalue()


def answers_of(place: Place) -> pa.Table:
    files = place.hub.datasets["me/moods"]
    assert b"200 ok, 0 failed of 200 rows" in files["README.md"]
    (name,) = files.keys() - {"README.md"}
    return pq.read_table(io.BytesIO(files[name]))


def command(server: ChatServer, *args: str) -> list[str]:
    own = ["--set", "engine.kind=openai-server", "--set", f"engine.base_url={server.url}"]
    return [*UV, "run", "--script", SCRIPT, *args, "--model", "tiny", *own]


def test_the_page(place: Place) -> None:
    with serving() as server:
        model = f"tiny --set engine.kind=openai-server --set engine.base_url={server.url}"
        replaced = {"Qwen/Qwen3-8B": model, "OWNER": "me"}
        printed = run_page("uv-script", place.folder, replaced=replaced, variables=place.variables)
        words = command(
            server, "s3://bucket/moods.parquet", "again.csv", "--prompt", "{{ review }}"
        )
        environment = os.environ | place.variables
        subprocess.run(words, cwd=place.folder, env=environment, check=True)
    assert "2 ok, 0 failed of 2 rows" in printed
    assert printed.count("200 ok, 0 failed of 200 rows") == 2
    local = pq.read_table(place.folder / "answers.parquet")
    assert local["text"][1].as_py() == "0 images, asked: Positive or negative? Cold tea, cold room."
    assert len(pd.read_csv(place.folder / "again.csv")) == N_ROWS
    answers = answers_of(place)
    assert answers["review"].to_pylist() == [f"review {n}" for n in range(N_ROWS)]
    assert answers["text"][7].as_py().endswith("review 7")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_job_continues_on_another_machine(place: Place, signum: signal.Signals) -> None:
    args = [INPUT, OUTPUT, "--prompt", "{{ review }}", "--store", "s3://bucket/runs"]
    args += ["--name", "reviews", "--set", "run.store_interval_s=0.5"]
    environment = os.environ | place.variables
    with serving(latency_s=0.1) as server:
        words = command(server, *args, "--set", "engine.options.max_num_seqs=4")
        with subprocess.Popen(
            words, cwd=place.folder, env=environment, start_new_session=True
        ) as process:
            until(lambda: server.answered.total() > N_ROWS / 2)
            if signum == signal.SIGTERM:  # the notice of a time limit goes to uv alone
                process.send_signal(signum)
            else:
                os.killpg(process.pid, signum)
        assert process.returncode == (-signum if signum == signal.SIGKILL else 128 + signum)
        assert "me/moods" not in place.hub.datasets
        shutil.rmtree(place.folder / "output")
        done = subprocess.run(
            words, cwd=place.folder, env=environment, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr
    resumed = re.search(r"resumed (\d+) of 200 rows", done.stderr)
    assert resumed is not None, done.stderr
    assert int(resumed[1]) > N_ROWS / 4
    assert server.answered.total() <= 2 * N_ROWS - int(resumed[1])
    assert answers_of(place)["text"].null_count == 0


def test_the_header_as_it_is_installs_vllm(dist: Path) -> None:
    command = [
        *UV,
        "export",
        "--quiet",
        "--script",
        str(SOURCE),
        "--no-hashes",
        "--find-links",
        str(dist),
    ]
    listed = subprocess.check_output(command, text=True)
    assert {"vllm", "s3fs", "huggingface-hub", "obstore", "batchkit-vllm"} <= set(
        re.findall(r"^([\w-]+)==", listed, re.MULTILINE)
    )
