"""What a benchmark measured and its target: the ``figures`` of its JSON line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


class Figure(NamedTuple):
    """``wanted``: the least that ``found`` must be, with ``at_most`` the most; None: no target."""

    what: str
    found: float
    unit: str = "×"
    wanted: float | None = None
    at_most: bool = False

    @property
    def outcome(self) -> str:
        if self.wanted is None:
            return ""
        holds = self.found <= self.wanted if self.at_most else self.found >= self.wanted
        return "holds" if holds else "MISSED"

    def to_json(self) -> dict[str, Any]:
        return self._asdict() | {"verdict": self.outcome or None}


def figures_of(line: Mapping[str, Any]) -> Iterator[Figure]:
    """The ``figures`` of a JSON line; without them, the ratios of the other sides in ``results``."""
    for figure in line.get("figures", ()):
        yield Figure(**{name: figure[name] for name in Figure._fields})
    if "figures" in line:
        return
    for found in line.get("results", ()):
        other = found.get("side") or found.get("tool")
        if other not in (None, "batchkit"):
            what = f"{found['setting']}, against {other}"
            yield Figure(what, found["ratio"], wanted=found["wanted"])
