"""A vLLM worker that waits and computes nothing, as if an accelerator did the work.

    worker_cls = "accelerator.SimulatedWorker"      (embed.py: SimulatedEmbedder)

A step takes ``step_ms``, ``token_us`` for each token in it and ``image_ms`` for each image or recording that it
encodes (``SIMULATED_ACCELERATOR``, JSON), and leaves the host's cores alone meanwhile. Its output is
asynchronous, as a GPU's: vLLM waits for it when it needs it. Scheduler, KV cache, tokenizer and image
processor are vLLM's own.

An answer depends only on its row's tokens and processed pixels or sound, so that it shows whether these
reached the engine, in any batch; with ``by_prompt`` on its tokens alone. ``words``: the first and the number of the tokens that it is drawn from. It ends by a stop token, after a number of tokens that is lognormal
with the median ``median_tokens``, or with that of the first token of the prompt that is in ``medians``, and with ``sigma``; only
the worker knows it. The tokens are drawn when a request
arrives, so a step costs the host next to nothing here.

Each step is written to the file ``steps``, if it is given: when it was submitted and ended, and its
requests (``STEP``). ``{pid}`` in the name is the worker's process, so that each engine has a file.

Engines that are given the same file ``device`` share one accelerator (shared_device.py). If the worker's
process uses MPS (CUDA_MPS_PIPE_DIRECTORY is set), steps of different engines overlap, and each uses
``share`` of the device, by default all of it. Otherwise a step begins when all steps before it, of any
engine, have ended.
"""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from models import FIRST_WORD, WORDS
from shared_device import DeviceFile
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    ModelRunnerOutput,
)
from vllm.v1.worker.cpu_worker import CPUWorker

COSTS = "SIMULATED_ACCELERATOR"
STEP = struct.Struct("ddi")
MPS = "CUDA_MPS_PIPE_DIRECTORY"
SIGMA = 0.9  # of the lengths' logarithm: a twentieth is more than four times the median


class Answer(NamedTuple):
    prompt_tokens: int
    tokens: list[list[int]]  # one a step, as vLLM wants them


class Later(AsyncModelRunnerOutput):
    """The output of a step. ``wait`` returns when the step has ended."""

    def __init__(self, output: ModelRunnerOutput, wait: Callable[[], None]) -> None:
        self.output, self.wait = output, wait

    def get_output(self) -> ModelRunnerOutput:
        self.wait()
        return self.output


