"""Where a job file is not TOML, and what to write instead."""

from __future__ import annotations

import re
import tomllib

from batchkit.config.masking import masked_text
from batchkit.config.terminal import shortened

_PLACE = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")
_REMEDIES = [  # words of the reader's reason, what the line looks like, what to do
    (r"Invalid value", r"=\s*(True|False)\b", "write true or false, in small letters"),
    (r"Invalid value", r"=\s*(None|null|nil)\b", "TOML has no such value; leave the key out"),
    (r"Invalid value", r"=\s*(#.*)?$", "a value is missing after ="),
    (r"Invalid value", r"[“”‘’]", 'use straight quotes: "…"'),
    (r"Invalid value", r"=", 'a text needs quotes: key = "text"'),
    (r"Illegal character '\\n'|Unterminated", r"",
     'a quote is not closed; a text of several lines stands between """ and """'),
    (r"Unescaped", r"", "write the text in single quotes, or each \\ twice"),
    (r"Expected '='", r"", "write key = value"),
    (r"Cannot declare .* twice", r"", "this table is there twice; put its keys together"),
    (r"overwrite|mutate|Duplicate", r"", "this key is there twice; keep one"),
    (r"Unclosed array", r"", "a list is not closed before this line: ]"),
    (r"inline table|key part", r"", "a table in { } must be on one line; [table] may have several"),
    (r"end of a table declaration", r"", "write [table]"),
    (r"after a statement", r"=\s*'", "a text with ' in it needs double quotes"),
    (r"after a statement", r"", "one key = value on a line; a list is [1, 2], a fraction 0.5"),
]  # fmt: skip


def problem_in(text: str, error: tomllib.TOMLDecodeError) -> str:
    """What is wrong with ``text``, with the line at which Python's reader stopped."""
    place = _PLACE.search(str(error))
    reason = str(error)[: place.start()] if place else str(error)
    lines = text.rstrip().splitlines() or [""]
    number = int(place[1]) if place and place[1] else len(lines)
    line = lines[min(number, len(lines)) - 1].strip()
    remedy = next(
        (
            f"; {remedy}"
            for words, sign, remedy in _REMEDIES
            if re.search(words, reason) and re.search(sign, line)
        ),
        "",
    )
    return f"line {number}: {reason}{remedy}\n  {shortened(masked_text(line), 120)}"
