"""Answers that are generated together."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from batchkit.engines.transformers.answer import Answer
from batchkit.engines.transformers.loading import Loaded


class _Abandoned(Exception):
    """The batch is over: raised to leave ``generate``."""


class Batch:
    """``model.generate``, paused after each forward pass until its rows have chosen their tokens.

    Threads: ``generate`` runs on a thread of the batch. It and the caller never run at the same
    time: each waits on a queue for the other.
    """

    def __init__(self, answers: Sequence[Answer], loaded: Loaded) -> None:
        self.answers = answers
        self._loaded = loaded
        self._chosen: Any = None  # the tokens of the last step
        self._logits: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._tokens: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._generate, name="generate", daemon=True)
        for answer in answers:
            answer.begin()

    @property
    def unfinished(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.finish_reason is None]

    def step(self) -> list[Answer]:
        """Give each unfinished answer a token; returns those that end with it.

        Raises:
            Exception: anything that the model's code raises; the batch is then over.
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
        """Leave ``generate``, and wait until it has dropped its tensors."""
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
        """Called by ``generate``: returns logits that allow only the chosen token for each row."""
        self._logits.put(logits)
        tokens = self._tokens.get()
        if tokens is None:
            raise _Abandoned
        only = logits.new_full(logits.shape, -float("inf"))
        return only.scatter_(1, tokens[:, None], 0.0)


def next_batch(waiting: Sequence[Answer], size: int) -> list[Answer]:
    """The answer that has waited longest, and those most similar to it in length.

    First in the maximum length of their answers: until a batch ends, a row whose answer has ended
    costs as much as the others. Then in their prompts, to reduce padding. Of all runs of ``size``
    in that order that contain the oldest answer, the run with the least spread is taken: no answer
    waits forever. An answer that runs alone is taken when it is the oldest.
    """
    if waiting[0].runs_alone:
        return [waiting[0]]
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
