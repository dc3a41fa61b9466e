"""``[[steps]]``, ``[rollout]`` and ``[select]``: several generations for a row."""

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

_CONSTANTS = ("", "0", "1", "no", "yes", "none", "false", "true")  # which turn a step off and on


class StepTable(Reading):
    """One generation of a row, in the order of the file; the last one that runs gives the row's answer.

    Its templates see the row's fields, and what the steps before it answered: `steps.NAME.text`,
    `.reasoning`, `.tool_calls`, `.json` (the text's JSON value), `.prediction` and `.scores`, `.choices`
    (the texts of all `n`), `.selected` (with `[select]`: the number of the one that counts, from 0) and `.skipped`.
    """

    name: Identity[str] = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Its name in templates, in `steps.jsonl` and in tables."""
    prompt: PromptTable = Field(PromptTable())
    """As `[prompt]`."""
    sampling: SamplingTable = Field(SamplingTable())
    """As `[sampling]`, which gives what is not set here."""
    engine: Identity[str] = ""
    """The name of one of `[engines]`; by default `[engine]`."""
    when: Identity[str | None] = None
    """A template; the step is skipped if it gives nothing, `false`, `no`, `none` or `0`."""
    answer: Identity[bool] = True
    """`false` for a step that plans or judges: the row's answer is that of the last other step."""
    parse: Identity[Literal["json"] | None] = None
    """As `output.parse`."""

    @property
    def scoring(self) -> ScoringTable:
        """What is read from its answers."""
        given = {name: getattr(self, name) for name in Reading.model_fields}
        return ScoringTable(**{name: value for name, value in given.items() if value is not None})

    @property
    def has_scoring(self) -> bool:
        """True if its answers are read in a way of their own."""
        return any(getattr(self, name) is not None for name in Reading.model_fields)

    @model_validator(mode="after")
    def _coherent(self) -> StepTable:
        _ = self.scoring  # raises what does not fit
        when = self.when or ""
        if "{" not in when and when.strip().lower() not in _CONSTANTS:
            raise ValueError(
                f"when: {when!r} is the same text for all rows; write {{{{ {when} }}}}, with | int behind a CSV's number"
            )
        return self

    @model_serializer(mode="wrap")
    def _without_sampling_of_job(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A default written down would replace what ``[sampling]`` says."""
        given = self.sampling.model_dump(exclude_unset=True)
        found = {name: value for name, value in dump(self).items() if name != "sampling"}
        return {**found, "sampling": given} if given else found


class RolloutTable(Table):
    """A function instead of `[prompt]` and `[[steps]]`: `async def solve(row, generate)`, which is
    called for each row and returns its answer, a text or a dict (docs/steps.md). Its code is trusted."""

    function: Identity[str] = Field(pattern=r"^.+:[A-Za-z_][A-Za-z0-9_]*$")
    """`module:name`, or `path/to/file.py:name`; a module is looked for beside the job file, too."""
    concurrency: Free[PositiveInt] = 4096
    """Rows that are begun at a time, those that wait for something else included."""


class SelectTable(Table):
    """Which of the `n` answers of `sampling.n` counts: of the row's, and of those of each step, which its own
    `extract` and `scorers` read if it has any, else those of `[scoring]`. Only whole answers are chosen."""

    by: Identity[Literal["majority", "scorer", "step"] | None] = None
    """`majority`: the first of those whose prediction (`scoring.extract`) most of them have: the
    same one of `scoring.choices`, number or words; `scorer`: the first with the highest score;
    `step`: the one whose number, from 1, the step `select.step` answers; its templates see
    `candidates`, the texts, and its `extract` is `number` by default."""
    scorer: Identity[ScorerName | None] = None
    """For `scorer`: one of `scoring.scorers`; by default the only one."""
    step: Identity[str | None] = None
    """For `step`: the last of `[[steps]]`."""
