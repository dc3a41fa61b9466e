"""Answers whose tokens vLLM's output processor gets at their end are those that it makes otherwise."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from batchkit.config.tables import JobConfig
from batchkit.engines.registry import open_engine
from batchkit.engines.vllm.outputs import OutputsAtTheEnd
from tests.support.engine_requests import ask, collect, request
from tests.support.small_vllm import SMALL

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs


class NumberedSteps:
    """Stands in for vLLM's engine core to count what leaves it: each step is a list of outputs."""

    def __init__(self, *steps: list[EngineCoreOutput]) -> None:
        self.steps = iter(steps)

    def get_output(self) -> EngineCoreOutputs:
        from vllm.v1.engine import EngineCoreOutputs

        return EngineCoreOutputs(outputs=next(self.steps))


def engine_of(core: NumberedSteps, **stop_strings: list[str]) -> Any:
    states = {
        number: SimpleNamespace(
            detokenizer=SimpleNamespace(stop=stop),
            logprobs_processor=SimpleNamespace(num_logprobs=None, num_prompt_logprobs=None),
        )
        for number, stop in stop_strings.items()
    }
    processor = SimpleNamespace(request_states=states)
    return SimpleNamespace(engine_core=core, output_processor=processor)


def tokens(number: str, *token_ids: int, ends: bool = False) -> EngineCoreOutput:
    from vllm.v1.engine import EngineCoreOutput, FinishReason

    reason = FinishReason.STOP if ends else None
    return EngineCoreOutput(number, list(token_ids), finish_reason=reason)


def left(engine: Any) -> list[tuple[str, list[int]]]:
    return [(out.request_id, out.new_token_ids) for out in engine.engine_core.get_output().outputs]


def test_tokens_are_handed_on_when_their_request_ends() -> None:
    steps = [tokens("a", 1), tokens("b", 7)], [tokens("a", 2, 3), tokens("b", 8, ends=True)]
    engine = engine_of(NumberedSteps(*steps, [tokens("a", 4, ends=True)]), a=[], b=[])
    OutputsAtTheEnd(engine)
    assert [left(engine) for _ in range(3)] == [[], [("b", [7, 8])], [("a", [1, 2, 3, 4])]]


def test_tokens_that_a_stop_string_may_end_are_handed_on_as_they_come() -> None:
    engine = engine_of(NumberedSteps([tokens("a", 1)], [tokens("a", 2)]), a=["end"])
    OutputsAtTheEnd(engine)
    assert [left(engine) for _ in range(2)] == [[("a", [1])], [("a", [2])]]


def test_of_an_aborted_request_nothing_is_kept() -> None:
    engine = engine_of(NumberedSteps([tokens("a", 1)]), a=[])
    outputs = OutputsAtTheEnd(engine)
    assert left(engine) == []
    assert outputs._held
    engine.output_processor.request_states.clear()
    outputs.forget_aborted()
    assert not outputs._held


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
