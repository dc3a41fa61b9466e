"""Which models are loaded side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchkit.config.tables import JobConfig
from batchkit.serve.model_places import places_of
from batchkit.serve.settings import ServedModel, Settings, by_name


def model(name: str, *, tensor_parallel_size: int = 1, **workers: Any) -> ServedModel:
    options = {"tensor_parallel_size": tensor_parallel_size}
    return ServedModel(
        JobConfig.model_validate(
            {"engine": {"model": name, "options": options}, "workers": workers}
        )
    )


def elsewhere(name: str) -> ServedModel:
    engine = {"kind": "openai-server", "model": name, "base_url": "http://127.0.0.1:1/v1"}
    return ServedModel(JobConfig.model_validate({"engine": engine}))


@pytest.mark.parametrize(
    ("models", "visible", "wanted", "why"),
    [
        ([model("a")], "", [("a", None)], ""),
        ([model("a"), model("b")], "", [("ab", None)], "no GPU is visible"),
        ([model("a"), model("b")], "-1", [("ab", None)], "no GPU is visible"),
        ([model("a"), model("b")], "0", [("ab", None)], "need 2 GPUs, but there are 1"),
        ([model("a", tensor_parallel_size=2), model("b")], "4,5,6", [("a", "4,5"), ("b", "6")], ""),
        ([model("a"), model("b")], "GPU-1,GPU-2", [("a", "GPU-1"), ("b", "GPU-2")], ""),
        ([model("a"), elsewhere("s"), model("b")], "0", [("s", None), ("ab", None)], "2 models"),
        ([elsewhere("s"), elsewhere("t")], "", [("s", None), ("t", None)], ""),
        (
            [model("a", gpus=0), model("b", gpus=0)],
            "0",
            [("a", None), ("b", None)],
            "",
        ),
        ([model("a", gpus=0), model("b")], "0", [("ab", None)], "there are 1"),
        ([model("a", count=2), model("b")], "0,1", [("ab", None)], "workers.count"),
    ],
)
def test_the_gpus_have_room_for_all_models_or_one_is_loaded_at_a_time(
    models: list[ServedModel],
    visible: str,
    wanted: list[tuple[str, str | None]],
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    said: list[str] = []
    places = places_of(Settings(models=by_name(models), folder=tmp_path), said.append)
    assert [
        ("".join(it.name for it in place.models), place.environment.get("CUDA_VISIBLE_DEVICES"))
        for place in places
    ] == wanted
    assert why in "".join(said)
    assert bool(said) == bool(why)
    for one in models:
        assert sum(place.is_for(one.name) for place in places) == 1
    assert [place.name for place in places if place.is_for("no longer there")] == [""]
