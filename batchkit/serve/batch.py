"""The batch object of OpenAI's API, and the states that it passes through."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, Field, StringConstraints, field_validator

from batchkit.config.tables import TaskName
from batchkit.errors import RowError
from batchkit.rendering.body import endpoint_of
from batchkit.serve.clock import wall_s
from batchkit.serve.problem import ApiProblem
from batchkit.serve.settings import Settings
from batchkit.serve.store import Object, Store

Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")
_NEXT: Mapping[str, tuple[Status, ...]] = {
    "validating": ("in_progress", "failed", "finalizing", "cancelling"),
    "in_progress": ("finalizing", "cancelling", "failed"),
    "finalizing": ("completed", "expired", "failed"),
    "cancelling": ("cancelled", "failed"),
}
_TIMES = (
    *("in_progress_at", "expires_at", "finalizing_at", "completed_at", "failed_at"),
    *("expired_at", "cancelling_at", "cancelled_at"),
)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_Short = Annotated[str, StringConstraints(max_length=64)]
_Long = Annotated[str, StringConstraints(max_length=512)]


class OutputExpiresAfter(BaseModel):
    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=2_592_000)


class NewBatch(BaseModel):
    """The body of ``POST /v1/batches``. ``priority`` is batchkit's addition: batches with a higher number run first."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Annotated[dict[_Short, _Long], Field(max_length=16)] | None = None
    output_expires_after: OutputExpiresAfter | None = None
    priority: int = Field(0, ge=-1000, le=1000)

    @field_validator("completion_window")
    @classmethod
    def _is_a_time(cls, text: str) -> str:
        if not seconds_of(text):
            raise ValueError(
                f"found {text!r}, expected a number followed by s, m, h or d, for example 24h"
            )
        return text


def seconds_of(window: str) -> int:
    """Return the seconds of a completion window such as ``24h``, or 0 if the text is not a valid duration."""
    found = re.fullmatch(r"([1-9][0-9]{0,5})([smhd])", window)
    return int(found[1]) * _SECONDS[found[2]] if found else 0


def check_endpoint(endpoint: str, *tasks: TaskName) -> None:
    """Raise ApiProblem if none of the ``tasks`` (those of the server's models) supports this endpoint."""
    text = f"found {endpoint!r}, expected /v1/…"
    for task in tasks if endpoint.startswith("/v1/") else ():
        try:
            endpoint_of(endpoint, task)
            return
        except RowError as error:
            text = str(error).removeprefix("url: ")
    raise ApiProblem(400, f"endpoint: {text}", param="endpoint", code="invalid_endpoint")


def added_batch(
    asked: NewBatch, owner: str, settings: Settings, store: Store, **more: Any
) -> Object:
    """Store a new batch in state ``validating`` for the key named ``owner``, and return it.

    ``more``: further fields of the batch.

    Raises:
        ApiProblem: No model supports the endpoint, or the key has reached its limit of open batches.
    """
    check_endpoint(asked.endpoint, *(model.job.task for model in settings.models.values()))
    batch = _made(asked, wall_s()) | more
    most = settings.limits_of(owner).batches
    with store.lock:
        if (n_open := len(store.all("batch", *UNFINISHED, owner=owner))) >= most:
            text = (
                f"{n_open} of your batches have not ended, and your key allows {most} open batches; wait until one"
                " ends, or cancel one"
            )
            raise ApiProblem(429, text, code="batch_limit_exceeded")
        store.add("batch", owner, batch)
    return batch


def _made(asked: NewBatch, now: int) -> Object:
    return {
        "id": f"batch_{secrets.token_hex(16)}",
        "object": "batch",
        "endpoint": asked.endpoint,
        "model": None,
        "errors": None,
        "input_file_id": asked.input_file_id,
        "completion_window": asked.completion_window,
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now,
        **dict.fromkeys(_TIMES),
        "expires_at": now + seconds_of(asked.completion_window),
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "usage": None,
        "metadata": asked.metadata,
        "output_expires_after": asked.output_expires_after
        and asked.output_expires_after.model_dump(),
        "priority": asked.priority,
        "gpu_seconds": 0.0,
        "price": None,
    }


def moved(batch: Object, status: Status, now: float, **more: Any) -> Object | None:
    """Return a copy of the batch that has the state ``status`` since ``now``; None if its current state does not allow
    the change.

    ``more``: further fields to change.
    """
    if status not in _NEXT.get(batch["status"], ()):
        return None
    return {**batch, "status": status, f"{status}_at": int(now), **more}


def errors_of(*problems: Object) -> Object:
    return {"object": "list", "data": list(problems)}


def problem(code: str, message: str, *, param: str | None = None) -> Object:
    return {"code": code, "message": message, "line": None, "param": param}


class Outputs(NamedTuple):
    """The ids of a batch's output file and error file.

    They are derived from the batch id, so writing the files again replaces them.
    """

    answers: str
    errors: str


def outputs_of(batch: Object) -> Outputs:
    part = batch["id"].removeprefix("batch_")
    return Outputs(f"file-{part}-output", f"file-{part}-errors")


def rows_left(batch: Object) -> int:
    """Return the number of rows that had no record when the batch's run last stopped."""
    counts = batch["request_counts"]
    return int(counts["total"] - counts["completed"] - counts["failed"])
