"""Validation of a batch's input file before its run begins. Like OpenAI, the server rejects the file if any line is
wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from batchkit.errors import RequestError
from batchkit.serve.batch import check_endpoint, problem
from batchkit.serve.problem import ApiProblem
from batchkit.serve.settings import ServedModel
from batchkit.serve.store import Object
from batchkit.sources.lines import parse_object

_MOST_ERRORS = 100
_ARRAY = (
    "The file is a JSON array. Expected JSONL: a request on each line, without brackets around them and"
    " commas between them."
)


class CheckedBatch(NamedTuple):
    """The result of checking an input file.

    - ``rows``: number of requests in the file.
    - ``problems``: at most 100 problems, with line numbers.
    - ``model``: the model that all lines name.
    """

    rows: int
    problems: list[Object]
    model: str = ""


def check_file(
    path: Path, endpoint: str, models: Mapping[str, ServedModel], most_rows: float
) -> CheckedBatch:
    """Check an input file: every line is a request for ``endpoint`` with a unique id, and all lines name the same
    model.

    The file is read once. ``most_rows``: the limit of the user's API key.
    """
    rows, seen, problems, asked = 0, set[int](), list[Object](), list[ServedModel]()
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.isspace():
                continue
            rows += 1
            if rows == 1 and line.lstrip().startswith(b"["):
                return CheckedBatch(
                    rows, [{**problem("invalid_json_line", _ARRAY), "line": number}]
                )
            if rows > most_rows:
                text = f"The file has more than {most_rows:,} requests, which is the limit of your key."
                return CheckedBatch(rows, [problem("row_limit_exceeded", text)])
            found = islice(
                _problems_in(line, number, endpoint, models, seen, asked),
                _MOST_ERRORS - len(problems),
            )
            problems += ({**one, "line": number} for one in found)
            if len(problems) >= _MOST_ERRORS:
                break
    if not rows:
        problems.append(problem("empty_file", "The file has no requests."))
    return CheckedBatch(rows, problems, asked[0].name if asked else "")


def _problems_in(
    line: bytes,
    number: int,
    endpoint: str,
    models: Mapping[str, ServedModel],
    seen: set[int],
    asked: list[ServedModel],
) -> Iterator[Object]:
    try:
        request = parse_object(line, "", number)
    except Exception as error:  # InputError means that the whole file is one JSON value
        request = RequestError(str(error))
    if isinstance(request, RequestError):
        yield problem("invalid_json_line", f"This is not a JSON object:{request}")
        return
    yield from _problems_in_id(request.get("custom_id"), seen)
    if request.get("method") != "POST":
        yield problem(
            "invalid_method",
            f"method: found {request.get('method')!r}, expected 'POST'",
            param="method",
        )
    if request.get("url") != endpoint:
        text = f"url: found {request.get('url')!r}, but the batch's endpoint is {endpoint}"
        yield problem("mismatched_endpoint", text, param="url")
    yield from _problems_in_body(request.get("body"), endpoint, models, asked)


def _problems_in_id(custom_id: Any, seen: set[int]) -> Iterator[Object]:
    if not isinstance(custom_id, str) or not custom_id:
        text = "custom_id is missing or not a text: write a text that is not empty"
        yield problem("missing_required_parameter", text, param="custom_id")
        return
    # 64-bit hash with a secret seed: for a million ids it takes 70 MB less than the strings.
    key = hash(custom_id)
    if key in seen:
        text = f"custom_id {custom_id!r} is used by another line; ids must be unique"
        yield problem("duplicate_custom_id", text, param="custom_id")
    seen.add(key)


def _problems_in_body(
    body: Any, endpoint: str, models: Mapping[str, ServedModel], asked: list[ServedModel]
) -> Iterator[Object]:
    """Yield the problems of a request's body.

    ``asked``: a list for the model of the first valid line. This function adds the model; later lines must name the
    same one.
    """
    if not isinstance(body, dict):
        yield problem(
            "missing_required_parameter",
            "body is missing or not a JSON object: write a JSON object",
            param="body",
        )
        return
    name = body.get("model")
    if not isinstance(name, str) or (model := models.get(name)) is None:
        text = f"body.model: found {name!r}; this server has {', '.join(models)}"
        yield problem("model_not_found", text, param="body.model")
    elif not asked:
        asked.append(model)
        try:
            check_endpoint(endpoint, model.job.task)
        except ApiProblem as error:
            yield problem("mismatched_endpoint", error.message, param="url")
    elif model is not asked[0]:
        text = f"body.model: found {name}, but earlier lines use {asked[0].name}; a batch can use only one model"
        yield problem("mismatched_model", text, param="body.model")
    if body.get("stream"):
        yield problem(
            "invalid_value",
            "body.stream: batches don't support streaming; remove it",
            param="body.stream",
        )
