"""The web page of ``view`` and ``report``. A report is one file that contains the page's script, style and data."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Iterable
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import batchkit
from batchkit.config.numbers import when
from batchkit.errors import StoreError
from batchkit.storage.files import disk_errors, replacing
from batchkit.storage.plain_json import encoded
from batchkit.types import utc_now

MODULES = (  # each imports only modules before it
    *("format.js", "elements.js", "search.js", "data.js", "axis.js", "charts.js", "scores.js"),
    *("filters.js", "row.js", "rows.js", "run.js", "compare.js", "runs.js", "start.js"),
)
_IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)

ASSETS = {"page.css": "text/css", **dict.fromkeys(MODULES, "text/javascript")}
"""The files that the page loads from a server, by name, with their types."""


@cache
def read(name: str) -> str:
    """Return the text of ``page.html`` or of one of ``ASSETS``."""
    return (files("batchkit.commands.view") / name).read_text(encoding="utf-8")


def style() -> str:
    return read("page.css")


def script() -> str:
    """Return the modules joined into one, for a page in one file.

    Imports and the word ``export`` are removed. This works because no two modules define the same top-level name.
    """
    return _EXPORT.sub("", _IMPORT.sub("", "".join(map(read, MODULES))))


def check_page(path: Path) -> None:
    """Raise StoreError if ``path`` does not have the suffix of a web page, because it might be a log."""
    if path.suffix not in (".html", ".htm"):
        raise StoreError(
            f"{path}: a report is a web page; give a file name that ends in .html, such as {path.stem}.html"
        )


def write_page(path: Path, title: str, data: dict[str, Any]) -> Path:
    """Write the page to ``path`` as one file that loads nothing else, and return the path.

    The file contains the script, the style and ``data`` (responses of the API). It appears only when it is complete.

    Raises:
        StoreError: The file can't be written, or its suffix is not .html or .htm.
    """
    check_page(path)
    made = f"Made by batchkit {batchkit.__version__}, {when(utc_now())}."
    parts: dict[str, str | bytes] = {
        "<!-- policy -->": policy(style(), script()),
        "<title>batchkit</title>": f"<title>{escape(title)} · batchkit report</title>",
        '<link rel="stylesheet" href="/assets/page.css">': f"<style>{style()}</style>",
        ">null</script>": b">%b</script>" % _as_data({**data, "made": made}),
        '<script type="module" src="/assets/start.js"></script>': (
            f'<script type="module">{script()}</script>'
        ),
    }
    page = [read("page.html").encode()]
    for place, part in parts.items():  # in the order of the page
        before, _, after = page.pop().partition(place.encode())
        page += [before, part if isinstance(part, bytes) else part.encode(), after]
    return write_html(path, page)


def write_html(path: Path, page: Iterable[bytes]) -> Path:
    """Write the parts of a page to a file. Raise StoreError if that fails."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary, temporary.open("wb") as file:
            file.writelines(page)
            file.flush()
            os.fsync(file.fileno())
    return path


def policy(style: str, script: str = "") -> str:
    """Return a content security policy that allows only this script and style, identified by their hashes."""
    rules = (
        f"default-src 'none'; img-src data:; media-src data:; script-src {_hash(script)}; style-src {_hash(style)};"
        " base-uri 'none'; form-action 'none'"
    )
    return f'<meta http-equiv="Content-Security-Policy" content="{rules}">'


def _as_data(value: Any) -> bytes:
    """Return JSON that is safe in a ``<script>``: it can't end the element or begin a comment."""
    text = encoded(value)
    for character in "<>&\u2028\u2029":
        text = text.replace(character.encode(), b"\\u%04x" % ord(character))
    return text


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
