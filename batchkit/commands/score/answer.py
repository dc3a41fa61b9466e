"""What is scored: an answer with its row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from batchkit.scoring import Scored

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer, the fields of its row, and the scores that could be computed at once; ``steps``: what
    each of the row's ``[[steps]]`` answered, as in its record."""

    index: int
    id: str
    fields: Mapping[str, Any]
    text: str
    known: Scored
    steps: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
