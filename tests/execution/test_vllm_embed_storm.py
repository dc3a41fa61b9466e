"""Twenty SIGKILLs of an embed run on real vLLM: every vector once, and at its row."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import tomlkit

from batchkit.storage.log import RESULTS
from batchkit.storage.newest import read_newest
from batchkit.storage.vectors import segment_path, segments_of
from tests.support.embed_runs import stored
from tests.support.forks import Fork
from tests.support.own_process import batchkit
from tests.support.pooling_models import build_embedding_model
from tests.support.rows import write_jsonl
from tests.support.small_vllm import SMALL
from tests.support.storm import kill_once

N_ROWS = 800
SEGMENT = "the next segment"
# What a run is killed after: the file of its folder that grew or was replaced, and the longest delay.
PHASES = (
    (SEGMENT, 0.01),  # the first vectors are written
    (RESULTS, 0.1),  # rows are answered
    ("manifest.json", 2.0),  # the model loads
    (RESULTS, 0.3),
    ("checkpoint.json", 0.05),  # records were flushed; the next ones come
)


def test_twenty_kills_leave_every_vector_once_and_at_its_row(
    tmp_path: Path, text_model: Path
) -> None:
    model = build_embedding_model(tmp_path / "model", text_model)
    rows = [{"id": f"r{n}", "q": f"review {n}: " + "tea " * (n * 7 % 29)} for n in range(N_ROWS)]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    options = {name: value for name, value in SMALL.items() if name != "limit_mm_per_prompt"}
    job = {
        "name": "storm",
        "task": "embed",
        "input": {"path": "rows.jsonl", "id": "id"},
        "prompt": {"user": "{{ q }}"},
        "engine": {"model": str(model), "options": options},
        "run": {"checkpoint_interval_s": 0.2, "max_in_flight": 4},
    }
    (tmp_path / "job.toml").write_text(tomlkit.dumps(job))
    run, instants = tmp_path / "output/storm", random.Random(20261123)

    done_at_kill = []
    for name, most_s in PHASES * 4:
        next_segment = segment_path(run, max(segments_of(run), default=-1) + 1)
        awaited = next_segment if name == SEGMENT else run / name
        kill_once(tmp_path, awaited, instants.uniform(0, most_s))
        log = run / RESULTS
        done_at_kill.append(len(stored(run)) if log.exists() else 0)  # each finds its own
    assert done_at_kill == sorted(done_at_kill), "a kill took finished rows away"
    assert 0 < done_at_kill[-1] < N_ROWS, f"the kills missed the run: {done_at_kill}"
    assert len(segments_of(run)) > 5

    finished = batchkit(
        "run", "job.toml", "--set", "run.max_in_flight=64", cwd=tmp_path, start=Fork
    )
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout)["skipped"] >= done_at_kill[-1]
    audit = json.loads(batchkit("verify", "job.toml", "--json", cwd=tmp_path).stdout)
    assert audit["ok"] == audit["rows"] == audit["records"] == N_ROWS
    assert audit["lost"] == audit["duplicates"] == audit["bad_vectors"] == 0
    assert [one["index"] for one in read_newest(run / RESULTS)] == list(range(N_ROWS))

    calm = batchkit("run", "job.toml", "--set", "name=calm", cwd=tmp_path, start=Fork)
    assert calm.returncode == 0, calm.stderr
    stormy, expected = (
        np.stack([*stored(tmp_path / "output" / name).values()]) for name in ("storm", "calm")
    )
    assert len({row.tobytes() for row in expected.round(4)}) == N_ROWS  # no two rows are alike
    np.testing.assert_allclose(stormy, expected, rtol=0, atol=1e-5)
