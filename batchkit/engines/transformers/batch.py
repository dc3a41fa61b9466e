"""Which answers begin together, and their prompts as one set of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from batchkit.engines.transformers.answer import Answer


def next_batch(waiting: Sequence[Answer], size: int) -> list[Answer]:
    """The one that has waited longest, and those that are most like it in length.

    First of all in how long their answers may get: until a batch ends, a row whose answer has ended
    costs as much as the others. Then in their prompts, so that little is padded. Of all the runs of
    ``size`` among those sorted so that hold the one, it is the run with the least spread: none waits
    for ever.
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
    """Tensors of one row each as those of a batch, padded on the left.

    What has a value for each token is padded, with nought but for ``input_ids``: so the padding is
    masked. What belongs to the images is put one behind the other.

    Raises:
        RuntimeError: this model's images don't go together (their tensors differ in shape).
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
