"""Batches of answers: chooses the next token of each answer, and finds where it ends."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from batchkit.engines.transformers.rendering import PreparedPrompt
from batchkit.types import Choice


class LoadedModel(NamedTuple):
    """A model in memory. ``eos_ids``: tokens that end an answer. ``device``: where the model expects its inputs."""

    model: Any
    device: Any
    eos_ids: frozenset[int]
    pad_token_id: int


class _Abandoned(Exception):
    """An exception that ``_pause`` raises inside ``model.generate`` to leave it when the batch is over."""


class Batch:
    """A call of ``model.generate`` for several answers, which pauses after each forward pass until ``step`` has chosen
    the tokens.

    Threads: ``generate`` runs on a thread of the batch. It never runs at the same time as the caller: each waits on a
    queue for the other.
    """

    def __init__(self, answers: Sequence[BatchAnswer], loaded: LoadedModel) -> None:
        self.answers = answers
        self._loaded = loaded
        self._chosen: Any = None  # the tokens chosen after the last forward pass
        self._logits: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._tokens: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._generate, name="generate", daemon=True)
        for answer in answers:
            answer.begin()

    @property
    def unfinished(self) -> list[BatchAnswer]:
        return [answer for answer in self.answers if answer.finish_reason is None]

    def step(self) -> list[BatchAnswer]:
        """Run one forward pass, give each unfinished answer its next token, and return the answers that end with it.

        Raises:
            Exception: Any error of the model's code; the batch is then over.
        """
        if self._chosen is None:
            self._thread.start()
        else:
            self._tokens.put(self._chosen)
        logits = self._logits.get()
        if isinstance(logits, Exception):
            raise logits
        unfinished, self._chosen = self.unfinished, logits.argmax(-1)
        for row, answer in enumerate(self.answers):
            if answer.finish_reason is not None:
                self._chosen[row] = self._loaded.pad_token_id
            elif not answer.takes_the_likeliest:
                self._chosen[row] = answer.choose(logits[row])
        for row, token_id in enumerate(self._chosen.tolist()):
            if self.answers[row].finish_reason is None:
                self.answers[row].take(token_id, logits[row])
        return [answer for answer in unfinished if answer.finish_reason is not None]

    def end(self) -> None:
        """Stop the thread that runs ``model.generate`` and wait for it, so that its tensors are freed. No effect if the
        thread has ended."""
        if self._thread.is_alive():
            self._tokens.put(None)
            self._thread.join()

    def _generate(self) -> None:
        from transformers import GenerationConfig, LogitsProcessorList

        model, device, _, pad_token_id = self._loaded
        try:
            inputs = collate([answer.prepared.inputs for answer in self.answers], pad_token_id)
            for name, value in inputs.items():
                inputs[name] = value.to(device, model.dtype if value.is_floating_point() else None)
            config = GenerationConfig(
                max_new_tokens=1 + max(answer.prepared.max_tokens for answer in self.answers),
                do_sample=False,
                pad_token_id=pad_token_id,
            )
            held = LogitsProcessorList([self._pause])
            model.generate(**inputs, generation_config=config, logits_processor=held)
            raise RuntimeError("generate ended before its rows did")
        except _Abandoned:
            pass
        except Exception as error:
            self._logits.put(error)

    def _pause(self, input_ids: Any, logits: Any) -> Any:
        """Return logits that allow only the chosen token of each row.

        ``generate`` calls this after each forward pass. It waits until ``step`` has chosen the tokens.
        """
        self._logits.put(logits)
        tokens = self._tokens.get()
        if tokens is None:
            raise _Abandoned
        only = logits.new_full(logits.shape, -float("inf"))
        return only.scatter_(1, tokens[:, None], 0.0)


def next_batch(waiting: Sequence[BatchAnswer], size: int) -> list[BatchAnswer]:
    """Return up to ``size`` answers of similar length, including the one that has waited longest.

    The answers are sorted by their maximum length, because a finished row takes as much time as the others until its
    batch ends. Answers with the same maximum length are sorted by the length of their prompts, to reduce padding. An
    answer that must run alone is returned alone once it is the oldest.
    """
    if waiting[0].runs_alone:
        return [waiting[0]]
    ordered = sorted(waiting, key=lambda a: (a.prepared.max_tokens, a.prepared.prompt_tokens))
    oldest = next(n for n, answer in enumerate(ordered) if answer is waiting[0])
    start = max(0, min(oldest // size * size, len(ordered) - size))
    return ordered[start : start + size]


def collate(prompts: Sequence[Mapping[str, Any]], pad_token_id: int) -> dict[str, Any]:
    """Join the tensors of single rows to the tensors of a batch, padded on the left.

    Tensors with one value per token are padded with 0, ``input_ids`` with ``pad_token_id``; the attention mask thus
    hides the padding. Image tensors are concatenated.

    Raises:
        RuntimeError: This model's images can't be batched (their tensors differ in shape).
    """
    from torch import cat, zeros_like
    from torch.nn.functional import pad

    longest = max(prompt["input_ids"].shape[1] for prompt in prompts)
    batch = {}
    for name in dict.fromkeys(name for prompt in prompts for name in prompt):
        if all(_is_by_token(prompt, name) for prompt in prompts):
            value = pad_token_id if name == "input_ids" else 0
            rows = [prompt.get(name, zeros_like(prompt["input_ids"])) for prompt in prompts]
            batch[name] = cat([pad(row, (longest - row.shape[1], 0), value=value) for row in rows])
        else:
            batch[name] = cat([prompt[name] for prompt in prompts if name in prompt])
    return batch


def _is_by_token(prompt: Mapping[str, Any], name: str) -> bool:
    return name not in prompt or prompt[name].shape == prompt["input_ids"].shape


class BatchAnswer:
    """One of the ``n`` answers to a request, with its tokens so far.

    - ``siblings``: all answers to the request.
    - ``seed``: the only source of randomness, so that other rows in the batch do not change the answer.
    - ``eos_ids``: the model's own end tokens.
    - ``since``: time of submission (``time.monotonic()``).
    - ``runs_alone``: the answer is never batched with others.
    """

    def __init__(
        self, prepared: PreparedPrompt, seed: int, tokenizer: Any, eos_ids: frozenset[int]
    ) -> None:
        self.prepared = prepared
        self.since = 0.0
        self.siblings: Sequence[BatchAnswer] = [self]
        self.runs_alone = False
        self._tokenizer = tokenizer
        self._stop_ids = frozenset(prepared.sampling.stop_token_ids or ())
        if not prepared.sampling.ignore_eos:
            self._stop_ids |= eos_ids
        self._muted = list(self._stop_ids | eos_ids)  # forbidden before min_tokens
        self._seed = seed
        self.begin()

    def begin(self) -> None:
        """Remove all tokens, so that the answer starts from the prompt. A failed batch is started again in this way."""
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self._text: str | None = None
        self._logprobs: list[dict[str, Any]] = []
        self._generator: Any = None

    @property
    def takes_the_likeliest(self) -> bool:
        """True if the next token is the argmax of the unchanged logits."""
        asked = self.prepared.sampling
        changes = (asked.presence_penalty, asked.frequency_penalty, asked.logit_bias)
        is_plain = not any(changes) and asked.repetition_penalty == 1.0
        is_free = asked.allowed_token_ids is None and len(self.token_ids) >= asked.min_tokens
        return asked.is_greedy and is_plain and is_free

    def choose(self, logits: Any) -> Any:
        """Return the next token, sampled from ``logits`` in the order of vLLM's sampler."""
        import torch

        asked = self.prepared.sampling
        scores = self._penalized(self._allowed(logits)[None])
        if asked.is_greedy:
            return scores.argmax()
        if self._generator is None:
            self._generator = torch.Generator(scores.device).manual_seed(self._seed)
        for warp in self._warpers():
            scores = warp(None, scores)
        return torch.multinomial(scores.softmax(-1), 1, generator=self._generator)[0, 0]

    def take(self, token_id: int, logits: Any) -> None:
        """Append the token ``token_id``. ``logits``: the model's logits, from which its log probability is computed."""
        asked = self.prepared.sampling
        self.token_ids.append(token_id)
        if asked.logprobs is not None:
            self._logprobs.append(self._logprob(token_id, logits, asked.logprobs))
        may_stop = len(self.token_ids) >= asked.min_tokens
        if (may_stop and token_id in self._stop_ids) or self._has_stop_text():
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.prepared.max_tokens:
            self.finish_reason = "length"

    def to_choice(self) -> Choice:
        """Return the finished answer. Its text excludes the stop token, unless the request includes it."""
        asked, text = self.prepared.sampling, self._text
        if text is None:
            is_stopped = self.finish_reason == "stop" and not asked.include_stop_str_in_output
            text = self._decode(self.token_ids[:-1] if is_stopped else self.token_ids)
        return Choice(text, self.finish_reason, None if asked.logprobs is None else self._logprobs)

    def _allowed(self, logits: Any) -> Any:
        """Return a copy of the logits with masks and biases applied."""
        asked, scores = self.prepared.sampling, logits.clone()
        if asked.allowed_token_ids is not None:
            scores[:] = -float("inf")
            scores[asked.allowed_token_ids] = logits[asked.allowed_token_ids]
        if len(self.token_ids) < asked.min_tokens:
            scores[self._muted] = -float("inf")
        for token_id, bias in (asked.logit_bias or {}).items():
            scores[token_id] += bias
        return scores

    def _penalized(self, scores: Any) -> Any:
        import torch
        from transformers import RepetitionPenaltyLogitsProcessor

        asked = self.prepared.sampling
        answered = torch.tensor(self.token_ids, dtype=torch.long)
        if asked.repetition_penalty != 1.0:
            seen = torch.cat([self.prepared.inputs["input_ids"], answered[None]], dim=-1)
            repetition = RepetitionPenaltyLogitsProcessor(asked.repetition_penalty)
            scores = repetition(seen.to(scores.device), scores)
        if asked.frequency_penalty or asked.presence_penalty:
            found, counts = answered.to(scores.device).unique(return_counts=True)
            scores[0, found] -= asked.frequency_penalty * counts + asked.presence_penalty
        return scores

    def _warpers(self) -> Iterable[Callable[[Any, Any], Any]]:
        from transformers import (
            MinPLogitsWarper,
            TemperatureLogitsWarper,
            TopKLogitsWarper,
            TopPLogitsWarper,
        )

        asked = self.prepared.sampling
        yield TemperatureLogitsWarper(asked.temperature)
        if asked.min_p > 0:
            yield MinPLogitsWarper(asked.min_p)
        if asked.top_k > 0:
            yield TopKLogitsWarper(asked.top_k)
        if asked.top_p < 1:
            yield TopPLogitsWarper(asked.top_p)

    def _has_stop_text(self) -> bool:
        """Return whether the answer contains a stop text after its first ``min_tokens``. If so, cut the answer
        there."""
        asked = self.prepared.sampling
        if not asked.stops:
            return False
        text = self._decode(self.token_ids)
        after = len(self._decode(self.token_ids[: asked.min_tokens]))
        starts = {stop: text.find(stop, max(0, after - len(stop) + 1)) for stop in asked.stops}
        found = [(at, stop) for stop, at in starts.items() if at >= 0]
        if found:
            at, stop = min(found)
            self._text = text[: at + len(stop)] if asked.include_stop_str_in_output else text[:at]
        return bool(found)

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            token_ids,
            skip_special_tokens=self.prepared.sampling.skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return text.rstrip("\N{REPLACEMENT CHARACTER}")  # an incomplete character

    def _logprob(self, token_id: int, logits: Any, top: int) -> dict[str, Any]:
        """Return the log probabilities of the token and of the ``top`` likeliest tokens, in OpenAI's shape."""
        logprobs = logits.log_softmax(-1)
        values, token_ids = logprobs.topk(min(top, len(logprobs)))
        likeliest = dict(zip(token_ids.tolist(), values.tolist(), strict=True))
        likeliest.setdefault(token_id, float(logprobs[token_id]))
        shown = {
            n: {"token": self._tokenizer.decode([n]), "logprob": logprob}
            for n, logprob in likeliest.items()
        }
        return {**shown[token_id], "top_logprobs": list(shown.values())}
