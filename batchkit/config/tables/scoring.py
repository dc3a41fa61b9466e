"""``[scoring]``, its judge and its rules."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from batchkit.config.seams import Extract, ScorerName
from batchkit.config.tables.base import Identity, Table
from batchkit.config.tables.engine import EngineTable, SamplingTable
from batchkit.config.tables.prompt import PromptTable
from batchkit.config.terminal import shortened
from batchkit.config.values import reason_of


class JudgeTable(Table):
    """Who scores the answers, for the scorer `judge`: a second model, which is asked when all rows are
    answered, or one of `[[steps]]`.

    Its templates see the row's fields, and `prediction`, `reference` and `text` besides.
    """

    step: str | None = None
    """Instead of `engine`: one of `[[steps]]`, with `answer = false`, whose answers are the
    scores."""
    engine: EngineTable | None = None
    sampling: SamplingTable = SamplingTable()
    prompt: PromptTable = PromptTable()
    max_score: PositiveFloat = 100.0
    """The best score that it can give."""

    @model_validator(mode="after")
    def _coherent(self) -> JudgeTable:
        if (self.step is None) == (self.engine is None):
            raise ValueError("needs one of engine, a model of its own, and step, one of [[steps]]")
        if self.step is not None:
            for name, value in (("sampling", SamplingTable()), ("prompt", PromptTable())):
                if getattr(self, name) != value:
                    raise ValueError(f"{name} is that of steps.{self.step}; leave it out here")
        return self


class Reading(Table):
    """What may be read from answers otherwise than `[scoring]` says."""

    extract: Identity[Extract | None] = None
    """As `scoring.extract`."""
    pattern: Identity[str | None] = None
    """As `scoring.pattern`."""
    key: Identity[str | None] = None
    """As `scoring.key`."""
    choices: Identity[list[str] | None] = None
    """As `scoring.choices`."""
    reference: Identity[str | None] = None
    """As `scoring.reference`."""
    scorers: Identity[list[ScorerName] | None] = None
    """As `scoring.scorers`."""
    tolerance: Identity[NonNegativeFloat | None] = None
    """As `scoring.tolerance`."""


class ScoringRule(Reading):
    """Rows that are scored differently: keys set here replace those of `[scoring]`."""

    where: dict[str, Any] = Field({})
    """Which rows: as `input.where`. The first rule that matches a row applies."""


class ScoringTable(Table):
    """How answers are scored: as rows finish, and again by `batchkit score`."""

    extract: Extract = "text"
    """What the prediction is: the whole `text` (of a JSON object its `answer`), the first group of a `regex`, a `json` value, the
    last `number`, what follows `[Final Answer]:`, the last block of `code`, or a `reward` from 0 to
    10."""
    pattern: str | None = None
    """For `regex`: the last match counts, its first group if it has one."""
    key: str | None = None
    """For `json`: the key (dotted) of the value."""
    choices: list[str] = Field([])
    """For `choice`: the answers to choose from."""
    reference: str | None = None
    """The field that holds the right answer."""
    reference_run: str | None = None
    """A run whose predictions, by id, are the right answers instead."""
    scorers: list[ScorerName] = Field([])
    """What is computed of prediction and reference; docs/scoring.md."""
    group_by: str | None = None
    """The field whose values group the table of scores."""
    mode: Literal["official", "fixed"] = "fixed"
    """`official` equals RealHiTBench's own code to the digit, its quirks included; `fixed` corrects them:
    docs/scoring.md lists them."""
    tolerance: NonNegativeFloat = 0.01
    """For `numeric`: how far off, as a share of the reference."""
    normalizer: Literal["english", "basic"] | None = None
    """For `wer` and `cer`: which of Whisper's text normalisers both texts go through. By default `english` if
    `speech.language` is `en`, else `basic`."""
    default_reward: float | None = None
    """The score of an answer without a number; by default it is unscored."""
    allow_code: bool = False
    """For `chart`: run the code that the model wrote, in a sandbox."""
    table: str | None = None
    """For `chart`: template of the path, under `media.root`, of the row's table. It is opened after
    the check, so no other user may have write access below `media.root`."""
    chart_type: str = "{{ SubQType }}"
    """For `chart`: template; its first word is LineChart, BarChart, ScatterChart or PieChart."""
    judge: JudgeTable | None = None
    """For `judge`: the model that judges."""
    rules: list[ScoringRule] = Field([])
    """Rows that are scored differently."""

    @property
    def parts(self) -> list[ScoringTable | ScoringRule]:
        """The table itself, then its rules in the order of the file."""
        return [self, *self.rules]

    @property
    def is_on(self) -> bool:
        """True if anything has to be extracted from the answers."""
        return bool(self.scorers or self.rules) or self.extract != "text"

    @model_validator(mode="after")
    def _coherent(self) -> ScoringTable:
        parts = self.parts
        used = {name for part in parts for name in part.scorers or ()}
        laid = [(part.extract or self.extract, part.pattern or self.pattern) for part in parts]
        if any(extract == "regex" and pattern is None for extract, pattern in laid):
            raise ValueError('extract = "regex" needs a pattern, here or in each rule that has it')
        for place, part in enumerate(parts):
            if part.pattern is not None:
                key = f"rules.{place - 1}.pattern" if place else "pattern"
                _check_pattern(key, part.pattern)
        if "choice" in used and not any(part.choices for part in parts):
            raise ValueError("the scorer choice needs choices")
        return self


def _check_pattern(key: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, MemoryError, OverflowError, ValueError) as error:
        shown = repr(shortened(pattern))
        raise ValueError(f"{key} {shown} is no regular expression: {reason_of(error)}") from None
