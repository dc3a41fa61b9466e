"""Restores code whose layout was lost on the way from the model or the data set.

Only code that won't compile is changed, and the first change that makes it compile is used: code
that is itself wrong stays wrong.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator

_PLAIN = str.maketrans("‘’‚‛“”„‟′″\u00a0\u202f\u3000，（）：", "''''\"\"\"\"'\"   ,():")
_NOTHING = re.compile("[\u200b\u200c\u200d\u2060\ufeff]")
_SPACE_AFTER_BACKSLASH = re.compile(r"\\[ \t]+$", re.MULTILINE)


def fixed(code: str) -> str:
    """``code``, or the nearest variant that compiles; unchanged if none does."""
    return next((variant for variant in _variants(code) if _compiles(variant)), code)


def _variants(code: str) -> Iterator[str]:
    for text in (code, _plain(code)):
        for layout in _LAYOUTS:
            yield layout(text)


def _compiles(code: str) -> bool:
    try:
        compile(code, "<chart>", "exec")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return True


def _plain(code: str) -> str:
    """Replaces typographic quotes and spaces by plain ones."""
    code = _NOTHING.sub("", code.translate(_PLAIN))
    return _SPACE_AFTER_BACKSLASH.sub(r"\\", code)


def _with_tail_dedented(code: str) -> str:
    """For code whose first line is at the margin and all others are indented one step."""
    head, _, tail = code.strip().partition("\n")
    return f"{head}\n{textwrap.dedent(tail)}"


def _without_spaces(code: str) -> str:
    """Stripped as in the official runner: what runs there also runs here."""
    return "\n".join(line.strip(" ") for line in code.split("\n"))


def _without_indentation(code: str) -> str:
    return "\n".join(line.strip() for line in code.split("\n"))


_LAYOUTS: list[Callable[[str], str]] = [
    textwrap.dedent,
    _with_tail_dedented,
    _without_spaces,
    _without_indentation,
]
