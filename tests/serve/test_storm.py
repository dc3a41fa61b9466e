"""Five keys and thirty batches on real vLLM, while the server is killed again and again: 2,000 rows and 8 kills, with
``SERVE_STORM=full`` 20,000 and 20."""

from __future__ import annotations

import os
import random
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest

from batchkit import Run
from tests.support.api_server import (
    content,
    ended,
    job_file,
    new_keys,
    request,
    serving,
    submit,
    texts_of,
)
from tests.support.command_line import batchkit
from tests.support.forks import Fork

pytestmark = [pytest.mark.vllm, pytest.mark.release]
_IS_FULL = os.environ.get("SERVE_STORM") == "full"
KILLS, KEYS = 20 if _IS_FULL else 8, 5
SIZES = (10, 50, 300, 600, 1000, 2040) if _IS_FULL else (10, 20, 40, 60, 80, 190)
N_ROWS = KEYS * sum(SIZES)
LONG_S = 900  # for all rows on two busy cores


@pytest.mark.timeout(3 * LONG_S)
def test_storm_of_kills(tmp_path: Path, demo_model: Path) -> None:
    def rows(key: int, size: int) -> list[dict[str, Any]]:
        body = {"min_tokens": 2, "max_tokens": 6}
        names = (f"{key}-{size}-{i}" for i in range(size))
        return [request(name, demo_model.name, f"Row {name}", **body) for name in names]

    batches = {(key, size): rows(key, size) for key in range(KEYS) for size in SIZES}
    rng, order, made = random.Random(7), list(batches), dict[tuple[int, int], str]()
    rng.shuffle(order)
    args = (job_file(tmp_path, demo_model), "--api-key-file", "keys.txt")
    keys = new_keys(*(f"k{n}" for n in range(KEYS)), cwd=tmp_path)
    for _ in range(KILLS):
        with serving(*args, cwd=tmp_path, start=Fork) as served:
            clients, until_s = (
                list(map(served.client, keys)),
                time.monotonic() + rng.uniform(0.2, 9),
            )
            with suppress(openai.APIConnectionError):
                while time.monotonic() < until_s:
                    due = [one for one in order if one not in made]
                    if due and rng.random() < 0.5:
                        made[due[0]] = submit(clients[due[0][0]], batches[due[0]]).id
                    time.sleep(0.05)
            served.kill()
    with serving(*args, cwd=tmp_path, start=Fork) as served:
        clients = list(map(served.client, keys))
        for one in batches.keys() - made.keys():
            made[one] = submit(clients[one[0]], batches[one]).id
        lines: list[dict[str, Any]] = []
        for (key, _), name in made.items():
            batch = ended(clients[key], clients[key].batches.retrieve(name), within_s=LONG_S)
            assert batch.status == "completed", batch
            lines += content(clients[key], batch.output_file_id)
        everything = submit(clients[0], [row for of in batches.values() for row in of])
        undisturbed = ended(clients[0], everything, within_s=LONG_S)
        assert len(lines) == len(texts_of(lines)) == N_ROWS
        assert texts_of(lines) == texts_of(content(clients[0], undisturbed.output_file_id))
    checked = batchkit("serve", "--check", "--folder", tmp_path / "output/serve")
    assert checked.exit_code == 0, checked.stdout
    audits = [Run(tmp_path / "output/serve/batches" / name).verify() for name in made.values()]
    assert sum(audit.records for audit in audits) == N_ROWS, "a row was run twice"
