"""How much work an answer may cause. Each bound is far above what any real answer needs."""

from __future__ import annotations

MOST_READ = 4_000_000  # characters of an answer that an extractor reads
MOST_COMPARED = 200_000  # characters of a prediction, and of a reference
MOST_MARKS = 1_000  # combining marks in a row: normalising them takes quadratic time


class Unscorable(Exception):
    """Why an answer is not scored; the same words for all rows with the same cause."""


def check_length(what: str, text: str, most: int) -> None:
    """Raises Unscorable if ``text`` has more characters than ``most``."""
    if len(text) > most:
        raise Unscorable(f"the {what} has more than {most:,} characters")
