"""What the page shows of a row's generations, one under the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, NamedTuple

from batchkit.config.terminal import cut_in_the_middle
from batchkit.storage.answers import call_in_words, choice_in_words
from batchkit.storage.generations import Generations

_MOST = 20  # generations of a row
_LEAST = 3
_FEW_CHARACTERS = 500


class StepsShown(NamedTuple):
    """How much the page has room for: ``most`` generations of a row, each of ``limit`` characters."""

    generations: Generations
    most: int
    limit: int

    @classmethod
    def of(cls, generations: Generations, characters: float) -> StepsShown:
        """``characters``: room for those of one row."""
        most = int(min(_MOST, max(_LEAST, characters / _FEW_CHARACTERS)))
        return cls(generations, most, int(characters / most))

    def read(self, record: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        """Of ``[[steps]]`` what the record has of each, else the row's generations; None for a row with
        one."""
        if (steps := record.get("steps")) is not None:
            found: Iterable[Mapping[str, Any]] = [{"step": name, **steps[name]} for name in steps]
        elif "generations" in record:
            found = self.generations.of(record["index"])
        else:
            return None
        shown = [*map(self._shown, islice(found, self.most))]
        if more := (record.get("generations") or 0) - len(shown) if steps is None else 0:
            shown.append({"more": more})
        return shown

    def _shown(self, step: Mapping[str, Any]) -> dict[str, Any]:
        usage, error = step.get("usage"), step.get("error") or {}
        found = {
            "name": call_in_words(step),
            "text": None if step.get("skipped") else self._cut(choice_in_words(step)),
            "reasoning": self._cut(step.get("reasoning")),
            "skipped": step.get("skipped"),
            "prediction": self._cut(step.get("prediction")),
            "scores": step.get("scores"),
            "error": self._cut(error.get("message")),
            "tokens": usage and [usage.get("prompt_tokens"), usage.get("completion_tokens")],
        }
        return {key: value for key, value in found.items() if value is not None}

    def _cut(self, text: str | None) -> str | None:
        if text is None:
            return None
        return cut_in_the_middle(text, self.limit).encode("utf-8", "replace").decode()
