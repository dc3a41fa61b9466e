"""What the function of ``[rollout]`` gets to ask a model with."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from batchkit.config.tables import JobConfig
from batchkit.errors import RequestError
from batchkit.execution.rollouts.open_row import OpenRow
from batchkit.rendering.messages import short
from batchkit.rendering.steps import Renderer
from batchkit.types import Completion, Request

Prompt = str | Sequence[Mapping[str, Any]]


class Generate:
    """``await generate(prompt)`` is one generation of the row; ``await generate.many(prompts)`` are
    several at a time.

    Nothing that was answered is asked again after a restart: the row gets its recorded answers.
    """

    def __init__(self, row: OpenRow, job: JobConfig, renderer: Renderer) -> None:
        self._row, self._job, self._renderer = row, job, renderer
        self._sampling = job.params()
        self._kwargs = job.prompt.chat_template_kwargs

    async def __call__(
        self,
        prompt: Prompt,
        *,
        step: str = "",
        engine: str = "",
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: Any = None,
        **sampling: Any,
    ) -> Completion:
        """One generation for ``prompt``: chat messages in OpenAI's shape, which may have images, or
        a text, which is the user's message.

        ``sampling``: parameters by the names of ``vllm.SamplingParams``, over those of the job's
        ``[sampling]``. ``step`` names this generation in ``steps.jsonl`` and in tables.

        Raises:
            RowError: this generation failed. A function that does not catch it fails the row with it.
        """
        messages = _messages(prompt)
        if any(isinstance(message.get("content"), list) for message in messages):
            opened = await self._row.in_thread(lambda: self._renderer.messages(messages))
        else:
            opened = self._renderer.messages(messages)
        request = Request(
            self._row.row,
            opened,
            None,
            {**self._sampling, **sampling},
            input_hash="",
            tools=tools,
            tool_choice=tool_choice,
            chat_template_kwargs={},
        )
        completion = await self._row.ask(request, step, engine)
        if completion.error is not None:
            raise completion.error
        return completion

    async def many(self, prompts: Sequence[Prompt], **arguments: Any) -> list[Completion]:
        """The completions of all ``prompts``, in their order; ``arguments`` as for one.

        Raises:
            RowError: one of them failed; the others are cancelled.
        """
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self(prompt, **arguments)) for prompt in prompts]
        return [task.result() for task in tasks]


def _messages(prompt: Any) -> list[Mapping[str, Any]]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, list) and all(isinstance(part, Mapping) for part in prompt):
        return prompt
    raise RequestError(f"generate: found {short(prompt)}, expected a text or a list of messages")
