"""``batchkit report``: a run on one self-contained web page."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from batchkit.commands.report.comparison import write_comparison
from batchkit.commands.report.figures import RunStats
from batchkit.commands.report.page import check_page, render, write_page
from batchkit.commands.report.pictures import Pictures
from batchkit.commands.report.rows import show
from batchkit.commands.score.answer import Say
from batchkit.errors import StoreError
from batchkit.runs.inputs import with_group
from batchkit.runs.scores import is_mixed, table_of
from batchkit.scoring.metrics import ScoreTable, tabulate
from batchkit.storage.checkpoint import check_log
from batchkit.storage.generations import Generations
from batchkit.storage.job_toml import job_of_run
from batchkit.storage.log import RESULTS
from batchkit.storage.manifest import read_manifest
from batchkit.storage.score_store import read_scored

__all__ = ["REPORT", "report", "write_comparison", "write_report"]

REPORT = "report.html"


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
    manifest, job = read_manifest(folder), job_of_run(folder)
    path = path or folder / REPORT
    if not (folder / RESULTS).exists():
        raise StoreError(f"{folder}: nothing to report: no row has finished yet")
    check_log(folder)
    check_page(path)
    stats = RunStats()
    records = with_group(read_scored(folder), job)
    table = tabulate(stats.watch(records), job.scoring.group_by)
    if not stats.rows:
        raise StoreError(f"{folder}: nothing to report: no row has finished yet")
    with Pictures(job.media) as pictures, closing(Generations(folder)) as generations:
        shown = show(folder, stats, pictures if images else None, generations)
        found = pictures.finish()
    return write_page(path, render(folder, manifest, job, stats, table, shown, found))
