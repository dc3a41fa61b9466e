"""What a mistyped name probably should have been."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

ELSEWHERE = {
    **dict.fromkeys(
        ("tokens", "max_token", "max_new_tokens", "max_length", "max_output_tokens",
         "max_completion_tokens"), "max_tokens",
    ),
    **dict.fromkeys(
        ("guided_choice", "guided_json", "guided_regex", "guided_grammar", "guided_decoding",
         "response_format", "json_schema"), "structured_outputs",
    ),
    "stop_sequences": "stop",
    "num_return_sequences": "n",
    "compare": "report",
    "resume": "run",
    "continue": "run",
    "xlsx": "csv",
    "excel": "csv",
}  # fmt: skip
"""What other tools call a thing, and what it is called here."""


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The name in ``known`` that another tool's ``name`` is here, or that is most like it; None if none is alike
    (``cutoff``: 1 is equal)."""
    known = [*known]
    if (here := ELSEWHERE.get(name)) in known:
        return here
    by_small = {one.lower(): one for one in known}
    near = difflib.get_close_matches(name.lower(), by_small, n=1, cutoff=cutoff)
    return by_small[near[0]] if near else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A suggestion to end a message about an unknown ``name`` with; empty if there is none."""
    near = nearest(name, known)
    return "" if near is None else f"; did you mean {near!r}?"
