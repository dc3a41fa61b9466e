"""Making text safe and short enough to print on a terminal."""

from __future__ import annotations

import re

# Control characters (C0 but for newline and tab, DEL, C1), those that change the writing direction,
# and lone surrogates, which no stream can encode.
_ACTS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


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
