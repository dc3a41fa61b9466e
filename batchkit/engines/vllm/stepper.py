"""A driver of vLLM's engine that keeps the device from waiting for Python code.

Between two forward passes, vLLM updates the detokenizer, log probabilities and statistics of each running request, for
each token. batchkit reads only finished answers. So tokens are collected here, and passed to vLLM's output processor
when their request has ended. Waiting requests are added while the device works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from batchkit.engines.base import EngineLoad


class Stepper:
    """A driver that runs the forward passes of ``engine``, a vLLM LLMEngine.

    It collects a request's tokens, and passes them to vLLM's output processor when the request ends. Requests with stop
    strings or log probabilities are an exception: vLLM needs their tokens after each forward pass.

    ``meanwhile``: called in each forward pass while the device works; it may add requests.
    """

    def __init__(self, engine: Any, meanwhile: Callable[[], None]) -> None:
        from vllm.v1.engine import EngineCoreEventType

        self._engine = engine
        engine.logger_manager = None  # nothing reads vLLM's own counters
        self._meanwhile = meanwhile
        self._load = EngineLoad(0, 0, 0.0, 0)
        self._preempted = self._drafts = self._accepted = 0
        self._preemption = EngineCoreEventType.PREEMPTED
        self._states = engine.output_processor.request_states
        # The outputs so far of each request, merged into one output, by vLLM's request id.
        self._held: dict[str, Any] = {}
        client = engine.engine_core
        self._get_output, client.get_output = client.get_output, self._get
        if hasattr(client, "engine_core"):
            executor = client.engine_core.model_executor
            self._execute_model, executor.execute_model = executor.execute_model, self._execute
        else:
            self._get_output = partial(self._of_other_process, client)

    def step(self) -> list[Any]:
        """Run one forward pass and return its RequestOutputs."""
        outputs: list[Any] = self._engine.step()
        return outputs

    @property
    def running(self) -> int:
        """The number of requests that ran in the last forward pass."""
        return self._load.running

    def load(self) -> EngineLoad:
        """Return the scheduler's load in the last forward pass, and the numbers since the last call."""
        load = self._load._replace(
            preempted=self._preempted, drafts=self._drafts, accepted_tokens=self._accepted
        )
        self._preempted = self._drafts = self._accepted = 0
        return load

    def tokens(self) -> dict[str, int]:
        """Return the number of output tokens of each unfinished request by vLLM's request id, in the order of
        arrival."""
        return {
            number: len(held.new_token_ids)
            if (held := self._held.get(number)) is not None
            else state.detokenizer.num_output_tokens()
            if state.detokenizer is not None
            else 0
            for number, state in self._states.items()
        }

    def forget_aborted(self) -> None:
        """Drop the state of requests that the engine no longer knows."""
        for number in self._held.keys() - self._states.keys():
            del self._held[number]

    def _execute(self, *args: Any, **kwargs: Any) -> Any:
        output = self._execute_model(*args, **kwargs)  # starts the device; vLLM waits for it later
        self._meanwhile()
        return output

    def _of_other_process(self, client: Any) -> Any:
        from batchkit.engines.vllm.core import next_outputs

        self._meanwhile()  # the core's process runs forward passes by itself, so the device works now
        return next_outputs(client)

    def _get(self) -> Any:
        outputs = self._get_output()
        outputs.outputs = list(self._to_process(outputs.outputs))
        if (stats := outputs.scheduler_stats) is not None:
            busy = (stats.num_running_reqs, stats.num_waiting_reqs, stats.kv_cache_usage)
            self._load = EngineLoad(*busy, preempted=0)
            if (drafted := stats.spec_decoding_stats) is not None:
                self._drafts += drafted.num_drafts
                self._accepted += drafted.num_accepted_tokens
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
