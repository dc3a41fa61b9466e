"""Selects the answers of a batch, and joins their prompts into one set of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from batchkit.engines.transformers.answer import Answer


def next_batch(waiting: Sequence[Answer], size: int) -> list[Answer]:
    """The answer that has waited longest, and those most similar to it in length.

    First in the maximum length of their answers: until a batch ends, a row whose answer has ended
    costs as much as the others. Then in their prompts, to reduce padding. Of all runs of ``size``
    in that order that contain the oldest answer, the run with the least spread is taken: no answer
    waits forever.
    """
    ordered = sorted(waiting, key=lambda a: (a.prepared.max_tokens, a.prepared.prompt_tokens))
    if len(ordered) <= size:
        return ordered
    oldest = next(n for n, answer in enumerate(ordered) if answer is waiting[0])
    starts = range(max(0, oldest - size + 1), min(oldest, len(ordered) - size) + 1)
    return min((ordered[n : n + size] for n in starts), key=_spread)


def _spread(run: Sequence[Answer]) -> tuple[int, int]:
    prompts = [answer.prepared.prompt_tokens for answer in run]
    answers = [answer.prepared.max_tokens for answer in run]
    return max(answers) - min(answers), max(prompts) - min(prompts)


def collate(prompts: Sequence[Mapping[str, Any]], pad_token_id: int) -> dict[str, Any]:
    """Join tensors of one row each into those of a batch, padded on the left.

    Tensors with a value for each token are padded, all but ``input_ids`` with 0, so the padding is
    masked. Tensors of images are concatenated.

    Raises:
        RuntimeError: this model's images can't be batched (their tensors differ in shape).
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
