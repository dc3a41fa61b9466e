"""Answers whose tokens vLLM's output processor gets at their end are those that it makes otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from batchkit.config.tables import JobConfig
from batchkit.engines.registry import open_engine
from batchkit.engines.vllm.stepper import Stepper
from tests.support.engine_requests import collect, request
from tests.support.paths import ROOT
from tests.support.small_vllm import SMALL

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

pytestmark = pytest.mark.vllm


class NumberedSteps:
    """Stands in for vLLM's engine, to count: each of its steps is a list of its core's outputs."""

    def __init__(self, *steps: list[EngineCoreOutput], **stop_strings: list[str]) -> None:
        self.steps = list(steps)
        self.calls: list[str] = []
        self.executor = SimpleNamespace(execute_model=lambda: None)
        core = SimpleNamespace(model_executor=self.executor)
        self.engine_core = SimpleNamespace(engine_core=core, get_output=self.get_output)
        states = {
            number: SimpleNamespace(
                detokenizer=SimpleNamespace(stop=stop),
                logprobs_processor=SimpleNamespace(num_logprobs=None, num_prompt_logprobs=None),
            )
            for number, stop in stop_strings.items()
        }
        self.output_processor = SimpleNamespace(request_states=states)

    def step(self) -> list[tuple[str, list[int]]]:
        """What reaches the output processor: each request and its new tokens."""
        outputs = self.engine_core.get_output().outputs
        return [(output.request_id, output.new_token_ids) for output in outputs]

    def get_output(self) -> EngineCoreOutputs:
        from vllm.v1.engine import EngineCoreOutputs

        self.executor.execute_model()
        self.calls.append("output")
        return EngineCoreOutputs(outputs=self.steps.pop(0))


def stepper(engine: NumberedSteps) -> Stepper:
    return Stepper(engine, meanwhile=lambda: None)


def tokens(number: str, *token_ids: int, ends: bool = False) -> EngineCoreOutput:
    from vllm.v1.engine import EngineCoreOutput, FinishReason

    reason = FinishReason.STOP if ends else None
    return EngineCoreOutput(number, list(token_ids), finish_reason=reason)


def test_tokens_are_handed_on_when_their_request_ends() -> None:
    steps = [tokens("a", 1), tokens("b", 7)], [tokens("a", 2, 3), tokens("b", 8, ends=True)]
    stepping = stepper(NumberedSteps(*steps, [tokens("a", 4, ends=True)], a=[], b=[]))
    assert [stepping.step() for _ in range(3)] == [[], [("b", [7, 8])], [("a", [1, 2, 3, 4])]]


def test_tokens_that_a_stop_string_may_end_are_handed_on_as_they_come() -> None:
    stepping = stepper(NumberedSteps([tokens("a", 1)], [tokens("a", 2)], a=["end"]))
    assert [stepping.step() for _ in range(2)] == [[("a", [1])], [("a", [2])]]


def test_requests_are_added_after_the_device_has_begun_and_before_its_output_is_awaited() -> None:
    engine = NumberedSteps([tokens("a", 1)])
    engine.executor.execute_model = lambda: engine.calls.append("begun")
    Stepper(engine, meanwhile=lambda: engine.calls.append("added")).step()
    assert engine.calls == ["begun", "added", "output"]


def test_of_an_aborted_request_nothing_is_kept() -> None:
    engine = NumberedSteps([tokens("a", 1)], a=[])
    stepping = stepper(engine)
    assert stepping.step() == []
    assert stepping._held
    engine.output_processor.request_states.clear()
    stepping.forget_aborted()
    assert not stepping._held


def test_preemptions_are_counted(vllm_job: Callable[..., JobConfig]) -> None:
    few_blocks = {**SMALL, "num_gpu_blocks_override": 8, "enable_prefix_caching": False}
    preempted = answered = 0
    with closing(open_engine(vllm_job(engine={"options": few_blocks}))) as engine:
        for n in range(12):
            engine.submit(request(n, max_tokens=200))
        while answered < 12:
            answered += len(collect(engine, 1))
            preempted += engine.load().preempted
    assert preempted > 0


@pytest.mark.release
def test_drafts_of_speculative_decoding_are_counted(vllm_job: Callable[..., JobConfig]) -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 3}
    ngram |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    drafts = accepted = 0
    with closing(
        open_engine(vllm_job(engine={"options": {**SMALL, "speculative_config": ngram}}))
    ) as engine:
        for n in range(4):
            engine.submit(request(n, max_tokens=100))
        answered = 0
        while answered < 4:
            answered += len(collect(engine, 1))
            load = engine.load()
            drafts, accepted = drafts + load.drafts, accepted + load.accepted_tokens
        assert engine.load().drafts == 0, "each is counted once"
    assert drafts > 0
    assert 0 <= accepted <= 3 * drafts


def test_looking_for_n_grams_leaves_torch_its_number_of_threads() -> None:
    """vLLM looks for them with numba, which shares OpenMP with torch, and starts a thread for each core."""
    code = """
from batchkit.engines.vllm.options import set_environment
set_environment()
import torch
from numba import njit, prange
@njit(parallel=True)
def total(n):
    found = 0
    for i in prange(n):
        found += i
    return found
total(8)
print(torch.get_num_threads())
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("NUMBA_NUM_THREADS", None)
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert ended.stdout.split() == ["1"]
