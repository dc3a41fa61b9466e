"""``batchkit report``: the page of ``batchkit view`` as one file, with its data inside."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from batchkit.commands import Say
from batchkit.commands.report.rows import read_rows
from batchkit.commands.view.overview import Figures, about, overview
from batchkit.commands.view.page import check_page, write_page
from batchkit.commands.view.runs import Look
from batchkit.commands.view.spread import spreads
from batchkit.commands.view.timeline import timeline
from batchkit.errors import StoreError
from batchkit.runs.comparison import Comparison
from batchkit.runs.index import Index
from batchkit.runs.inputs import with_group
from batchkit.runs.scores import is_mixed, table_of
from batchkit.runs.status import status
from batchkit.scoring.metrics import ScoreTable, tabulate
from batchkit.storage.checkpoint import check_log
from batchkit.storage.job_toml import job_of_run, without_masked
from batchkit.storage.log import RESULTS
from batchkit.storage.manifest import read_manifest
from batchkit.storage.metrics import read_metrics
from batchkit.storage.score_store import read_scored

REPORT = "report.html"
_POINTS = 600  # of the charts over time
_ALL_S = 1e6


class Report(NamedTuple):
    """The table of scores of a run, and where its page is."""

    table: ScoreTable
    path: Path

    def to_json(self) -> dict[str, Any]:
        return {**self.table.to_json(), "path": str(self.path)}

    def to_text(self) -> str:
        return f"{self.table.to_text()}\n\n{self.path}"


def report(folder: Path, path: Path | None, *, images: bool, say: Say) -> Report:
    """Write the page of a run (see ``write_report``) and read its table of scores.

    Raises:
        InputError: the table needs fields that the run did not keep, and the input changed.
        StoreError: as ``write_report``.
    """
    table = table_of(folder)
    if is_mixed(folder):
        say(f"{folder}: its rows are scored in more than one way; `batchkit score` fixes that")
    return Report(table, write_report(folder, path, images=images))


def write_report(folder: Path, path: Path | None = None, *, images: bool = True) -> Path:
    """Write the report of a run: to ``path``, or to ``report.html`` in its folder.

    One file without references to others. The model's texts are in it as data, and are shown as
    text only. It has all rows up to 20,000, and a sample beyond that; its tables and charts are
    over all rows. ``images=False`` leaves the thumbnails out.

    Raises:
        StoreError: not a run folder, no row has finished, its log is damaged, or the file can't be
            written.
    """
    path, manifest = path or folder / REPORT, read_manifest(folder)
    check_page(path)
    if not (folder / RESULTS).exists():
        raise StoreError(f"{folder}: nothing to report: no row has finished yet")
    check_log(folder)
    job, look = without_masked(job_of_run(folder)), Look(status(folder), manifest)
    index = Index(folder, job.scoring.group_by)
    snapshot = index.grow(_ALL_S)
    if not len(snapshot.newest):
        raise StoreError(f"{folder}: nothing to report: no row has finished yet")
    table = tabulate(with_group(read_scored(folder), job), job.scoring.group_by)
    shown = read_rows(index, snapshot, job, images=images)
    found = overview(look, index, snapshot, Figures(table, spreads(snapshot)))
    notes = ["The run had not ended when this page was made."] * (look.state == "running")
    data = {
        "status": {
            **found,
            "folder": folder.name,
            "notes": [*notes, *found["notes"], *shown.notes],
        },
        "about": about(folder),
        "metrics": timeline(read_metrics(folder), _POINTS),
        "rows": shown.rows,
        "pictures": shown.pictures,
    }
    return write_page(path, look.status.name, data)


def write_comparison(comparison: Comparison, path: Path) -> Path:
    """Write ``comparison`` as one self-contained web page.

    Raises:
        StoreError: the file can't be written, or its name is not that of a web page.
    """
    return write_page(path, ", ".join(comparison.runs), {"comparison": comparison.to_json()})
