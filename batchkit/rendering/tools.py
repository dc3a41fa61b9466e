"""The tools of a request, and a row's variables for its chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from batchkit.config.tables import JobConfig
from batchkit.config.tool_definitions import check_tools, choice_of, is_template, tools_in
from batchkit.errors import JobError, RequestError
from batchkit.rendering.templates import RowTemplate
from batchkit.sources.reader import shown
from batchkit.types import Request

# Arguments of the function that applies a chat template, so they are not variables of the template.
_OF_THE_JOB = ("chat_template", "tokenize")
_MAY_BE_NULL = ("const", "default")  # keys of a JSON schema in which null is a value


class RequestTools(NamedTuple):
    """The fields of a Request that are about tools."""

    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None


class JobTools:
    """The job's ``prompt.tools`` and ``prompt.tool_choice``. Several threads may share it.

    Raises:
        JobError: the file of ``prompt.tools`` can't be read, or the definitions or ``prompt.tool_choice`` are invalid.
    """

    def __init__(self, job: JobConfig) -> None:
        tools, self._choice = job.prompt.tools, job.prompt.tool_choice
        self._of_all = RequestTools()
        # The template for the row's own definitions; None if all rows have the same definitions, or no tools.
        self.template: RowTemplate | None = None
        if is_template(tools):
            self.template = RowTemplate(job, "prompt.tools", tools, keeps_type=True)
        elif tools is not None:
            tools = tools_in(tools) if isinstance(tools, str) else tools
            choice = _chosen(self._choice, tools, JobError, "prompt.tool_choice")
            self._of_all = RequestTools(tools, choice)
        self.inline = tools
        """The value of ``prompt.tools``: the definitions (read from the file if it names one), a template, or None."""

    def of_row(self, fields: Mapping[str, Any]) -> RequestTools:
        """Return the tools for a row.

        Raises:
            RowError: the row's definitions are invalid, or the model must call a tool and the row has none.
        """
        if self.template is None:
            return self._of_all
        found = _without_nulls(self.template.value(fields))
        return checked_tools(found, self._choice, "prompt.tools", "prompt.tool_choice")


def ignored_tools(request: Request, prompt: str | None) -> str:
    """Return a warning if the ``prompt``, made by the model's chat template, lacks the request's tools; otherwise
    ""."""
    names = [tool["function"]["name"] for tool in request.tools or ()]
    if prompt is None or not names or request.tool_choice == "none":
        return ""
    if any(name in prompt for name in names):
        return ""
    return (
        f"tools: the model's chat template ignores them, so the model does not see {', '.join(names)}; use a model that"
        " was trained for tools, or set engine.options.chat_template"
    )


def tools_of_body(body: Mapping[str, Any], of_job: Callable[[], RequestTools]) -> RequestTools:
    """Return the tools in the body of an OpenAI batch line, with the body's ``tool_choice``. ``of_job`` returns the
    job's tools, which are used if the body has none.

    Raises:
        RequestError: the definitions or the choice are invalid.
    """
    at_once = body.get("parallel_tool_calls")
    if not isinstance(at_once, bool | None):
        raise RequestError(
            f"body.parallel_tool_calls: found {shown(at_once)}, expected true or false"
        )
    tools, choice = _without_nulls(body.get("tools")), body.get("tool_choice")
    if not tools:
        tools, own_choice, _ = of_job()
        choice = own_choice if choice is None else choice
    found = checked_tools(tools, choice, "body.tools", "body.tool_choice")
    return found._replace(parallel_tool_calls=at_once) if found.tools else found


def template_kwargs_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables for the chat template from a body: ``chat_template_kwargs``, ``reasoning_effort`` and, for
    pairs, ``instruction``.

    Raises:
        RequestError: ``chat_template_kwargs`` is not a table, or has a name that only the job may set.
    """
    found = body.get("chat_template_kwargs") or {}
    if not isinstance(found, Mapping):
        raise RequestError(f"body.chat_template_kwargs: found {shown(found)}, expected a table")
    for name in _OF_THE_JOB:
        if name in found:
            raise RequestError(f"body.chat_template_kwargs.{name}: no row may set it; leave it out")
    if (instruction := body.get("instruction")) is not None:  # of /v1/score and /v1/rerank
        found = {"instruction": instruction, **found}
    if (effort := body.get("reasoning_effort")) is None:
        return dict(found)
    if not isinstance(effort, str):
        raise RequestError(f"body.reasoning_effort: found {shown(effort)}, expected text")
    return {**found, "reasoning_effort": effort}


def checked_tools(tools: Any, choice: Any, key: str, choice_key: str) -> RequestTools:
    """Check ``tools`` and ``choice`` of one row, and return them. ``key`` and ``choice_key``: the names of the two in
    errors.

    Raises:
        RequestError: the definitions or the choice are invalid.
    """
    if isinstance(tools, str):
        try:
            tools = orjson.loads(tools) if tools.strip() else None
        except orjson.JSONDecodeError as error:
            raise RequestError(f"{key}: found {shown(tools)}, expected JSON: {error}") from error
    if tools is None or tools == []:
        if _chosen(choice, None, RequestError, choice_key) in (None, "none", "auto"):
            return RequestTools()
        raise RequestError(
            f"{choice_key}: is {shown(choice)}, but the row has no tools; add tools to the row, or leave the choice out"
        )
    try:
        check_tools(tools)
    except ValueError as error:
        raise RequestError(f"{key}: {error}") from None
    return RequestTools(tools, _chosen(choice, tools, RequestError, choice_key))


def _without_nulls(definitions: Any) -> Any:
    """Return ``definitions`` without keys that are null, except where null is a valid value. In Parquet, each tool has
    the keys of all tools, so the keys that a tool lacks are null."""
    if isinstance(definitions, list):
        return [_without_nulls(one) for one in definitions]
    if not isinstance(definitions, Mapping):
        return definitions
    return {
        key: value if key in _MAY_BE_NULL else _without_nulls(value)
        for key, value in definitions.items()
        if value is not None or key in _MAY_BE_NULL
    }


def _chosen(choice: Any, tools: Any, error: type[JobError | RequestError], key: str) -> Any:
    try:
        return choice_of(choice, tools)
    except ValueError as problem:
        raise error(f"{key}: {problem}") from None
