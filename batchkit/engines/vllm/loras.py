"""vLLM's LoRA adapter for each request, and a test that rows with and without adapters may share a batch.

vLLM's CPU build (0.32) has a bug: a row without an adapter gets the adapter in the last slot if both kinds of rows are
in one batch. The answers do not show the bug, so batchkit tests for it when the model is loaded. If the test fails,
rows without an adapter get an adapter whose weights are all 0.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson

from batchkit.config.tables import JobConfig
from batchkit.engines.process.launcher import DOING
from batchkit.engines.vllm.adapters import CONFIG, WEIGHTS, Adapter, adapters_of
from batchkit.errors import EngineError
from batchkit.types import Request

_PROMPT, _MOST_PROMPT_TOKENS = "The quick brown fox jumps over the lazy dog.", 12
_TOKENS = 3
_ALTERNATIVES = 20
# An answer is right if all other adapters' answers are this many times farther away. Differences count if they are this
# many times larger than the noise.
_FAR = 4
_LEAST = 0.01  # log probability; smaller differences show nothing

Answer = Sequence[Mapping[int, float]]
"""Log probabilities of the most likely tokens at each position of an answer, by token id."""


class Loras:
    """The adapters of ``job``, each loaded once into ``llm``.

    Raises:
        EngineError: vLLM refuses an adapter, or mixes up rows with different adapters.
    """

    def __init__(self, job: JobConfig, llm: Any) -> None:
        self._llm = llm
        self._of_all = _of_all_rows(job)
        self._zero: TemporaryDirectory[str] | None = None
        self._by_name: dict[str, Any] = {"": None}
        adapters = adapters_of(job)
        if not adapters:
            return
        self._alone = {"": self._answers([None])[0]}
        for adapter in adapters:
            self._alone[adapter.name] = self._first_answer(adapter)
            self._by_name[adapter.name] = adapter.request
        print(f"{DOING}it checked the adapters together", file=sys.stderr, flush=True)
        twice = self._answers([None, None])
        noise = max(_distance(answer, self._alone[""]) for answer in twice)
        self._clear = max(_LEAST, _FAR * noise)
        if not self._base_is_right():
            self._zero = TemporaryDirectory(prefix="zero-adapter-")
            self._by_name[""] = _zero_adapter(adapters[0], Path(self._zero.name)).request
            if mixed := self._mixed_up():
                raise EngineError(
                    f"engine.loras: this version of vLLM mixes up rows of one batch: {mixed}. Upgrade vLLM, or run a"
                    " separate job for each adapter (engine.lora)"
                )

    def of(self, request: Request) -> Any:
        """Return vLLM's ``LoRARequest`` for the request's adapter, or None for the base model."""
        return self._of_all or self._by_name[request.lora or ""]

    def close(self) -> None:
        if self._zero is not None:
            self._zero.cleanup()

    def _first_answer(self, adapter: Adapter) -> Answer:
        """Load an adapter and return its answer to the test prompt. Print its name first, so that engine.log shows it
        if loading crashes."""
        place = f"engine.loras.{adapter.name}: {adapter.folder}"
        print(f"{DOING}it loaded {place}", file=sys.stderr, flush=True)
        try:
            return self._answers([adapter.request])[0]
        except Exception as error:  # the adapter's loading runs the model's code
            raise EngineError(
                f"{place}: vLLM can't load this adapter: {type(error).__name__}: {error}"
            ) from error

    def _base_is_right(self) -> bool:
        """Return whether rows without an adapter get the same answer in a batch with adapters as alone.

        Also return False if the adapters change the answer too little to tell.
        """
        alone = self._alone
        for name in alone.keys() - {""}:
            if _distance(alone[""], alone[name]) <= self._clear:
                return False
            base, other = self._answers([None, self._by_name[name]])
            moved = _distance(other, alone[name]) * _FAR > _distance(other, alone[""])
            for one in alone.keys() - {""}:
                moved |= _distance(base, alone[""]) * _FAR > _distance(base, alone[one])
            if moved:
                return False
        return True

    def _mixed_up(self) -> str:
        """Return which answers vLLM mixes up in one batch; "" if there are none.

        Adapters with similar answers are not compared.
        """
        for name in self._alone.keys() - {""}:
            pair = self._answers([self._by_name[""], self._by_name[name]])
            for own, answer in zip(("", name), pair, strict=True):
                distance = _distance(answer, self._alone[own])
                for other, its in self._alone.items():
                    is_clear = _distance(its, self._alone[own]) > self._clear
                    if is_clear and _distance(answer, its) < distance:
                        rows = f"rows of adapter {own!r}" if own else "rows without an adapter"
                        source = f"adapter {other!r}" if other else "the base model"
                        return f"{rows} get the answers of {source}"
        return ""

    def _answers(self, loras: Sequence[Any]) -> list[Answer]:
        """Return the answers to a short prompt, one with each of ``loras``, computed in one batch."""
        from vllm import SamplingParams

        tokens = self._llm.get_tokenizer().encode(_PROMPT)[:_MOST_PROMPT_TOKENS]
        most = self._llm.model_config.max_logprobs
        logprobs = _ALTERNATIVES if most < 0 else min(_ALTERNATIVES, most)
        params = SamplingParams(
            temperature=0, max_tokens=_TOKENS, ignore_eos=True, logprobs=logprobs
        )
        prompts = [{"prompt_token_ids": tokens} for _ in loras]
        outputs = self._llm.generate(prompts, params, use_tqdm=False, lora_request=[*loras])
        return [
            [{token: found.logprob for token, found in place.items()} for place in first.logprobs]
            for first in (output.outputs[0] for output in outputs)
        ]


def _of_all_rows(job: JobConfig) -> Any:
    """Return vLLM's ``LoRARequest`` for ``engine.lora``, the adapter of all rows; None if it is not set."""
    if job.engine.lora is None:
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest("adapter", 1, job.engine.lora)


