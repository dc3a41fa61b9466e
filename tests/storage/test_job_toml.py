"""``job.toml`` of a run folder: the job, from which a retry reads it back."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from hypothesis import given
from hypothesis import strategies as st

from batchkit.storage.job_toml import job_of_run, write_job
from tests.support.chat_server import MODEL, Refused, error, serving
from tests.support.command_line import batchkit
from tests.support.dry_runs import RUN, job
from tests.support.rows import write_jsonl
from tests.support.server_runs import records

LABELS = {
    "good": {"text": "praise"},
    "bad": {"text": "blame"},
    "other": "all else",
    "odd": {"a": 1},
}
PROMPT = "{% for name in labels %}{{ name }} {% endfor %}{{ q }}"
NAMES = st.text("abc .\"'\\\n=[é#", max_size=4)
VALUES = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(-1e9, 1e9) | NAMES,
    lambda part: st.lists(part, max_size=3) | st.dictionaries(NAMES, part, max_size=4),
    max_leaves=12,
)


@pytest.mark.slow
@given(VALUES)
def test_value_is_read_back_with_the_order_of_its_keys(value: Any) -> None:
    made = job(
        vars={"x": value, "y": 1},
        sampling={"structured_outputs": {"structural_tag": value}},
        prompt={"user": "x", "chat_template_kwargs": {"x": value, "y": 1}},
    )
    with tempfile.TemporaryDirectory() as folder:
        write_job(Path(folder), made)
        back = job_of_run(Path(folder))
    for table in ("vars", "sampling", "prompt"):
        then, now = (each.model_dump(mode="json")[table] for each in (made, back))
        assert json.dumps(then) == json.dumps(now)


@pytest.mark.usefixtures("in_an_empty_folder")
def test_retry_sends_the_prompt_of_the_run() -> None:
    is_down = True

    def before(text: str, body: dict[str, Any]) -> None:
        if is_down and text.endswith("q1"):
            raise Refused(400, error("no"))

    with serving(before) as server:
        write_jsonl(Path("in.jsonl"), [{"q": f"q{n}"} for n in range(3)])
        labels = ", ".join(f"{name} = {json.dumps(it)}" for name, it in LABELS.items())
        engine = {"kind": "openai-server", "model": MODEL, "base_url": server.url}
        table = {"name": "a", "input": {"path": "in.jsonl"}, "prompt": {"user": PROMPT}}
        Path("job.toml").write_text(
            tomlkit.dumps({**table, "engine": engine})
            + f"[vars]\nlabels = {{{labels.replace(':', ' =')}}}\n"
        )
        assert batchkit("run", "job.toml").exit_code == 3
        is_down = False
        found = batchkit("retry-failed", str(RUN))
        assert found.exit_code == 0, found.stderr
        asked = [body["messages"][-1]["content"] for body in server.bodies]
    assert {text[:-1] for text in asked} == {"good bad other odd q"}
    assert [record["status"] for record in records()][-1] == "ok"
    assert batchkit("run", "job.toml").exit_code == 0
