"""OpenAI Whisper's timestamp rules, as a logits processor for vLLM.

Without them, Whisper answers with ``<|notimestamps|>``, or gives one pair of timestamps to many sentences. The rules
are ``ApplyTimestampRules`` in https://github.com/openai/whisper/blob/main/whisper/decoding.py:

- An answer starts with a timestamp.
- Timestamps come in pairs and never decrease.
- A timestamp is written where all timestamps together are more likely than any other token.

vLLM imports this module by name in the process of its engine core.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

NEVER = float("-inf")


class _Answer(NamedTuple):
    """A running answer: its ``tokens``, and the ids of two special tokens.

    - ``end``: the id of ``<|endoftext|>``. Text tokens have lower ids.
    - ``first``: the id of ``<|0.00|>``. Timestamps have ids from here on.
    """

    tokens: Sequence[int]
    end: int
    first: int

    def allowed(self, n_ids: int) -> tuple[int, int]:
        """Return the lowest id of a text token, and the lowest id of a timestamp, that may come next.

        ``n_ids``: size of the vocabulary; as a lowest id it forbids all timestamps.
        """
        if not self.tokens:
            return self.end + 1, self.first
        if self.tokens[-1] < self.first:
            latest = next((it for it in reversed(self.tokens) if it >= self.first), self.first)
            return 0, latest + 1
        if len(self.tokens) > 1 and self.tokens[-2] < self.first:  # a segment has just ended
            return self.end, self.tokens[-1]
        return 0, n_ids


class TimestampRules(LogitsProcessor):
    """A logits processor that applies the rules to requests with ``timestamps`` in their ``extra_args``.

    The value is a list with the ids of ``<|endoftext|>`` and ``<|0.00|>``.
    """

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self._answers: dict[int, _Answer] = {}  # keyed by row of the batch

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        process_dict_updates(self._answers, batch_update, _answer_of)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if not self._answers:
            return logits
        for row, answer in self._answers.items():
            text, stamp = answer.allowed(logits.shape[1])
            logits[row, :text] = logits[row, answer.end + 1 : stamp] = NEVER
        stamps = logits[:, answer.first :].logsumexp(1)
        is_stamp = (stamps > logits[:, : answer.end + 1].amax(1)).tolist()
        for row in filter(is_stamp.__getitem__, self._answers):
            logits[row, : answer.end + 1] = NEVER
        return logits


def _answer_of(params: Any, _: object, tokens: list[int]) -> _Answer | None:
    ids = (params.extra_args or {}).get("timestamps")
    return _Answer(tokens, *ids) if ids else None
