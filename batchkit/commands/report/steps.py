"""What the page shows of a row's generations, one under the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from batchkit.config.terminal import cut_in_the_middle
from batchkit.storage.answers import call_in_words, choice_in_words
from batchkit.storage.generations import Generations

_MOST = 20  # generations of a row
_LEAST = 3
_FEW_CHARACTERS = 500


class StepsShown(NamedTuple):
    """How much the page has room for: of each of ``[[steps]]`` its share of ``text_limit`` characters; of a
    function's generations ``characters`` of a row, for as many of them as that is enough for.
    """

    generations: Generations
    text_limit: int
    characters: float

    def read(self, record: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        """What the record has of each step, or else the row's first generations, and how many more there
        are; None for a row with one."""
        found = self.generations.of_record(record)
        if record.get("steps") is not None:
            room, most = float(self.text_limit), len(found)
        elif "generations" in record:
            room = self.characters
            most = int(min(_MOST, max(_LEAST, room / _FEW_CHARACTERS)))
        else:
            return None
        limit = int(min(self.text_limit, room / max(1, min(most, len(found)))))
        shown = [_shown(step, limit) for step in found[:most]]
        return shown + [{"more": len(found) - most}] * (len(found) > most)


def _shown(step: Mapping[str, Any], limit: int) -> dict[str, Any]:
    usage, error = step.get("usage"), step.get("error") or {}
    found = {
        "name": call_in_words(step),
        "text": None if step.get("skipped") else _cut(choice_in_words(step), limit),
        "reasoning": _cut(step.get("reasoning"), limit),
        "skipped": step.get("skipped"),
        "prediction": _cut(step.get("prediction"), limit),
        "scores": step.get("scores"),
        "error": _cut(error.get("message"), limit),
        "tokens": usage and [usage.get("prompt_tokens"), usage.get("completion_tokens")],
    }
    return {key: value for key, value in found.items() if value is not None}


def _cut(text: str | None, limit: int) -> str | None:
    if text is None:
        return None
    return cut_in_the_middle(text, limit).encode("utf-8", "replace").decode()
