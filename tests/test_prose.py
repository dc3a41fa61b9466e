"""The mechanical part of plain English: how docstrings begin, what help texts are, and phrases that nobody else uses.

Readers judge the rest. A phrase that fails here has a plain form: "paid for" is "counted", "goes on" is "continues".
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from batchkit.cli import cli
from tests.support.paths import ROOT

SOURCES = sorted((ROOT / "batchkit").rglob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
HEADLESS = re.compile(r"(Of|Those|That of|As|Else|Its|Whose)\b")
IDIOMS = re.compile(
    r"\b(paid for|goes on|so many|nobody|whoever|none if|come by|by now|at the rest|wants to be"
    r"|lies near|of ours|is said|are said|is told|are told|and then some|as without|that of each|in its own way"
    r"|of them that|what is in flight)\b"
)


def docstrings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def prose_of(path: Path) -> str:
    """The docstrings and comments of a module, or the text of a page without its code blocks."""
    text = path.read_text("utf-8")
    if path.suffix == ".md":
        return re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = (token.string for token in tokens if token.type == tokenize.COMMENT)
    return "\n".join([*docstrings(path), *comments])


def of_repository(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=of_repository)
def test_no_docstring_begins_without_its_noun(path: Path) -> None:
    assert [text for text in docstrings(path) if HEADLESS.match(text)] == []


@pytest.mark.parametrize("path", [*SOURCES, *PAGES], ids=of_repository)
def test_no_page_or_module_has_a_private_idiom(path: Path) -> None:
    assert [found[0] for found in IDIOMS.finditer(" ".join(prose_of(path).split()))] == []


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_help_texts_are_sentences(name: str) -> None:
    command = cli.commands[name]
    texts = [
        command.help or "",
        *(o.help or "" for o in command.params if isinstance(o, click.Option)),
    ]
    assert [text for text in texts if not re.match(r"[A-Z].*\.\s*$", text, re.DOTALL)] == []
