"""What vLLM's output processor gets late, and while the device works, are the answers it makes otherwise."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from batchkit.config.tables import JobConfig
from batchkit.engines.faults import EngineDied
from batchkit.engines.registry import open_engine
from batchkit.engines.vllm.stepper import Stepper
from tests.support.engine_requests import ask, collect, request
from tests.support.small_vllm import SMALL

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs


class NumberedSteps:
    """Stands in for vLLM's engine, to count: each of its steps is a list of its core's outputs.

    What its processor makes of an output is the request and its new tokens.
    """

    def __init__(self, *steps: list[EngineCoreOutput], **stop_strings: list[str]) -> None:
        self.steps = list(steps)
        self.executor = SimpleNamespace(execute_model=lambda: None)
        core = SimpleNamespace(scheduler=self, model_executor=self.executor)
        self.engine_core = SimpleNamespace(engine_core=core, get_output=self.get_output)
        states = {
            number: SimpleNamespace(
                detokenizer=SimpleNamespace(stop=stop),
                logprobs_processor=SimpleNamespace(num_logprobs=None, num_prompt_logprobs=None),
            )
            for number, stop in stop_strings.items()
        }
        self.output_processor = SimpleNamespace(request_states=states, process_outputs=self.process)

    def step(self) -> Any:
        return self.process(self.engine_core.get_output().outputs).request_outputs

    def get_output(self) -> EngineCoreOutputs:
        from vllm.v1.engine import EngineCoreOutputs

        self.executor.execute_model()
        return EngineCoreOutputs(outputs=self.steps.pop(0))

    def process(self, outputs: list[EngineCoreOutput]) -> Any:
        made = [(output.request_id, output.new_token_ids) for output in outputs]
        return SimpleNamespace(request_outputs=made)

    def has_unfinished_requests(self) -> bool:
        return bool(self.steps)


def stepper(engine: NumberedSteps) -> Stepper:
    return Stepper(engine, meanwhile=lambda: None)


def tokens(number: str, *token_ids: int, ends: bool = False) -> EngineCoreOutput:
    from vllm.v1.engine import EngineCoreOutput, FinishReason

    reason = FinishReason.STOP if ends else None
    return EngineCoreOutput(number, list(token_ids), finish_reason=reason)


def test_tokens_are_handed_on_once_their_request_has_ended() -> None:
    steps = [tokens("a", 1), tokens("b", 7)], [tokens("a", 2, 3), tokens("b", 8, ends=True)]
    stepping = stepper(
        NumberedSteps(*steps, [tokens("a", 4)], [tokens("a", 5, ends=True)], a=[], b=[])
    )
    steps_taken = [stepping.step() for _ in range(4)]
    assert steps_taken == [[], [], [("b", [7, 8])], [("a", [1, 2, 3, 4, 5])]]


def test_tokens_that_a_stop_string_may_end_are_handed_on_as_they_come() -> None:
    stepping = stepper(NumberedSteps([tokens("a", 1)], [tokens("a", 2)], a=["end"]))
    assert [stepping.step() for _ in range(2)] == [[("a", [1])], [("a", [2])]]


def test_what_ended_before_a_step_that_fails_is_kept() -> None:
    engine = NumberedSteps([tokens("a", 1, ends=True)], [], a=[])
    stepping = stepper(engine)
    assert stepping.step() == []
    engine.steps.clear()
    with pytest.raises(IndexError):
        stepping.step()
    assert stepping.rest() == [("a", [1])]


def test_of_an_aborted_request_nothing_is_kept() -> None:
    engine = NumberedSteps([tokens("a", 1)], a=[])
    stepping = stepper(engine)
    assert stepping.step() == []
    assert stepping._held
    engine.output_processor.request_states.clear()
    stepping.forget_aborted()
    assert not stepping._held


def test_a_row_that_ended_before_the_engine_died_is_answered(
    vllm_job: Callable[..., JobConfig],
) -> None:
    with closing(open_engine(vllm_job(engine={"in_process": True}))) as engine:
        executor = engine._engine.engine_core.engine_core.model_executor  # type: ignore[attr-defined]
        execute_model = executor.execute_model
        steps = 0

        def fails_at_the_third_step(*args: Any, **kwargs: Any) -> Any:
            nonlocal steps
            steps += 1
            if steps == 3:
                raise ZeroDivisionError("planted")
            return execute_model(*args, **kwargs)

        executor.execute_model = fails_at_the_third_step
        engine.submit(request(0, max_tokens=2))
        engine.submit(request(1, max_tokens=50))
        (answer,) = collect(engine, 1)
        assert answer.request.row.index == 0
        assert answer.error is None
        with pytest.raises(EngineDied, match="planted"):
            engine.poll(1)


def test_answers_are_the_same_with_stop_strings_and_log_probabilities_beside_them(
    vllm_job: Callable[..., JobConfig],
) -> None:
    """Those are made token by token, so they show what the others must be."""
    with closing(open_engine(vllm_job())) as engine:
        plain = [request(n, max_tokens=24) for n in range(6)]
        slow = [request(n, max_tokens=24, stop=["no such word"]) for n in range(6)]
        told = [request(n, max_tokens=24, logprobs=0) for n in range(6)]
        done = ask(engine, *plain, *slow, *told)
    texts = [answer.choices[0].text for answer in done]
    assert texts[:6] == texts[6:12] == texts[12:]
    assert len(set(texts)) == 6
    assert {answer.usage.completion_tokens for answer in done if answer.usage} == {24}


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
