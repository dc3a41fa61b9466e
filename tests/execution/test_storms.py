"""SIGKILL at random instants of a run, for each kind of log and engine: nothing that was finished is lost,
nothing is there twice, and every answer is that of an undisturbed run."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import tomlkit
from PIL import Image

from batchkit.commands.demo_digits import make_recording, write_wav
from batchkit.storage.checkpoint import CHECKPOINT
from batchkit.storage.ledger import RESULTS
from batchkit.storage.newest_lines import read_newest
from batchkit.storage.starts import STARTS
from batchkit.storage.steps import STEPS
from batchkit.storage.vectors import segment_path, segments_of
from tests.support.adapters import write_adapter
from tests.support.embed_runs import stored
from tests.support.forks import Fork, LightFork
from tests.support.own_process import batchkit, begin
from tests.support.pooling_models import build_embedding_model
from tests.support.rollouts import CALLS, SOLVE, THREE, calls, each_once
from tests.support.rows import read_jsonl, write_jsonl
from tests.support.small_vllm import SMALL

pytestmark = [pytest.mark.vllm, pytest.mark.release]

N_KILLS = 30
VALUES = ["a", "b", ""]  # of input.cross
KINDS: dict[str, dict[str, Any]] = {
    "records": {"prompt": {"user": "{{ q }}"}, "output": {"keep": ["q"]}},
    "values": {"prompt": {"user": "{{ q }}"}, "output": {"keep": ["q"]}},
    "duplicates": {"prompt": {"user": "{{ q }}"}, "output": {"keep": ["q"]}},
    "vectors": {"prompt": {"user": "{{ q }}"}, "task": "embed"},
    "steps": {"steps": THREE},
    "rollout": {"rollout": {"function": "solve.py:solve"}},
    "transcripts": {
        "task": "transcribe",
        "prompt": {"audios": ["{{ id }}.wav"]},
        "speech": {"part_seconds": 8, "language": "en"},
    },
}
DRY = {"kind": "dry-run", "options": {"latency_s": 0.02}}
SLOW = "run.max_in_flight=48"  # 2,400 answers a second at best: the storm ends before the run
FAST = "run.max_in_flight=1000"
SEGMENT = "the next segment of vectors"
SLOW_PARTS = "run.max_in_flight=2"
TRANSCRIPT_KILLS = {"dry-run": 20, "vllm": int(os.environ.get("TRANSCRIPT_KILLS", "3"))}


class Stormy:
    """A run of ``n_rows`` that is killed again and again. Nothing that was written to ``log`` goes."""

    def __init__(self, folder: Path, kind: str, n_rows: int, tables: dict[str, Any]) -> None:
        self.folder, self.kind, self.n_rows = folder, kind, n_rows
        self.run = folder / "output/storm"
        self.log = self.run / (STEPS if kind in (*CALLS, "transcripts") else RESULTS)
        self.kept = b""
        crossed = kind == "values"
        n_read = n_rows // len(VALUES) if crossed else n_rows
        asked = [*range(n_read)]
        if kind == "duplicates":  # four of ten rows repeat an earlier one
            asked = [n % (n_read * 6 // 10) for n in asked]
        rows = [
            {"id": f"r{n}", "q": f"question {of}" + " tea" * (of % 29)}
            for n, of in enumerate(asked)
        ]
        write_jsonl(folder / "in.jsonl", [{**row, "file": f"{n % 8}.png"} for n, row in enumerate(rows)])  # fmt: skip
        (folder / "solve.py").write_text(SOLVE)
        cross = {"cross": {"adapter": VALUES}} if crossed else {}
        table = {"path": "in.jsonl", "id": "id", **cross}
        job = {"name": "storm", "input": table, **KINDS[kind], **tables}
        (folder / "job.toml").write_text(tomlkit.dumps(job))

    def strike(self, awaited: str | None, delay_s: float, *settings: str, start: Any) -> int:
        """Kill it after that file of its folder was written. Returns how much of its log is whole."""
        path = None if awaited is None else self.run / awaited
        if awaited == SEGMENT:
            path = segment_path(self.run, max(segments_of(self.run), default=-1) + 1)
        self._kill(path, delay_s, *settings, start=start)
        now = self.log.read_bytes() if self.log.exists() else b""
        assert now.startswith(self.kept), "a kill took finished lines away"
        self.kept = now[: now.rfind(b"\n") + 1]
        if self.kind == "vectors" and self.kept:
            assert len(stored(self.run)) == len(self.records())  # each finds its own
        return self.kept.count(b"\n")

    def _kill(self, awaited: Path | None, delay_s: float, *settings: str, start: Any) -> None:
        before = _state(awaited)
        with begin("run", "job.toml", *_set(settings), cwd=self.folder, start=start) as process:
            try:
                deadline = time.monotonic() + 120
                while awaited is not None and _state(awaited) == before:
                    assert process.poll() is None, "the run ended before it could be killed"
                    assert time.monotonic() < deadline, f"{awaited} is as before after two minutes"
                    time.sleep(0.002)
                time.sleep(delay_s)
                assert process.poll() is None, "the run ended before it could be killed"
            finally:
                process.kill()

    def records(self) -> list[dict[str, Any]]:
        return list(read_newest(self.run / RESULTS)) if (self.run / RESULTS).exists() else []

    def finish(self, *settings: str, start: Any) -> None:
        """The last start asks for what is missing, and for nothing else; then a run without kills says the
        same."""
        n_before = len(self.records())
        for name in ("storm", "calm"):
            arguments = _set([f"name={name}", *settings])
            ended = batchkit("run", "job.toml", *arguments, cwd=self.folder, start=start)
            assert ended.returncode == 0, ended.stderr
            if name == "storm":
                assert json.loads(ended.stdout)["skipped"] == n_before
        assert self.log.read_bytes().startswith(self.kept)
        found = json.loads(batchkit("verify", self.run, "--json", cwd=self.folder).stdout)
        assert found["ok"] == found["rows"] == found["records"] == self.n_rows
        for name in ("failed", "pending", "lost", "duplicates", "torn_bytes"):
            assert found[name] == 0
        assert found["checkpoint_matches"]
        if self.kind in CALLS:
            assert calls(self.run) == each_once(self.kind, self.n_rows)
            of_a_row = len(CALLS[self.kind])
            assert all(one["generations"] == of_a_row for one in read_jsonl(self.run / RESULTS))
        assert self.answers("storm") == self.answers("calm")
        if self.kind == "vectors":
            assert found["bad_vectors"] == 0
            stormy, calm = (
                np.stack([*stored(self.folder / "output" / name).values()])
                for name in ("storm", "calm")
            )
            assert len({row.tobytes() for row in calm.round(4)}) == self.n_rows  # none are alike
            np.testing.assert_allclose(stormy, calm, rtol=0, atol=1e-5)

    def answers(self, name: str) -> list[dict[str, Any]]:
        """Of rows, as they are exported, and of generations, in an order that does not depend on time."""
        path = self.folder / f"{name}.jsonl"
        done = batchkit("export", f"output/{name}", "--jsonl", path, cwd=self.folder)
        assert done.returncode == 0, done.stderr
        rows = read_jsonl(path)
        assert [row["index"] for row in rows] == list(range(self.n_rows))
        keys = ("id", "status", "text", "finish_reason", "usage", "input_hash", "fields", "steps")
        keys += ("generations", "seconds", "segments", "coverage")
        if self.kind == "duplicates":  # of equal rows, any may be the one that is computed
            keys = tuple(key for key in keys if key != "usage")
        parts = ("index", "step", "call", "request_hash", *keys[1:5])
        log = self.folder / "output" / name / STEPS
        asked = [_only(line, parts) for line in read_jsonl(log)] if log.exists() else []
        asked.sort(key=lambda line: (line["index"], line["step"], line["call"]))
        return [_only(row, keys) for row in rows] + asked


def _set(settings: Sequence[str]) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


def _state(path: Path | None) -> tuple[int, int]:
    if path is None or not path.exists():
        return 0, 0
    return path.stat().st_ino, path.stat().st_size


def _only(line: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: line.get(key) for key in keys}


@pytest.mark.parametrize("kind", ["records", "vectors", "steps", "rollout"])
@pytest.mark.timeout(280)
def test_kills_lose_nothing_and_repeat_nothing(kind: str, tmp_path: Path) -> None:
    n_rows = 3_000 if kind in CALLS else 9_000
    tables = {"engine": DRY, "run": {"checkpoint_interval_s": 0.01}}
    run, random = Stormy(tmp_path, kind, n_rows, tables), Random(20261123)
    done = [0]
    for number in range(N_KILLS):
        awaited = run.log.name if number % 5 < 3 else None
        done.append(run.strike(awaited, random.uniform(0, 0.15), SLOW, start=LightFork))
    assert sum(before < after for before, after in pairwise(done)) >= N_KILLS // 2
    assert 0 < len(run.records()) < n_rows
    run.finish(FAST, start=LightFork)
    if kind == "records":  # each row its own answer
        for index, row in enumerate(read_jsonl(tmp_path / "storm.jsonl")):
            assert row["fields"]["q"].startswith(f"question {index}")
            assert row["text"] == f"dry-run: no model answered row {index}"
    print(f"{N_KILLS} kills; done after each: {done}")


@pytest.mark.parametrize(
    ("kind", "n_rows"), [("values", 300), ("steps", 96), ("vectors", 600), ("duplicates", 500)]
)
def test_kills_on_vllm_change_no_answer(
    kind: str, n_rows: int, tmp_path: Path, text_model: Path, demo_model: Path
) -> None:
    """Each phase of a run: its start, the load of the model, answers, and checkpoints."""
    model, options = text_model, {**SMALL, "max_num_seqs": 8}
    tables: dict[str, Any] = {"sampling": {"max_tokens": 24}}
    if kind == "steps":
        for n in range(8):
            Image.new("RGB", (96, 64), (n * 30, 80, 140)).save(tmp_path / f"{n}.png")
        draft = {**THREE[0], "prompt": {**THREE[0]["prompt"], "images": ["{{ file }}"]}}
        model, tables["steps"] = demo_model, [draft, *THREE[1:]]
    else:
        del options["limit_mm_per_prompt"]
    if kind == "vectors":
        model, tables = build_embedding_model(tmp_path / "model", text_model), {}
    tables |= {"engine": {"model": str(model), "options": options}}
    if kind == "values":  # one adapter for each
        for seed, name in enumerate("ab"):
            write_adapter(tmp_path / name, text_model, seed=seed)
        tables["engine"]["loras"] = {name: name for name in "ab"}
        tables["prompt"] = {**KINDS[kind]["prompt"], "lora": "{{ adapter }}"}
    tables |= {"run": {"checkpoint_interval_s": 0.2}}
    run, random = Stormy(tmp_path, kind, n_rows, tables), Random(20261123)
    written = (SEGMENT, 0.01) if kind == "vectors" else (RESULTS, 0.02)
    answered, loads, flushed = (run.log.name, 0.4), (STARTS, 2.0), (CHECKPOINT, 0.05)
    done = []
    strikes = ((None, 1.0), written, answered, loads, flushed, answered)
    for awaited, most_s in strikes * (2 if kind == "duplicates" else 1):
        delay_s = random.uniform(0, most_s)
        done.append(run.strike(awaited, delay_s, "run.max_in_flight=4", start=Fork))
    assert done[-1] > 0, f"the kills missed the run: {done}"
    assert len(run.records()) < run.n_rows
    if kind == "vectors":
        assert len(segments_of(run.run)) > 2
    run.finish(start=Fork)
    if kind == "duplicates":
        copies = [record.get("duplicate_of") for record in run.records()]
        assert sum(of is None for of in copies) == n_rows * 6 // 10


@pytest.mark.parametrize("engine", ["dry-run", "vllm"])
@pytest.mark.timeout(600)
def test_kills_of_a_transcription_ask_for_no_part_twice(engine: str, tmp_path: Path) -> None:
    """40 recordings, 20 kills; on vLLM fewer, as each start loads the model."""
    random = Random(20261127)
    for n in range(40):
        write_wav(tmp_path / f"r{n}.wav", make_recording(random, random.uniform(5, 60)).samples)
    tables: dict[str, Any] = {"engine": DRY, "run": {"checkpoint_interval_s": 0.05}}
    if engine == "vllm":
        options = {**SMALL, "max_model_len": 96, "max_num_seqs": 8}
        options["limit_mm_per_prompt"] = {"audio": 1}
        tables["engine"] = {"model": "batchkit-demo-speech", "options": options}
        tables["sampling"] = {"max_tokens": 88}
    run, done = Stormy(tmp_path, "transcripts", 40, tables), [0]
    start: Any = Fork if engine == "vllm" else LightFork
    for number in range(TRANSCRIPT_KILLS[engine]):
        awaited = run.log.name if number % 5 < 4 else None
        most_s = 0.3 if engine == "vllm" else 0.1
        done.append(run.strike(awaited, random.uniform(0, most_s), SLOW_PARTS, start=start))
    assert sum(before < after for before, after in pairwise(done)) >= TRANSCRIPT_KILLS[engine] // 3
    assert len(run.records()) < 40
    run.finish(start=start)
    parts = read_jsonl(run.log)
    assert len({(part["index"], part["step"], part["call"]) for part in parts}) == len(parts)
    assert len({(part["index"], part["request_hash"]) for part in parts}) == len(parts) > 150
    print(f"{len(done) - 1} kills; parts done after each: {done}")
