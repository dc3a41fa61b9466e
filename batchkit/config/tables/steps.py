"""The tables ``[[steps]]``, ``[rollout]`` and ``[select]``: several generations per row."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import (
    Field,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from batchkit.config.seams import ScorerName
from batchkit.config.tables.base import Free, Identity, Table
from batchkit.config.tables.engine import SamplingTable
from batchkit.config.tables.prompt import PromptTable
from batchkit.config.tables.scoring import Reading, ScoringTable

# Fixed values that switch a step off or on.
_CONSTANTS = ("", "0", "1", "no", "yes", "none", "false", "true")


class StepTable(Reading):
    """One generation of a row. Steps run in the order of the file. The last step that runs and has `answer = true`
    gives the row's answer.

    A step's templates can use the row's fields and the results of earlier steps: `steps.NAME.text`, `.reasoning`,
    `.tool_calls`, `.finish_reason`, `.json` (the text parsed as JSON), `.prediction`, `.scores`, `.choices` (the texts
    of all `n` answers), `.selected` and `.votes` (with `[select]`: the index of the selected answer, from 0, and the
    number of votes for each prediction) and `.skipped`.
    """

    name: Identity[str] = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Name of the step in templates, in `steps.jsonl` and in result tables."""
    prompt: PromptTable = Field(PromptTable())
    """The step's prompt, with the keys of `[prompt]`."""
    sampling: SamplingTable = Field(SamplingTable())
    """The step's sampling parameters. Keys not set here come from `[sampling]`."""
    engine: Identity[str] = ""
    """Name of the engine in `[engines]` that runs this step. By default `[engine]` runs it."""
    when: Identity[str | None] = None
    """Template that decides whether the step runs. The step is skipped if the result is empty, `false`, `no`, `none`
    or `0`."""
    answer: Identity[bool] = True
    """Whether this step may give the row's answer. Use `false` for a step that only plans or judges."""
    parse: Identity[Literal["json"] | None] = None
    """Same as `output.parse`, for this step."""

    @property
    def scoring(self) -> ScoringTable:
        """The scoring settings that apply to this step's answers."""
        return ScoringTable().model_copy(update=self.reading)

    @property
    def has_scoring(self) -> bool:
        """True if the step sets any scoring key itself."""
        return bool(self.reading)

    @model_validator(mode="after")
    def _computes_when(self) -> StepTable:
        when = self.when or ""
        if "{" not in when and when.strip().lower() not in _CONSTANTS:
            raise ValueError(
                f"when: {when!r} is the same text for all rows; write {{{{ {when} }}}} to compute it for each row (for"
                " numbers from a CSV file, add | int after the column's name)"
            )
        return self

    @model_serializer(mode="wrap")
    def _without_sampling_of_job(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Serialize the step without the sampling keys that it does not set, because written defaults would override
        ``[sampling]`` when the file is read again."""
        given = self.sampling.model_dump(exclude_unset=True)
        found = {name: value for name, value in dump(self).items() if name != "sampling"}
        return {**found, "sampling": given} if given else found


class RolloutTable(Table):
    """A Python function that replaces `[prompt]` and `[[steps]]`: `async def solve(row, generate)`. batchkit calls it
    once per row; it returns the answer as text or a dict (docs/steps.md). The code runs without a sandbox."""

    function: Identity[str] = Field(pattern=r"^.+:[A-Za-z_][A-Za-z0-9_]*$")
    """The function, as `module:name` or `path/to/file.py:name`. Modules beside the job file are found, too."""
    concurrency: Free[PositiveInt] = 4096
    """Maximum number of rows in progress at a time, including rows that wait for something other than the model."""


class SelectTable(Table):
    """How one of the `n` answers of `sampling.n` is selected, for the row and for each step. A step's own `extract`
    and `scorers` are used if it has any, otherwise those of `[scoring]`. Truncated answers are never selected."""

    by: Identity[Literal["majority", "scorer", "step"] | None] = None
    """Selection method. `majority`: the first answer with the most frequent prediction (`scoring.extract`);
    predictions are equal if they are the same one of `scoring.choices`, the same number or the same words. `scorer`:
    the first answer with the highest score. `step`: the answer whose number, from 1, the step `select.step` returns;
    its templates see the texts as `candidates`, and its `extract` is `number` by default."""
    scorer: Identity[ScorerName | None] = None
    """For `scorer`: name of a scorer in `scoring.scorers`. This key may be left out if there is only one scorer."""
    step: Identity[str | None] = None
    """For `step`: name of the step that selects; it must be the last of `[[steps]]`."""
