"""How much work an answer may cause. Each bound is far above what any real answer needs."""

from __future__ import annotations

MOST_READ = 4_000_000  # characters of an answer that an extractor reads
MOST_COMPARED = 200_000  # characters of a prediction, and of a reference
MOST_MARKS = 1_000  # combining marks in a row: normalising them takes quadratic time
PATTERN_TIMEOUT_S = 2.0  # of CPU time, for ``scoring.pattern`` in one answer
PATTERN_STEPS = 100_000_000  # allowed where nothing can stop them: under a second
PATTERN_WAIT_S = 120.0  # until a process that gets no CPU time is given up
PATTERN_MEMORY = 2 << 30  # bytes of address space


class Unscorable(Exception):
    """Why an answer is not scored; the same words for all rows with the same cause."""


def check_length(what: str, text: str, most: int) -> None:
    """Raises Unscorable if ``text`` has more characters than ``most``."""
    if len(text) > most:
        raise Unscorable(f"the {what} has more than {most:,} characters")
