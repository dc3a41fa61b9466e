"""A command in the job file: words, which no shell reads."""

from __future__ import annotations

import shlex
from collections.abc import Sequence


def words_of(command: str | Sequence[str]) -> list[str]:
    """The words of ``command``, separated as a shell would.

    Raises:
        ValueError: a quotation has no end, or there is no word.
    """
    words = shlex.split(command) if isinstance(command, str) else [*command]
    if not words or not words[0]:
        raise ValueError("names no command")
    return words
