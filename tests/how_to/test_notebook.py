"""The cells of the page run in a real notebook."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.environments import with_tables
from tests.support.how_to import run_page
from tests.support.paths import ROOT

pytestmark = pytest.mark.release

EXECUTE = """
import nbformat, sys
from nbclient import NotebookClient
cells = [nbformat.v4.new_code_cell(open(path).read()) for path in sys.argv[1:]]
notebook = nbformat.v4.new_notebook(cells=cells)
NotebookClient(notebook, timeout=280, kernel_name="python3").execute()
nbformat.write(notebook, "done.ipynb")
"""


def executed(folder: Path, *cells: str) -> dict[str, Any]:
    """The notebook with these files as cells, after its kernel has run them."""
    place = with_tables()
    path = f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [place / "bin" / "python", "-c", EXECUTE, *cells],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((folder / "done.ipynb").read_text())
    return found


def html_of(cell: dict[str, Any]) -> str:
    (shown,) = (one["data"] for one in cell["outputs"] if one["output_type"] == "execute_result")
    return "".join(shown["text/html"])


def test_the_column_is_made_once_with_a_progress_bar(tmp_path: Path) -> None:
    run_page("notebook", tmp_path)  # writes the cells
    done = executed(tmp_path, "cell-1.py", "cell-1.py", "cell-2.py")
    first, second, shown = done["cells"]
    states = done["metadata"]["widgets"]["application/vnd.jupyter.widget-state+json"]["state"]
    bars = [
        (one["state"]["value"], one["state"]["max"])
        for one in states.values()
        if one["model_name"] == "FloatProgressModel"
    ]
    assert (8.0, 8.0) in bars
    assert html_of(first) == html_of(second)
    (folder,) = (tmp_path / "output").glob("generate-*")
    starts = (folder / "starts.jsonl").read_text()
    assert starts.count('"begun"') == 2
    assert "8 ok, 0 failed" in html_of(shown)
    assert len((folder / "results.jsonl").read_text().splitlines()) == 8
