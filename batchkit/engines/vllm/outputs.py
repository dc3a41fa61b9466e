"""Tokens reach vLLM's output processor when a request ends, not at every step.

The thread that steps the model would otherwise touch each running request's detokenizer, log
probabilities and statistics for each of its tokens, while the device waits. Nobody here reads an
unfinished answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


class OutputsAtTheEnd:
    """Makes ``engine.step()`` return what it would, its work on a request done at the request's end.

    A request with stop strings is ended by the text of its answer, so its tokens pass as they come;
    so do those with log probabilities.
    """

    def __init__(self, engine: Any) -> None:
        from vllm.v1.engine import EngineCoreEventType

        self._preempted = 0
        self._preemption = EngineCoreEventType.PREEMPTED
        self._states = engine.output_processor.request_states
        # By vLLM's number of the request: its outputs so far, as one.
        self._held: dict[str, Any] = {}
        self._get_output = engine.engine_core.get_output
        engine.engine_core.get_output = self._get

    def preempted(self) -> int:
        """Requests preempted since the last call."""
        preempted, self._preempted = self._preempted, 0
        return preempted

    def forget_aborted(self) -> None:
        """Drop what is held of requests that the engine no longer knows."""
        for number in self._held.keys() - self._states.keys():
            del self._held[number]

    def _get(self) -> Any:
        outputs = self._get_output()
        outputs.outputs = list(self._to_process(outputs.outputs))
        return outputs

    def _to_process(self, outputs: Iterable[Any]) -> Iterator[Any]:
        held = self._held
        for output in outputs:
            if output.events:
                self._preempted += sum(event.type == self._preemption for event in output.events)
            first = held.get(output.request_id)
            if output.finish_reason is not None:
                if first is not None:
                    del held[output.request_id]
                    output.new_token_ids = first.new_token_ids + output.new_token_ids
                    output.prefill_stats = first.prefill_stats
                yield output
            elif first is not None:
                first.new_token_ids.extend(output.new_token_ids)
            elif _is_read_at_the_end(self._states.get(output.request_id)):
                held[output.request_id] = output
            else:
                yield output


def _is_read_at_the_end(state: Any) -> bool:
    if state is None or state.detokenizer is None or getattr(state.detokenizer, "stop", None):
        return False
    logprobs = state.logprobs_processor
    return logprobs.num_logprobs is None and logprobs.num_prompt_logprobs is None
