"""A real vLLM server that the run starts: images and shapes over HTTP, and a death in the middle; and one that is there
already, which gets videos."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tomlkit
from PIL import Image

from batchkit.storage.starts import read_history
from tests.support import clips, model_runs
from tests.support.forks import Fork
from tests.support.own_process import batchkit, begin
from tests.support.pooling_models import build_classifier
from tests.support.server_runs import records, write_job
from tests.support.small_vllm import SMALL, TEXT_ONLY
from tests.support.vllm_reference import counts, pooled
from tests.support.vllm_server import flags, serving

pytestmark = pytest.mark.vllm

ROWS = 64
CHOICES = ["yes", "no", "the picture has no colour"]


def _command(model: Path) -> str:
    module = ["-m", "tests.support.vllm_server", "--model", str(model)]
    return shlex.join([sys.executable, *module, *flags(SMALL), "--port", "{port}"])


def _write(model: Path) -> None:
    """Each row has an image, and every fourth must choose."""
    rows = []
    for n in range(ROWS):
        Image.effect_noise((96, 64), n + 1).convert("RGB").save(f"{n}.png")
        params = {"structured_outputs": {"choice": CHOICES}} if n % 4 == 0 else {}
        rows.append({"n": n, "text": f"tell me about number {n}", "params": params})
    write_job(
        _command(model),
        rows,
        prompt={"user": "{{ text }}", "images": ["{{ n }}.png"]},
        media={"root": "."},
        engine={"model": str(model), "options": {"max_num_seqs": 16}},
        sampling={"max_tokens": 32, "sampling_column": "params"},
    )


def _kill_server(run: subprocess.Popen[str]) -> list[psutil.Process]:
    """What the server had started; the server itself is gone at once."""
    for process in psutil.Process(run.pid).children(recursive=True):
        words = " ".join(process.cmdline())
        if "vllm_server" in words and "guard.py" not in words:
            children = process.children(recursive=True)
            process.kill()
            return children
    raise AssertionError("no server")


@pytest.mark.usefixtures("in_an_empty_folder")
@pytest.mark.release
def test_a_server_killed_in_the_middle_is_replaced_and_all_answer_as_the_engine_does(
    demo_model: Path, tmp_path: Path
) -> None:
    _write(demo_model)
    folder = tmp_path / "output" / "a"
    log = folder / "results.jsonl"
    # For vLLM this is still true, but it leaves the worker in the engine's process: fewer imports.
    run = begin("run", "job.toml", cwd=tmp_path, VLLM_ENABLE_V1_MULTIPROCESSING="01")
    while run.poll() is None and not (log.exists() and b"\n" in log.read_bytes()):
        time.sleep(0.01)
    assert run.returncode is None
    left = _kill_server(run)
    _, err = run.communicate(timeout=240)
    assert run.returncode == 0, err
    assert left
    assert not any(process.is_running() for process in left)
    found = records(folder)
    assert [r["index"] for r in found] == list(range(ROWS))
    assert {r["status"] for r in found} == {"ok"}
    first = read_history(folder).starts[0]
    assert first.engine["owned_by"] == "vllm"
    assert first.engine_restarts >= 1

    here = {"kind": "vllm", "model": str(demo_model), "options": SMALL}
    job = tomlkit.parse((tmp_path / "job.toml").read_text()) | {"name": "b", "engine": here}
    (tmp_path / "job.toml").write_text(tomlkit.dumps(job))
    ran = batchkit("run", "job.toml", cwd=tmp_path, start=Fork)
    assert ran.returncode == 0, ran.stderr
    expected = records(folder.with_name("b"))
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine["text"], counts(mine["usage"])) == (theirs["text"], counts(theirs["usage"]))
        assert mine["finish_reason"] == theirs["finish_reason"]
        assert mine["text"] in CHOICES or mine["index"] % 4


def test_videos_are_sent_as_their_files_and_seen_as_vllm_sees_their_frames(
    demo_model: Path, tmp_path: Path
) -> None:
    """As many of each as the server picks, in the places that the prompt has."""
    for n in range(8):
        made = clips.frames(9 + n, seed=n, size=(96 + 16 * (n % 3), 64))
        clips.write(tmp_path, f"{n}.mkv", clips.video(made))
    rows = [{"clip": f"{n}.mkv"} for n in range(8)]
    options = {**SMALL, "limit_mm_per_prompt": {"video": 2}, "max_model_len": 1024}
    job: dict[str, Any] = {
        "rows": rows,
        "prompt": {"user": "first {{ video }} then {{ video }}", "videos": ["{{ clip }}", "0.mkv"]},
        "media": {"num_frames": 6},
        "sampling": {"temperature": 0, "max_tokens": 16},
    }
    frames = {"video": {"num_frames": 6, "video_backend": "opencv"}}
    found = {}
    with serving(demo_model, {**options, "media_io_kwargs": frames}, tmp_path / "log") as url:
        server = {"kind": "openai-server", "model": str(demo_model), "base_url": url}
        here = {"kind": "vllm", "model": str(demo_model), "options": options}
        for name, engine in (("served", server), ("here", here)):
            model_runs.write_job(tmp_path, **job, name=name, engine=engine)
            model_runs.run_job(tmp_path)
            its = records(tmp_path / "output" / name)
            found[name] = [(record["text"], counts(record["usage"])) for record in its]

    assert found["served"] == found["here"]
    assert len({text for text, _ in found["here"]}) > 4


def test_a_server_classifies_as_vllm_does_and_a_bad_row_fails_alone(
    text_model: Path, tmp_path: Path
) -> None:
    model = build_classifier(tmp_path / "classifier", text_model)
    texts = [f"question {n} " + "about tea " * (n * 7 % 23) for n in range(12)]
    rows = [{"q": text} for text in [*texts, "", "word " * 600]]
    options = {**TEXT_ONLY, "runner": "pooling"}
    with serving(model, options, tmp_path / "server.log") as url:
        engine = {"kind": "openai-server", "model": str(model), "base_url": url}
        prompt = {"user": "{{ q }}"}
        found = model_runs.answered(
            tmp_path, rows, 3, task="classify", engine=engine, prompt=prompt
        )
        args = "--set", "name=b", "--set", "task=embed"
        other = model_runs.run_job(tmp_path, *args, exit_code=1)
    call = {"method": "classify", "texts": texts, "params": {}}
    (expected,) = pooled(TEXT_ONLY | {"model": str(model)}, [call])
    for record, probabilities in zip(found, expected, strict=False):
        assert record["probabilities"] == pytest.approx(probabilities, rel=1e-5, abs=1e-5)
        assert record["label"] == ("bad", "fair", "good")[int(np.argmax(probabilities))]
    assert len({record["label"] for record in found[:12]}) > 1
    kinds = [record["error"]["kind"] for record in found[12:]]
    assert kinds == ["invalid_request", "prompt_too_long"]
    assert "/v1/embeddings" in other.stderr
    assert "its model does not fit the task" in other.stderr
