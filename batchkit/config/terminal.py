"""Functions that make text safe and short enough for a terminal."""

from __future__ import annotations

import re

# Control characters (C0 except newline and tab, DEL, C1), characters that change the writing direction,
# and lone surrogates, which no output stream can encode.
_ACTS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


# Maximum characters of one line of a message, and of the whole message.
MAX_LINE, MAX_MESSAGE = (1_000, 20_000)


def bounded(message: str) -> str:
    """Return ``message`` with the middle of each line over ``MAX_LINE`` characters cut out, then the middle of the
    whole message if it is over ``MAX_MESSAGE``."""
    if len(message) > MAX_LINE:
        message = "\n".join(_cut(line, MAX_LINE) for line in message.split("\n"))
    return _cut(message, MAX_MESSAGE)


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = most // 2 - 25  # room for the note
    return f"{text[:half]} [… {len(text) - 2 * half:,} characters left out …] {text[-half:]}"


def shortened(text: str, most: int = 80) -> str:
    """Return ``text``. If it is longer than ``most`` characters, it is cut to this length and ends with ``…``."""
    return text if len(text) <= most else text[: most - 1] + "…"


def cut_in_the_middle(text: str, most: int) -> str:
    """Return ``text``. If it is longer than ``most`` characters, a note with the number of characters left out replaces
    its middle."""
    if len(text) <= most:
        return text
    half = max(1, most // 2)
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters left out …]\n{text[-half:]}"


def plain(text: str) -> str:
    r"""Return ``text`` with every character that could control a terminal escaped, for example as ``\u001b``.

    Rows, answers and server messages are printed only after this. JSON text keeps its meaning, because these characters
    can occur only inside its strings.
    """
    return _ACTS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
