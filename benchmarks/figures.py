"""What a benchmark found beside what it shall hold (DESIGN 7): a part of its JSON line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


class Figure(NamedTuple):
    """``wanted`` is the least that ``found`` shall be, or the most; None where nothing is asked for."""

    what: str
    found: float
    unit: str = "×"
    wanted: float | None = None
    at_most: bool = False

    @property
    def verdict(self) -> str:
        if self.wanted is None:
            return ""
        holds = self.found <= self.wanted if self.at_most else self.found >= self.wanted
        return "holds" if holds else "MISSED"

    def to_json(self) -> dict[str, Any]:
        return self._asdict() | {"verdict": self.verdict or None}


def figures_of(line: Mapping[str, Any]) -> Iterator[Figure]:
    """Of a JSON line: its ``figures``, or else the ratios of the other sides among its ``results``."""
    for told in line.get("figures", ()):
        yield Figure(**{name: told[name] for name in Figure._fields})
    if "figures" in line:
        return
    for found in line.get("results", ()):
        other = found.get("side") or found.get("tool")
        if other not in (None, "batchkit"):
            what = f"{found['setting']}, against {other}"
            yield Figure(what, found["ratio"], wanted=found["wanted"])
