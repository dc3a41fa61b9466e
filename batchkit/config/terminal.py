"""Making text safe and short enough to print on a terminal."""

from __future__ import annotations

import re

# Control characters (C0 but for newline and tab, DEL, C1), those that change the writing direction,
# and lone surrogates, which no stream can encode.
_ACTS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


MAX_LINE, MAX_MESSAGE = 1_000, 20_000  # characters of a line of a message, and of all of it


def bounded(message: str) -> str:
    """``message`` without the middle of each line that is too long, and of all if it is still too long."""
    if len(message) > MAX_LINE:
        message = "\n".join(_cut(line, MAX_LINE) for line in message.split("\n"))
    return _cut(message, MAX_MESSAGE)


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = most // 2 - 25  # room for the note
    return f"{text[:half]} [… {len(text) - 2 * half:,} characters left out …] {text[-half:]}"


def shortened(text: str, most: int = 80) -> str:
    """``text``, or as much of its beginning as fits, and ``…``."""
    return text if len(text) <= most else text[: most - 1] + "…"


def cut_in_the_middle(text: str, most: int) -> str:
    """``text``, or both its ends and how much is left out between them."""
    if len(text) <= most:
        return text
    half = max(1, most // 2)
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters left out …]\n{text[-half:]}"


def plain(text: str) -> str:
    r"""``text`` with every character that would control a terminal escaped, as ``\u001b``.

    Rows, answers and the messages of servers pass through here before they are printed. JSON keeps
    its meaning: these characters can only be inside its strings.
    """
    return _ACTS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
