"""Datasets on the hub as input and output, with the packages ``huggingface_hub`` and ``datasets`` over real HTTP."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.chat_server import serving
from tests.support.environments import uv
from tests.support.how_to import run_page
from tests.support.hub_server import HubServer, hub
from tests.support.paths import ROOT

pytestmark = pytest.mark.release

PACKAGES = (
    "datasets==5.2.0",
    "multiprocess==0.70.19",
    "xxhash==4.1.0",
)  # the tests have the others
IMAGES = """
import os

from datasets import Dataset, Features, Image, Value
from PIL import Image as Pictures

from batchkit import JobConfig, ProductionBatchProcessor

colours = ["red", "green", "blue"]
pictures = [Pictures.new("RGB", (64, 64), colour) for colour in colours]
features = Features({"image": Image(), "colour": Value("string")})
rows = Dataset.from_dict({"image": pictures, "colour": colours}, features=features)
prompt = {"user": "Is it {{ colour }}?", "images": ["{{ image }}"]}
for name, given in {"all": rows, "stream": rows.to_iterable_dataset()}.items():
    engine = {"kind": "openai-server", "model": "tiny", "base_url": os.environ["SERVER"]}
    job = JobConfig(name=name, prompt=prompt, engine=engine)
    summary = ProductionBatchProcessor(job, raise_on_failure=True).process(given)
    assert (summary.ok, summary.skipped) == (3, 0)
    asked = [record["text"] for record in summary.records()]
    assert asked == [f"1 images, asked: Is it {colour}?" for colour in colours]
assert ProductionBatchProcessor(job.with_keys(name="all")).process(rows).skipped == 3
assert Dataset(summary.to_arrow()).num_rows == 3
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    uv("pip", "install", "--no-deps", "--target", folder, *PACKAGES)
    return folder


@pytest.fixture
def server() -> Iterator[HubServer]:
    with hub() as server:
        yield server


def variables(server: HubServer, packages: Path, folder: Path) -> dict[str, str]:
    return {
        "HF_ENDPOINT": server.url,
        "HF_TOKEN": server.token,
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(packages))),
    }


def test_the_page(server: HubServer, packages: Path, tmp_path: Path) -> None:
    written = io.BytesIO()
    pq.write_table(pa.table({"review": [f"review {n}" for n in range(300)]}), written)
    server.datasets["me/reviews"] = {"data/train-00000-of-00001.parquet": written.getvalue()}
    replaced = {
        'model = "Qwen/Qwen3-8B"': 'kind = "dry-run"',
        '{"model": "Qwen/Qwen3-8B"}': '{"kind": "dry-run"}',
        "OWNER": "me",
    }
    environment = variables(server, packages, tmp_path)
    printed = run_page("hugging-face-datasets", tmp_path, replaced=replaced, variables=environment)
    assert "300 ok, 0 failed of 300 rows; 100 were done before" in printed
    assert "hf://datasets/me/moods/data/moods.parquet: 300 rows" in printed
    card = server.datasets["me/moods"]["README.md"].decode()
    assert "300 ok, 0 failed of 300 rows" in card
    assert "review 0 " in printed
    script = "from datasets import load_dataset; print(load_dataset('me/moods', split='train'))"
    command = [sys.executable, "-c", script]
    shown = subprocess.check_output(command, env=os.environ | environment, text=True)
    assert "num_rows: 300" in shown
    assert "'review'" in shown


def test_images_of_a_dataset_and_of_a_stream(
    server: HubServer, packages: Path, tmp_path: Path
) -> None:
    environment = os.environ | variables(server, packages, tmp_path)
    with serving() as model:
        environment["SERVER"] = model.url
        subprocess.run([sys.executable, "-c", IMAGES], cwd=tmp_path, env=environment, check=True)
