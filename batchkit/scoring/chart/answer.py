"""Finds the code in a model's answer, as text, and restores its layout.

Nothing is compiled outside the sandbox. Only code that won't compile is changed, and the first
change that makes it compile is used: code that is itself wrong stays wrong.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator

from batchkit.scoring.overlap import Mode

TABLE_NAME = "table.xlsx"
TABLE_PATH = f"/batchkit/{TABLE_NAME}"  # replaced by the real path when the code runs

_SHOW = "plt.show()"
_STARTS = (re.compile(r"import pandas as pd"), re.compile(r"import matplotlib.pyplot as plt"))
_FENCE = re.compile(r"(?:^|:)[ \t]*(?:```|~~~)[ \t]*(?P<language>\w*)[^`]*$")
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
    """The code to run, None if there is none."""
    code = _official_code(response) if mode == "official" else _fixed_code(response)
    return code if code and code.strip() else None


def with_table(text: str, mode: Mode) -> str:
    """``text`` with its names for the table replaced by ``TABLE_PATH``."""
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
    """What ``START.*?plt.show()`` matches, in linear time: some answers repeat themselves."""
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
            begins = _with_imports_before(response, response.rindex(spans[-1]))
            return response[begins : response.rindex(_SHOW) + len(_SHOW)]
    begin = _IMPORT.search(response)
    if begin is None or not _DRAWS.search(response, begin.start()):
        return None
    return _without_prose_behind(response[begin.start() :])


def _fenced(response: str) -> Iterator[str]:
    """The blocks between fences, of Python or of no language; the last may be unclosed."""
    block: list[str] | None = None
    python = False
    for line in response.split("\n"):
        fence = _FENCE.search(line)
        if fence is None:
            if block is not None:
                block.append(line)
        elif block is None:
            block = []
            python = fence["language"].lower() in ("", "python", "py", "python3")
        else:
            if python:
                yield "\n".join(block)
            block = None
    if block is not None and python:
        yield "\n".join(block)


def _with_imports_before(response: str, begin: int) -> int:
    """Where the import lines that end at ``begin`` start."""
    while begin:
        line_begin = response.rfind("\n", 0, begin - 1) + 1
        line = response[line_begin:begin]
        if line.strip() and not _IMPORT.match(line.strip()):
            return begin
        begin = line_begin
    return begin


def _without_prose_behind(text: str) -> str:
    """Code without an end marker: up to the last paragraph that draws."""
    paragraphs = re.split(r"(\n[ \t]*\n)", text)
    while len(paragraphs) > 2 and not _DRAWS.search(paragraphs[-1]):
        del paragraphs[-2:]
    return "".join(paragraphs)


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