def _distance(a: Answer, b: Answer) -> float:
    """Return the mean difference between the token log probabilities of two answers.

    Positions after the first one with different likeliest tokens are not compared. The mean is used because rounding
    affects it less than the maximum.
    """
    found = list[float]()
    for of_a, of_b in zip(a, b, strict=True):
        found += [*_differences(of_a, of_b), *_differences(of_b, of_a)]
        if max(of_a, key=of_a.__getitem__) != max(of_b, key=of_b.__getitem__):
            break
    return sum(found) / len(found)


def _differences(a: Mapping[int, float], b: Mapping[int, float]) -> list[float]:
    """Return the difference of log probabilities for each token in ``a``.

    A token that ``b`` does not list counts as the least likely one in ``b``, since it is at most that likely.
    """
    least = min(b.values())
    return [
        abs(logprob - b[token]) if token in b else max(0.0, logprob - least)
        for token, logprob in a.items()
    ]


def _zero_adapter(like: Adapter, folder: Path) -> Adapter:
    """Write an adapter that changes nothing to ``folder``: the matrices of ``like`` with rank 1, all 0."""
    import numpy as np
    from safetensors.numpy import save_file

    zeros = {}
    for name, shape in like.shapes.items():
        if name.endswith(".lora_A.weight"):
            zeros[name] = np.zeros([1, *shape[1:]], np.float32)
        elif name.endswith(".lora_B.weight"):
            zeros[name] = np.zeros([*shape[:-1], 1], np.float32)
    save_file(zeros, folder / WEIGHTS)
    config = {**like.config, "r": 1, "lora_alpha": 1, "rank_pattern": {}, "alpha_pattern": {}}
    (folder / CONFIG).write_bytes(orjson.dumps(config))
    shapes = {name: tensor.shape for name, tensor in zeros.items()}
    return Adapter("", folder, config, shapes)
