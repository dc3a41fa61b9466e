"""Text on its way to a terminal: nothing in it may act on the terminal."""

from __future__ import annotations

import re

# Control characters (C0 but for newline and tab, DEL, C1), what turns the direction of writing, and
# lone surrogates, which no stream can encode.
_ACTS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(text: str) -> str:
    r"""``text`` with every character that a terminal would obey written out, as ``\u001b``.

    Rows, answers and the messages of servers go through here before they are printed. JSON stays
    JSON, and means the same: in it these characters can only be inside strings.
    """
    return _ACTS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
