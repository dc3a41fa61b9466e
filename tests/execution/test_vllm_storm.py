"""SIGKILL in each phase of a run: no row is lost or duplicated, and every answer is the same.

``test_crash_storm.py`` kills a hundred times, with the dry-run engine.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from PIL import Image

from batchkit.storage.log import RESULTS
from batchkit.storage.newest import read_newest
from tests.support.forks import Fork
from tests.support.own_process import batchkit
from tests.support.rows import write_jsonl
from tests.support.storm import kill_once

N_ROWS = 160
# What a run is killed after: the file of its folder that grew or was replaced, and the longest delay.
PHASES = (
    ("", 1.0),  # the start
    ("manifest.json", 3.0),  # the model loads
    (RESULTS, 0.5),  # rows are answered
    ("checkpoint.json", 0.05),  # records were flushed; the next ones come
)

JOB = """
name = "storm"
[input]
path = "rows.jsonl"
id = "id"
[prompt]
user = "{{ q }}"
images = ["{{ file }}"]
[engine]
model = "MODEL"
[engine.options]
dtype = "float32"
enforce_eager = true
max_model_len = 512
max_num_seqs = 8
kv_cache_memory_bytes = 134217728
limit_mm_per_prompt = { image = 1, video = 0 }
[sampling]
max_tokens = 24
[run]
checkpoint_interval_s = 0.2
"""


def test_a_storm_of_kills_loses_nothing_and_changes_nothing(
    tmp_path: Path, demo_model: Path
) -> None:
    for n in range(8):
        picture = Image.new("RGB", (96, 64), (n * 30, 80, 140))
        picture.paste((255, 255, 255), (8 * n, 10, 8 * n + 20, 50))
        picture.save(tmp_path / f"{n}.png")
    write_jsonl(
        tmp_path / "rows.jsonl",
        [{"id": f"r{n}", "q": f"what is {n}?", "file": f"{n % 8}.png"} for n in range(N_ROWS)],
    )
    (tmp_path / "job.toml").write_text(JOB.replace("MODEL", str(demo_model)))
    log = tmp_path / "output/storm" / RESULTS
    instants = random.Random(20261121)

    done_at_kill = []
    for name, most_s in PHASES * 2:
        kill_once(tmp_path, log.with_name(name) if name else None, instants.uniform(0, most_s))
        done_at_kill.append(len(list(read_newest(log))) if log.exists() else 0)
    assert done_at_kill == sorted(done_at_kill), "a kill took finished rows away"
    assert 0 < done_at_kill[-1] < N_ROWS, f"the kills missed the run: {done_at_kill}"

    finished = batchkit("run", "job.toml", cwd=tmp_path, start=Fork)
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout)["skipped"] >= done_at_kill[-1]
    audit = json.loads(batchkit("verify", "job.toml", "--json", cwd=tmp_path).stdout)
    assert audit["ok"] == audit["rows"] == N_ROWS
    assert audit["lost"] == audit["duplicates"] == audit["pending"] == audit["torn_bytes"] == 0
    assert audit["checkpoint_matches"]

    undisturbed = batchkit("run", "job.toml", "--set", "name=calm", cwd=tmp_path, start=Fork)
    assert undisturbed.returncode == 0, undisturbed.stderr
    assert _exported(tmp_path, "storm") == _exported(tmp_path, "calm")


def _exported(folder: Path, name: str) -> list[dict[str, Any]]:
    path = folder / f"{name}.jsonl"
    done = batchkit("export", f"output/{name}", "--jsonl", path, cwd=folder)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["index"] for record in records] == list(range(N_ROWS))
    keys = ("id", "status", "text", "finish_reason", "usage", "input_hash")
    return [{key: record[key] for key in keys} for record in records]