class SimulatedWorker(CPUWorker):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.costs: dict[str, Any] = json.loads(os.environ[COSTS])
        self.stop_token: int = self.model_config.hf_text_config.eos_token_id
        self.answers: dict[str, Answer] = {}
        pid = str(os.getpid())
        steps, device = self.costs.get("steps"), self.costs.get("device")
        self.timeline = Path(steps.replace("{pid}", pid)).open("ab") if steps else None  # noqa: SIM115
        self.shared = DeviceFile(Path(device)) if device else None
        self.queue = pid if MPS in os.environ else ""

    def execute_model(self, scheduled: Any, *_: Any, **__: Any) -> Any:
        began = time.monotonic()
        for number in scheduled.finished_req_ids:
            self.answers.pop(number, None)
        if not scheduled.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        answers, now = self.answers, scheduled.num_scheduled_tokens
        sampled = []
        for new in scheduled.scheduled_new_reqs:
            answer = answers[new.req_id] = self._answer(new)
            whole = new.num_computed_tokens + now[new.req_id] >= answer.prompt_tokens
            sampled.append(answer.tokens[0] if whole else [])
        cached = scheduled.scheduled_cached_reqs
        for number, computed, answered in zip(
            cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
        ):
            prompt_tokens, tokens = answers[number]
            whole = computed + now[number] >= prompt_tokens + answered
            sampled.append(tokens[answered] if whole else [])
        numbers = [new.req_id for new in scheduled.scheduled_new_reqs] + cached.req_ids
        output = ModelRunnerOutput(
            req_ids=numbers,
            req_id_to_index=dict(zip(numbers, range(len(numbers)), strict=True)),
            sampled_token_ids=[list(tokens) for tokens in sampled],
        )
        return self._after(began, self._costs_s(scheduled), output)

    def _after(self, began: float, costs_s: float, output: ModelRunnerOutput) -> Any:
        wait = partial(self._wait, began, self._submit(began, costs_s), len(output.req_ids))
        later = Later(output, wait)
        if not (busy := self.costs.get("busy", 0.0)):
            return later
        began = time.thread_time()
        while time.thread_time() - began < busy * costs_s:
            pass
        return later.get_output()

    def _answer(self, new: Any) -> Answer:
        params = new.sampling_params
        draw = np.random.default_rng(_checksum(new, self.costs.get("by_prompt", False)))
        medians = self.costs.get("medians", {})
        of_prompt = (medians[str(n)] for n in new.prompt_token_ids if str(n) in medians)
        median = next(of_prompt, self.costs["median_tokens"])
        length = round(draw.lognormal(np.log(median), self.costs.get("sigma", SIGMA)))
        length = min(max(length, params.min_tokens, 1), params.max_tokens)
        first, n_words = self.costs.get("words", (FIRST_WORD, WORDS))
        words = draw.integers(first, first + n_words, length).tolist()
        return Answer(len(new.prompt_token_ids), [[word] for word in [*words, self.stop_token]])

    def _submit(self, began: float, costs_s: float) -> Callable[[], float]:
        """Submit a step. Return a function that waits for its end and returns it."""
        if self.shared is None:
            return partial(_sleep_until, began + costs_s)
        share = self.costs.get("share", 1.0)
        return partial(self.shared.wait, self.shared.submit(self.queue, costs_s, share))

    def _wait(self, began: float, end: Callable[[], float], requests: int) -> None:
        ended = end()
        if self.timeline is not None:
            self.timeline.write(STEP.pack(began, ended, requests))
            self.timeline.flush()

    def _costs_s(self, scheduled: Any) -> float:
        images = sum(map(len, scheduled.scheduled_encoder_inputs.values()))
        tokens = scheduled.total_num_scheduled_tokens
        costs = self.costs
        return float(
            costs["step_ms"] / 1e3
            + tokens * costs["token_us"] / 1e6
            + images * costs["image_ms"] / 1e3
        )


class SimulatedEmbedder(SimulatedWorker):
    """A simulated worker for a pooling model. The answer is one of ``VECTORS`` vectors, chosen by
    the row's tokens."""

    VECTORS = 1024

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        draw = torch.Generator().manual_seed(0)
        size = self.model_config.get_hidden_size()
        drawn = torch.randn((self.VECTORS, size), generator=draw)
        self.vectors = torch.nn.functional.normalize(drawn)
        self.prompts: dict[str, tuple[int, torch.Tensor]] = {}  # tokens, and their vector

    def execute_model(self, scheduled: Any, *_: Any, **__: Any) -> Any:
        began = time.monotonic()
        for number in scheduled.finished_req_ids:
            self.prompts.pop(number, None)
        if not scheduled.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        computed = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        for new in scheduled.scheduled_new_reqs:
            vector = self.vectors[_checksum(new) % self.VECTORS]
            self.prompts[new.req_id] = len(new.prompt_token_ids), vector
        cached = scheduled.scheduled_cached_reqs
        computed |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        pooled = []
        for number, before in computed.items():
            prompt_tokens, vector = self.prompts[number]
            is_whole = before + scheduled.num_scheduled_tokens[number] >= prompt_tokens
            pooled.append(vector if is_whole else None)
        output = ModelRunnerOutput(
            req_ids=list(computed),
            req_id_to_index=dict(zip(computed, range(len(computed)), strict=True)),
            pooler_output=pooled,
        )
        return self._after(began, self._costs_s(scheduled), output)


def _sleep_until(end: float) -> float:
    time.sleep(max(0.0, end - time.monotonic()))
    return end


def _checksum(new: Any, by_prompt: bool = False) -> int:
    """Return a checksum of the prompt's tokens, and of a sample of its processed pixels or sound.
    ``by_prompt``: of the tokens alone."""
    found = crc32(np.array(new.prompt_token_ids).tobytes())
    for feature in () if by_prompt else new.mm_features:
        values = feature.data["pixel_values" if feature.modality == "image" else "input_features"]
        found = crc32(np.ascontiguousarray(values.data.numpy()[::16]).tobytes(), found)
    return found
