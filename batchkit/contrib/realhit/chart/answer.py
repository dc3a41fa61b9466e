"""Extraction of a chart's code from a model's answer, and repair of the code's layout.

Code is compiled only inside the sandbox. Only code that does not compile is changed, and the first change after which
it compiles is used. Other errors in the code are not corrected.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator
from io import StringIO
from typing import Literal

Mode = Literal["official", "fixed"]

TABLE_NAME = "table.xlsx"
TABLE_PATH = f"/batchkit/{TABLE_NAME}"  # replaced by the real path when the code runs

_SHOW = "plt.show()"
_STARTS = (re.compile(r"import pandas as pd"), re.compile(r"import matplotlib.pyplot as plt"))
_OPENS = re.compile(r"(?:^|:)[ \t]*(?:```|~~~)[ \t]*(\w*)")
_CLOSES = re.compile(r"[ \t]*(?:```|~~~)")
_PYTHON = ("", "python", "py", "python3")
_IMPORT = re.compile(r"^[ \t]*(?:import[ \t]+\w|from[ \t]+[\w.]+[ \t]+import\b)", re.MULTILINE)
_DRAWS = re.compile(r"\bplt\b|\bpyplot\b|\.plot\b")
_OFFICIAL_NAMES = re.compile(r"'[^']*\.xlsx'|table\.xlsx")
_ANY_NAME = re.compile(
    r"(?<!to_excel\()(?<!ExcelWriter\()"
    r"(?:\b[rRuUfF]{1,2})?(?P<quote>['\"])(?:(?!(?P=quote))[^\n])*\.xlsx(?P=quote)"
)
_PLAIN = str.maketrans("‘’‚‛“”„‟′″\u00a0\u202f\u3000，（）：", "''''\"\"\"\"'\"   ,():")
_NOTHING = re.compile("[\u200b\u200c\u200d\u2060\ufeff]")
_SPACE_AFTER_BACKSLASH = re.compile(r"\\[ \t]+$", re.MULTILINE)


def chart_code(response: str, mode: Mode) -> str | None:
    """Return the code in the answer ``response``, or None if it has none."""
    code = _official_code(response) if mode == "official" else _fixed_code(response)
    return code if code and code.strip() else None


def with_table(text: str, mode: Mode) -> str:
    """Return ``text`` with each name of an Excel file replaced with ``TABLE_PATH``, because the name means the row's
    table."""
    if mode == "fixed":
        return _ANY_NAME.sub(repr(TABLE_PATH), text)
    return _OFFICIAL_NAMES.sub(
        lambda name: repr(TABLE_PATH) if name[0].startswith("'") else TABLE_PATH, text
    )


def _official_code(response: str) -> str | None:
    for start in _STARTS:
        spans = list(_spans(response, start))
        if spans:
            return "".join(f"{line.strip(' ')}\n" for line in spans[-1].strip().split("\n"))
    return None


def _spans(response: str, start: re.Pattern[str]) -> Iterator[str]:
    """Yield the matches of ``START.*?plt.show()``. The search takes linear time even for answers that repeat
    themselves."""
    position = 0
    while found := start.search(response, position):
        shown = response.find(_SHOW, found.end())
        if shown < 0:
            return
        position = shown + len(_SHOW)
        yield response[found.start() : position]


def _fixed_code(response: str) -> str | None:
    response = response.replace("\r\n", "\n")
    blocks = [block for block in _fenced(response) if _DRAWS.search(block)]
    if blocks:
        return [*blocks, *filter(_IMPORT.search, blocks)][-1]
    for start in _STARTS:
        spans = list(_spans(response, start))
        if spans:
            return response[response.rindex(spans[-1]) : response.rindex(_SHOW) + len(_SHOW)]
    begin = _IMPORT.search(response)
    if begin is None or not _DRAWS.search(response, begin.start()):
        return None
    return response[begin.start() :]


def _fenced(response: str) -> Iterator[str]:
    """Yield the content of each fenced Python block, in linear time. The last block need not be closed."""
    language: str | None = None
    lines: list[str] = []
    for line in StringIO(response):
        if language is None:
            language, lines = _language(line), []
        elif _CLOSES.match(line) is None:
            lines.append(line)
        else:
            if language in _PYTHON:
                yield "".join(lines)
            language = None
    if language in _PYTHON:
        yield "".join(lines)


def _language(line: str) -> str | None:
    """Return the language of the block that ``line`` opens ("" if unnamed), or None if it opens no block."""
    after = line.rfind("`")  # no backtick may follow an opening fence
    opening = (found for found in _OPENS.finditer(line) if found.start(1) > after)
    return next((found[1].lower() for found in opening), None)


def fixed(code: str) -> str:
    """Return ``code`` unchanged if it compiles, or if no variant does. Otherwise, return the first variant with another
    layout that compiles."""
    variants = (layout(text) for text in (code, _plain(code)) for layout in _LAYOUTS)
    return next(filter(_compiles, variants), code)


def _compiles(code: str) -> bool:
    try:
        compile(code, "<chart>", "exec")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return True


def _plain(code: str) -> str:
    """Replace typographic quotes and spaces with plain ones."""
    code = _NOTHING.sub("", code.translate(_PLAIN))
    return _SPACE_AFTER_BACKSLASH.sub(r"\\", code)


def _without_spaces(code: str) -> str:
    """Strip spaces from each line as the official runner does, so that code that runs there also runs here."""
    return "\n".join(line.strip(" ") for line in code.split("\n"))


def _without_indentation(code: str) -> str:
    return "\n".join(line.strip() for line in code.split("\n"))


_LAYOUTS: list[Callable[[str], str]] = [
    textwrap.dedent,
    _without_spaces,
    _without_indentation,
]
