"""The first rows, rendered before the model is loaded: a mistake in the job shows within seconds."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from batchkit.config.tables import JobConfig
from batchkit.errors import JobError, MediaError, RowError, WrongTaskError
from batchkit.rendering.steps import Renderer
from batchkit.types import Completion, Request, Row


class Checked(NamedTuple):
    """The ``rows``, and those that were ``rendered`` by index: a row is rendered once."""

    rows: Iterator[Row]
    rendered: dict[int, Request | Completion]


def checked(rows: Iterator[Row], job: JobConfig, renderer: Renderer) -> Checked:
    """All ``rows``, if one of the first ``run.check_rows`` can be rendered, or fails as no other does.

    Usually the first one can, and no other is read yet. Workers on Ray may see media that this
    process can't, so a failure by them means nothing then.

    Raises:
        JobError: they all fail alike.
    """
    if job.rollout is not None:  # what it asks is known once it runs
        return Checked(rows, {})
    taken: list[Row] = []
    all_rendered: dict[int, Request | Completion] = {}
    error: RowError | None = None
    while len(taken) < job.run.check_rows and (row := next(rows, None)) is not None:
        taken.append(row)
        rendered = all_rendered[row.index] = renderer.render_or_fail(row)
        found = rendered.error if isinstance(rendered, Completion) else None
        if found is None or (error is not None and _reason(found) != _reason(error)):
            break
        error = error or found
    else:
        is_elsewhere = job.run.workers is not None and isinstance(error, MediaError)
        is_enough = len(taken) == job.run.check_rows or isinstance(error, WrongTaskError)
        if error is not None and taken and is_enough and not is_elsewhere:
            raise JobError(
                f"row {taken[0].index} (id {taken[0].id}): {error.kind}: {error}\nAll of the first"
                f" {len(taken)} rows fail like this, so the model was not loaded. Correct the job or"
                " its input and run the same command again; if other rows are good, --set"
                " run.check_rows=0 runs them"
            )
    return Checked(chain(taken, rows), all_rendered)


def _reason(error: RowError) -> tuple[str, str]:
    """Equal for errors that differ only in the file or the line that they begin with."""
    message = str(error)
    return error.kind, message.partition(": ")[2] or message
