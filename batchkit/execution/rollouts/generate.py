"""What the function of ``[rollout]`` gets to ask a model with."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from msgspec.structs import replace

from batchkit.errors import RequestError
from batchkit.execution.rollouts.open_row import OpenRow
from batchkit.execution.start import Start
from batchkit.rendering.messages import short
from batchkit.rendering.renderer import with_media_bytes
from batchkit.rendering.tools import checked_tools
from batchkit.types import Completion, Request

Prompt = str | Sequence[Mapping[str, Any]]
_STEP = re.compile(r"\w*", re.ASCII)
_SCALARS = (type(None), bool, int, float, str)


class Generate:
    """``await generate(prompt)`` is one generation of the row; ``await generate.many(prompts)`` are
    several at a time.

    Nothing that was answered is asked again after a restart: the row gets its recorded answers.
    """

    def __init__(self, row: OpenRow, start: Start) -> None:
        self._row, self._start = row, start
        self._sampling = start.job.params()
        self._loop = asyncio.get_running_loop()

    async def __call__(
        self,
        prompt: Prompt,
        *,
        step: str = "",
        engine: str = "",
        chat: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: Any = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> Completion:
        """One generation for ``prompt``: chat messages in OpenAI's shape, which may have images, or
        a text, which is the user's message; without ``chat``, it is the whole prompt, and no chat
        template is applied.

        ``sampling``: parameters by the names of ``vllm.SamplingParams``, over those of the job's
        ``[sampling]``. ``step`` names this generation in ``steps.jsonl`` and in tables, ``engine`` is
        one of ``[engines]``. What was passed may be changed afterwards.

        Raises:
            RowError: this generation failed. A function that does not catch it fails the row with it.
        """
        self._check(step, engine)
        wanted = checked_tools(
            _own("tools", tools), _own("tool_choice", tool_choice), "tools", "tool_choice"
        )
        messages = _messages(prompt) if chat else None
        if messages is None and (wanted.tools or not isinstance(prompt, str)):
            raise RequestError("generate: chat=False is for a text without tools")
        request = Request(
            self._row.row,
            messages,
            str(prompt) if messages is None else None,
            self._sampling | {name: _own(name, value) for name, value in sampling.items()},
            input_hash="",
            tools=wanted.tools,
            tool_choice=wanted.tool_choice,
            chat_template_kwargs=_own("chat_template_kwargs", chat_template_kwargs) or {},
        )
        has_parts = any(isinstance(one.get("content"), list) for one in messages or ())
        completion = await self._row.ask(
            lambda: self._rendered(request), step, engine, takes_long=has_parts
        )
        assert completion is not None
        if completion.error is not None:
            raise completion.error
        # A recorded one has no prompt.
        return completion if completion.prompt is None else replace(completion, prompt=None)

    async def many(
        self, prompts: Sequence[Prompt], *, return_exceptions: bool = False, **arguments: Any
    ) -> list[Any]:
        """The completions of all ``prompts``, in their order; ``arguments`` as for one.

        With ``return_exceptions``, the error of one that failed is in its place.

        Raises:
            RowError: one of them failed; the others are cancelled.
        """
        tasks = [asyncio.ensure_future(self(prompt, **arguments)) for prompt in prompts]
        try:
            return await asyncio.gather(*tasks, return_exceptions=return_exceptions)
        finally:
            for task in tasks:
                task.cancel()

    def _check(self, step: str, engine: str) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise RequestError(
                "generate: was called on another event loop; await it on the one that runs the function"
            )
        engines = self._start.job.engines
        if engine and engine not in engines:
            known = ", ".join(engines) or "none is given"
            raise RequestError(
                f"generate: engine is {engine!r}, expected one of [engines]: {known}"
            )
        if not isinstance(step, str) or not _STEP.fullmatch(step):
            raise RequestError(
                f"generate: step is {short(step)}, expected a name of letters, digits and _"
            )

    def _rendered(self, request: Request) -> Request:
        """``request`` with its images opened."""
        if request.messages is None:
            return request
        messages = self._start.renderer.messages(request.messages)
        made = with_media_bytes(replace(request, messages=messages))
        return made if made.media_bytes else replace(made, messages=_own("messages", messages))


def _messages(prompt: Any) -> list[Mapping[str, Any]]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    is_list = isinstance(prompt, list | tuple)
    if is_list and prompt and all(isinstance(message, Mapping) for message in prompt):
        return [dict(message) for message in prompt]
    raise RequestError(f"generate: found {short(prompt)}, expected a text or a list of messages")


def _own(name: str, value: Any) -> Any:
    """A copy, in JSON's types, that the function can't change any more.

    Raises:
        RequestError: JSON has no such value.
    """
    if type(value) in _SCALARS:
        return value
    try:
        return orjson.loads(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY))
    except (TypeError, RecursionError) as error:
        raise RequestError(
            f"generate: {name} is {short(value)}, expected what JSON can hold: {error}"
        ) from None
