"""A vLLM worker that waits and computes nothing, as if an accelerator did the work.

    worker_cls = "accelerator.SimulatedWorker"

A step takes ``step_ms``, ``token_us`` for each token in it and ``image_ms`` for each image that it
encodes (``SIMULATED_ACCELERATOR``, JSON), and leaves the host's cores alone meanwhile. Scheduler,
KV cache, tokenizer and image processor are vLLM's own. An answer depends only on its row's tokens
and processed pixels, so that it shows whether these reached the engine, in any batch.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from models import FIRST_WORD, WORDS
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.worker.cpu_worker import CPUWorker

COSTS = "SIMULATED_ACCELERATOR"


class Prompt(NamedTuple):
    tokens: int
    content: int  # a checksum


class SimulatedWorker(CPUWorker):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.costs: dict[str, float] = json.loads(os.environ[COSTS])
        self.prompts: dict[str, Prompt] = {}

    def execute_model(self, scheduled: Any, *_: Any, **__: Any) -> Any:
        began = time.monotonic()
        for number in scheduled.finished_req_ids:
            self.prompts.pop(number, None)
        if not scheduled.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        places = {}  # tokens computed before this step, tokens answered before it
        for new in scheduled.scheduled_new_reqs:
            self.prompts[new.req_id] = Prompt(len(new.prompt_token_ids), _checksum(new))
            places[new.req_id] = new.num_computed_tokens, 0
        cached = scheduled.scheduled_cached_reqs
        places |= zip(
            cached.req_ids,
            zip(cached.num_computed_tokens, cached.num_output_tokens, strict=True),
            strict=True,
        )
        numbers = list(scheduled.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=numbers,
            req_id_to_index={number: place for place, number in enumerate(numbers)},
            sampled_token_ids=[
                self._sampled(number, *places[number], scheduled.num_scheduled_tokens[number])
                for number in numbers
            ],
        )
        time.sleep(max(0.0, began + self._costs_s(scheduled) - time.monotonic()))
        return output

    def _sampled(self, number: str, computed: int, answered: int, now: int) -> list[int]:
        """The next token, once all before it are computed."""
        prompt = self.prompts[number]
        if computed + now < prompt.tokens + answered:
            return []
        return [FIRST_WORD + crc32(b"%d %d" % (prompt.content, answered)) % WORDS]

    def _costs_s(self, scheduled: Any) -> float:
        images = sum(map(len, scheduled.scheduled_encoder_inputs.values()))
        tokens = scheduled.total_num_scheduled_tokens
        costs = self.costs
        return (
            costs["step_ms"] / 1e3
            + tokens * costs["token_us"] / 1e6
            + images * costs["image_ms"] / 1e3
        )


def _checksum(new: Any) -> int:
    """Of the prompt's tokens and a sample of its images' processed pixels."""
    found = crc32(np.array(new.prompt_token_ids).tobytes())
    for feature in new.mm_features:
        pixels = feature.data["pixel_values"].data.numpy()
        found = crc32(np.ascontiguousarray(pixels[::16]).tobytes(), found)
    return found
