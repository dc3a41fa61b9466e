"""One answer while it is generated: its next token, and when it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from batchkit.engines.transformers.rendering import Prepared
from batchkit.types import Choice


class Answer:
    """One of the ``n`` answers to a request; ``siblings`` are all of them.

    ``seed`` decides what is sampled, whatever other rows are in the batch. ``eos_ids``: the model's
    own end tokens. ``since``: when the request was submitted. ``runs_alone``: it is never batched
    with others.
    """

    def __init__(
        self,
        prepared: Prepared,
        *,
        seed: int,
        tokenizer: Any,
        eos_ids: frozenset[int],
        since: float = 0.0,
    ) -> None:
        self.prepared = prepared
        self.since = since
        self.siblings: Sequence[Answer] = [self]
        self.runs_alone = False
        self._tokenizer = tokenizer
        self._stop_ids = frozenset(prepared.sampling.stop_token_ids or ())
        if not prepared.sampling.ignore_eos:
            self._stop_ids |= eos_ids
        self._muted = list(self._stop_ids | eos_ids)  # before min_tokens
        self._seed = seed
        self.begin()

    def begin(self) -> None:
        """Start, or start again, from the prompt."""
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self._text: str | None = None
        self._logprobs: list[dict[str, Any]] = []
        self._generator: Any = None

    @property
    def takes_the_likeliest(self) -> bool:
        """The next token is the argmax of the unchanged logits."""
        asked = self.prepared.sampling
        changes = (asked.presence_penalty, asked.frequency_penalty, asked.logit_bias)
        is_plain = not any(changes) and asked.repetition_penalty == 1.0
        is_free = asked.allowed_token_ids is None and len(self.token_ids) >= asked.min_tokens
        return asked.is_greedy and is_plain and is_free

    def choose(self, logits: Any) -> Any:
        """The next token, sampled from ``logits`` in the order of vLLM's sampler."""
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
        """Add the token; ``logits`` are the unchanged ones that it was chosen from."""
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
        """The text ends before the token that ended it, unless the request wants that token."""
        asked, text = self.prepared.sampling, self._text
        if text is None:
            is_stopped = self.finish_reason == "stop" and not asked.include_stop_str_in_output
            text = self._decode(self.token_ids[:-1] if is_stopped else self.token_ids)
        return Choice(text, self.finish_reason, None if asked.logprobs is None else self._logprobs)

    def _allowed(self, logits: Any) -> Any:
        """A copy with masks and biases applied."""
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
        """If so, the text is cut there. Stop texts within the first ``min_tokens`` are ignored."""
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
        """The token and the ``top`` most likely ones, in OpenAI's shape, as in engines/vllm/."""
        logprobs = logits.log_softmax(-1)
        values, token_ids = logprobs.topk(min(top, len(logprobs)))
        likeliest = dict(zip(token_ids.tolist(), values.tolist(), strict=True))
        likeliest.setdefault(token_id, float(logprobs[token_id]))
        shown = {
            n: {"token": self._tokenizer.decode([n]), "logprob": logprob}
            for n, logprob in likeliest.items()
        }
        return {**shown[token_id], "top_logprobs": list(shown.values())}
