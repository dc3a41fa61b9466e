"""The table ``[scoring]`` with its rules."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from batchkit.config.seams import ModeName
from batchkit.config.tables.base import Identity, Table
from batchkit.config.tables.parameters import Extract, Scorers


class Reading(Table):
    """The scoring keys that a step or a rule may set for itself."""

    extract: Identity[Extract | None] = None
    """Same as `scoring.extract`."""
    choices: Identity[list[str] | None] = None
    """Same as `scoring.choices`."""
    reference: Identity[str | None] = None
    """Same as `scoring.reference`."""
    scorers: Identity[Scorers | None] = None
    """Same as `scoring.scorers`."""

    @property
    def reading(self) -> dict[str, Any]:
        """The scoring keys that are set, with their values."""
        values = {name: getattr(self, name) for name in Reading.model_fields}
        return {name: value for name, value in values.items() if value is not None}


class ScoringRule(Reading):
    """Different scoring for some rows. Keys set here replace the keys of `[scoring]`."""

    where: dict[str, Any] = Field({})
    """The rows that this rule applies to, written like `input.where`. The first matching rule applies."""


class ScoringTable(Table):
    """How answers are scored. Scores are computed as rows finish; `batchkit score` computes them again."""

    extract: Extract = Field({"text": {}})
    """How the prediction is read from an answer: `text` (the whole text; for a JSON object, its `answer`), `regex`
    (a match of its `pattern`), `json` (the value at its `key`), `number` (the last number), `final-answer` (the text
    after `[Final Answer]:`), `code` (the last code block), `reward` (a number from 0 to 10) or `score` (the number
    after `Score:`). A table gives its parameters: `{ regex = { pattern = "Answer: (.*)" } }` (docs/scoring.md)."""
    choices: list[str] = Field([])
    """The allowed answers, for the scorer `choice`, the votes of `[select]` and the confusion table."""
    reference: str | None = None
    """Name of the field with the correct answer."""
    reference_run: str | None = None
    """A run whose predictions are used as the correct answers, matched by row id."""
    scorers: Scorers = Field({})
    """The scores to compute from prediction and reference. A table gives the parameters of a scorer:
    `["em", { numeric = { tolerance = 0.05 } }]` (docs/scoring.md)."""
    group_by: str | None = None
    """Field whose values group the rows of the score table."""
    mode: ModeName = "fixed"
    """How predictions are compared. `official` gives exactly the scores of a benchmark's own code, including its errors.
    `fixed` corrects these errors; docs/scoring.md lists them."""
    allow_code: bool = False
    """Allow scorers to run the code that the model wrote, in a sandbox."""
    rules: list[ScoringRule] = Field([])
    """Rules that change the scoring for some rows."""

    @property
    def tables(self) -> list[ScoringTable]:
        """The scoring settings for rows that no rule matches, then those for the rows of each rule."""
        return [self, *(self.model_copy(update=rule.reading) for rule in self.rules)]

    @property
    def extractor(self) -> str:
        """The name of the extractor."""
        return next(iter(self.extract))

    @property
    def is_on(self) -> bool:
        """True if the job reads a prediction from the answers or scores them."""
        return bool(self.scorers or self.rules) or self.extractor != "text"
