"""Runs the commands of a page in ``docs/how-to/`` as its reader would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.paths import ROOT

BLOCK = re.compile(r'^ *```(\w+)(?: title="([^"]+)")?\n(.*?)^ *```', re.MULTILINE | re.DOTALL)


def run_page(
    name: str,
    folder: Path,
    *,
    environment: Path | None = None,
    replaced: Mapping[str, str] | None = None,
    variables: Mapping[str, str] | None = None,
    inside: Sequence[str] = (),
    timeout_s: float = 240,
) -> str:
    """Write the titled blocks of ``docs/how-to/NAME.md`` as files in ``folder``, run its bash and python blocks there in
    their order, and return what they print. Blocks of ``text`` are what the page says is printed.

    ``environment``: a virtual environment whose programs are found first; by default, that of the tests.
    ``replaced``: texts of the page to exchange, such as a model on the hub or a server's address; each must be on the page.
    ``variables``: environment variables to add.
    ``inside``: words before each command, which enter a container.
    """
    text = (ROOT / "docs" / "how-to" / f"{name}.md").read_text(encoding="utf-8")
    for old, new in (replaced or {}).items():
        assert old in text, f"docs/how-to/{name}.md does not have {old!r}"
        text = text.replace(old, new)
    programs = (environment / "bin") if environment else Path(sys.executable).parent
    settings = os.environ | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    settings |= variables or {}
    printed = ""
    for kind, title, found in BLOCK.findall(text):
        block = textwrap.dedent(found)
        if title:
            (folder / title).parent.mkdir(parents=True, exist_ok=True)
            (folder / title).write_text(block, encoding="utf-8")
        elif kind in ("bash", "python"):
            command = ["bash", "-euo", "pipefail", "-c"] if kind == "bash" else ["python", "-c"]
            done = subprocess.run(
                [*inside, *command, block], cwd=folder, env=settings, capture_output=True, text=True,
                timeout=timeout_s, check=False,
            )  # fmt: skip
            printed += done.stdout + done.stderr
            assert done.returncode == 0, f"{name}.md:\n{block}\n{printed}"
        else:
            assert kind == "text", f"{name}.md: a {kind} block without a title"
    return printed
