"""Real vLLM with a pooling model, its worker made to fail: every good row has its own vector or score."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchkit.storage.vectors import Vectors
from tests.support.faulty_runs import JOB, OWN, Ended, start
from tests.support.pooling_models import build_classifier, build_embedding_model

pytestmark = pytest.mark.vllm

PLAIN = JOB.split("[sampling]")[0] + "[run]\nstall_timeout_s = 6\n"
EMBED = f'task = "embed"\n{PLAIN}'
SCORE = f'task = "score"\n{PLAIN}'.replace(
    '[prompt]\nuser = "{{ q }}"', '[pair]\nquery = "{{ q }}"\ndocuments = "{{ d }}"'
)
HEAVY = "tea " * 200  # the worker runs out of memory with a prompt of more than 150 tokens


@pytest.fixture(scope="module")
def embedding_model(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_embedding_model(tmp_path_factory.mktemp("models") / "embedding", text_model)


@pytest.fixture(scope="module")
def cross_encoder(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "cross-encoder"
    return build_classifier(folder, text_model, labels=("relevant",))


def vectors_of(folder: Path, ended: Ended) -> dict[int, list[float]]:
    vectors = Vectors(folder / "output/faulty")
    return {r["index"]: vectors.of(r).tolist() for r in ended.records if r["status"] == "ok"}


def folders(tmp_path: Path) -> tuple[Path, Path]:
    calm, faulty = tmp_path / "calm", tmp_path / "faulty"
    calm.mkdir()
    faulty.mkdir()
    return calm, faulty


def test_a_deadly_text_fails_alone_and_every_other_row_has_its_vector(
    tmp_path: Path, embedding_model: Path
) -> None:
    rows = [{"q": f"tell me of {n}" + " tea" * (n % 7)} for n in range(24)]
    rows[13]["q"] += HEAVY
    calm, faulty = folders(tmp_path)
    whole = start(calm, embedding_model, rows, {}, [OWN], job=EMBED)
    assert whole.exit == 0, whole.stderr
    faults = {"prompt_over": 150, "once": {"error": 2}}
    ended = start(faulty, embedding_model, rows, faults, [OWN], job=EMBED)
    assert ended.failed == {13: "oom"}, ended.log
    assert "RuntimeError: planted: device-side assert" in ended.log
    assert "row 13 (id 13) alone kills the engine" in ended.log
    assert ended.manifest["engine_steps"] == [], "the row was the cause, not the batch"
    expected = vectors_of(calm, whole)
    del expected[13]
    found = vectors_of(faulty, ended)
    assert found.keys() == expected.keys()
    for index, vector in expected.items():
        assert found[index] == pytest.approx(vector, abs=1e-5)


def test_too_many_at_once_is_halved_and_a_deadly_document_fails_its_row(
    tmp_path: Path, cross_encoder: Path
) -> None:
    rows = [
        {"q": f"what is {n}?", "d": [f"{n} is {k}" + " tea" * k for k in range(1 + n % 4)]}
        for n in range(12)
    ]
    rows[5]["d"] = ["short", HEAVY, "short again"]
    calm, faulty = folders(tmp_path)
    whole = start(calm, cross_encoder, rows, {}, [OWN], job=SCORE)
    assert whole.exit == 0, whole.stderr
    faults = {"prompt_over": 150, "over": 3}
    ended = start(faulty, cross_encoder, rows, faults, [OWN], job=SCORE)
    assert ended.failed == {5: "oom"}, ended.log
    for expected, record in zip(whole.records, ended.records, strict=True):
        if record["index"] != 5:
            assert record["score"] == pytest.approx(expected["score"], abs=1e-5)
            assert len(record["order"]) == len(rows[record["index"]]["d"])
