"""``model.generate``, paused after each forward pass until it is given the tokens.

The loop is the library's own, in any version, with all that an architecture needs (positions,
masks, cache). Only the choice of tokens is ours: each row of a batch has its own sampling and its
own end, and the caller can do other work between two steps.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple


class _Abandoned(Exception):
    """The batch is over: raised to leave ``generate``."""


class _Batch(NamedTuple):
    inputs: Mapping[str, Any]
    max_tokens: int


class Decoder:
    """One batch at a time: ``begin``, ``step`` as often as needed, ``end``.

    Threads: ``generate`` runs on a thread of ours. It and the caller never run at the same time:
    each waits on a queue for the other.
    """

    def __init__(self, model: Any, *, pad_token_id: int) -> None:
        from transformers import GenerationConfig

        self._model = model
        self._pad_token_id = pad_token_id
        # Otherwise the model's own temperature and penalties would apply beneath those of the rows.
        model.generation_config = GenerationConfig()
        self._to_thread: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._from_thread: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._is_generating = False
        self._thread = threading.Thread(target=self._run, name="generate", daemon=True)
        self._thread.start()

    def begin(self, inputs: Mapping[str, Any], max_tokens: int) -> Any:
        """The logits of each row's first token, float32, shape (rows, vocabulary).

        Raises:
            Exception: anything that the model's code raises; the batch is then over.
        """
        self._is_generating = True
        self._to_thread.put(_Batch(inputs, max_tokens))
        return self._next()

    def step(self, tokens: Any) -> Any:
        """The logits of the tokens after ``tokens``, one for each row; otherwise like ``begin``."""
        self._to_thread.put(tokens)
        return self._next()

    def end(self) -> None:
        """End the batch and wait until ``generate`` has dropped it. May be called without one."""
        if self._is_generating:
            self._to_thread.put(None)
            self._from_thread.get()
            self._is_generating = False

    def close(self) -> None:
        """End the batch and the thread."""
        self.end()
        self._to_thread.put(None)
        self._thread.join()

    def _next(self) -> Any:
        given = self._from_thread.get()
        if isinstance(given, Exception):
            self._is_generating = False
            raise given
        return given

    def _run(self) -> None:
        while (batch := self._to_thread.get()) is not None:
            self._from_thread.put(self._generate(batch))
            del batch

    def _generate(self, batch: _Batch) -> Exception:
        """Run the batch; returns the error that ended it."""
        from transformers import GenerationConfig, LogitsProcessorList

        config = GenerationConfig(
            max_new_tokens=batch.max_tokens + 1,  # never reached
            do_sample=False,
            pad_token_id=self._pad_token_id,
        )
        try:
            self._model.generate(
                **batch.inputs,
                generation_config=config,
                logits_processor=LogitsProcessorList([self._hold]),
            )
        except Exception as error:
            return error
        return RuntimeError("generate ended before its rows did")

    def _hold(self, input_ids: Any, logits: Any) -> Any:
        """Called by ``generate``: returns logits that allow only the chosen token for each row."""
        import torch

        self._from_thread.put(logits)
        tokens = self._to_thread.get()
        if tokens is None:
            raise _Abandoned
        only = torch.full_like(logits, -float("inf"))
        return only.scatter_(1, tokens[:, None], 0.0)
