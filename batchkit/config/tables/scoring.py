"""The table ``[scoring]`` with its rules."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from batchkit.config.seams import Extract, ModeName, ScorerName
from batchkit.config.tables.base import Identity, Table
from batchkit.config.terminal import shortened
from batchkit.config.values import reason_of


class Reading(Table):
    """The scoring keys that a step or a rule may set for itself."""

    extract: Identity[Extract | None] = None
    """Same as `scoring.extract`."""
    pattern: Identity[str | None] = None
    """Same as `scoring.pattern`."""
    key: Identity[str | None] = None
    """Same as `scoring.key`."""
    choices: Identity[list[str] | None] = None
    """Same as `scoring.choices`."""
    reference: Identity[str | None] = None
    """Same as `scoring.reference`."""
    scorers: Identity[list[ScorerName] | None] = None
    """Same as `scoring.scorers`."""
    tolerance: Identity[NonNegativeFloat | None] = None
    """Same as `scoring.tolerance`."""
    max_score: Identity[PositiveFloat | None] = None
    """Same as `scoring.max_score`."""


class ScoringRule(Reading):
    """Different scoring for some rows. Keys set here replace the keys of `[scoring]`."""

    where: dict[str, Any] = Field({})
    """The rows that this rule applies to, written like `input.where`. The first matching rule applies."""


class ScoringTable(Table):
    """How answers are scored. Scores are computed as rows finish; `batchkit score` computes them again."""

    extract: Extract = "text"
    """How the prediction is read from an answer: `text` (the whole text; for a JSON object, its `answer`), `regex`
    (see `pattern`), `json` (the value at `key`), `number` (the last number), `final-answer` (the text after
    `[Final Answer]:`), `code` (the last code block), `reward` (a number from 0 to 10) or `score` (the number after
    `Score:`)."""
    pattern: str | None = None
    """For `regex`: the regular expression. The last match counts, or its first group if the pattern has groups."""
    key: str | None = None
    """For `json`: the dotted key of the value."""
    choices: list[str] = Field([])
    """For `choice`: the allowed answers."""
    reference: str | None = None
    """Name of the field with the correct answer."""
    reference_run: str | None = None
    """A run whose predictions are used as the correct answers, matched by row id."""
    scorers: list[ScorerName] = Field([])
    """The scores to compute from prediction and reference (docs/scoring.md)."""
    group_by: str | None = None
    """Field whose values group the rows of the score table."""
    mode: ModeName = "fixed"
    """How predictions are compared. `official` gives exactly the scores of a benchmark's own code, including its errors.
    `fixed` corrects these errors; docs/scoring.md lists them."""
    tolerance: NonNegativeFloat = 0.01
    """For `numeric`: largest accepted difference, as a fraction of the reference."""
    max_score: PositiveFloat = 100.0
    """For `judge`: the highest score that the judge can give."""
    normalizer: Literal["english", "basic"] | None = None
    """For `wer` and `cer`: the Whisper text normalizer applied to both texts. The default is `english` if
    `speech.language` is `en`, otherwise `basic`."""
    default_reward: float | None = None
    """Score of an answer without a number. By default such an answer stays unscored."""
    allow_code: bool = False
    """Allow scorers to run the code that the model wrote, in a sandbox."""
    table: str | None = None
    """For a scorer that reads the row's table: template of its path, under `media.root`. The file is opened after its path is
    checked, so no other user may have write access below `media.root`."""
    chart_type: str = "{{ SubQType }}"
    """For `chart`: template of the chart type. Its first word is LineChart, BarChart, ScatterChart or PieChart."""
    rules: list[ScoringRule] = Field([])
    """Rules that change the scoring for some rows."""

    @property
    def parts(self) -> list[ScoringTable | ScoringRule]:
        """The table itself, then its rules, in file order."""
        return [self, *self.rules]

    @property
    def is_on(self) -> bool:
        """True if the job reads a prediction from the answers or scores them."""
        return bool(self.scorers or self.rules) or self.extract != "text"

    @model_validator(mode="after")
    def _coherent(self) -> ScoringTable:
        parts = self.parts
        used = {name for part in parts for name in part.scorers or ()}
        laid = [(part.extract or self.extract, part.pattern or self.pattern) for part in parts]
        if any(extract == "regex" and pattern is None for extract, pattern in laid):
            raise ValueError('extract = "regex" needs a pattern, here or in each rule that uses it')
        for place, part in enumerate(parts):
            if part.pattern is not None:
                key = f"rules.{place - 1}.pattern" if place else "pattern"
                _check_pattern(key, part.pattern)
        if "choice" in used and not any(part.choices for part in parts):
            raise ValueError(
                'the scorer "choice" needs scoring.choices, the list of possible answers'
            )
        return self


def _check_pattern(key: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, MemoryError, OverflowError, ValueError) as error:
        shown = repr(shortened(pattern))
        raise ValueError(
            f"{key} {shown} is not a valid regular expression: {reason_of(error)}"
        ) from None
