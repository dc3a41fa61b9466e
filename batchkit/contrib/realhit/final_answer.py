"""The extractor ``final-answer``: RealHiTBench's prompts ask for a line ``[Final Answer]: …``."""

from __future__ import annotations

from batchkit.scoring.extract import OrElse

_MARKERS = ("[Final Answer]:", "Final Answer:")
FAILED = "[ERROR]"  # begins the harness's answer for a failed request


def final_answer(text: str) -> str | None:
    """Return the text after the last ``[Final Answer]:`` or, without one, ``Final Answer:`` (case-sensitive)."""
    for marker in _MARKERS:
        if marker in text:
            return text.rpartition(marker)[2].strip()
    # The harness does not ask again after such a text. To give comparable results, batchkit must not, either.
    return text.strip() if text.startswith(FAILED) else None


def whole_answer(text: str) -> str:
    return text.strip()


FINAL_ANSWER = OrElse(final_answer, whole_answer)
