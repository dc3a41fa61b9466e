"""The card of a dataset on the Hugging Face hub that gets a run's answers: a README.md with the job and the progress."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from batchkit.runs.status import counts_of
from batchkit.storage.job_toml import job_of_run, toml_of
from batchkit.storage.remote import OutputFolder
from batchkit.storage.starts import read_history
from batchkit.types import utc_now

CARD = "README.md"
_MARK = "<!-- batchkit writes this file again with each part or export. Remove this line to keep your own text. -->"


def write_card(dataset: OutputFolder, run: Path, files: Mapping[str, str]) -> None:
    """Write the card of the run in the folder ``run``, unless the dataset has a card that batchkit did not write.

    ``files``: patterns of data files by the name of their split. Raises the exceptions of the hub's library.
    """
    if CARD in dataset.names():
        with dataset.open(CARD) as file:
            if _MARK.encode() not in file.read():
                return
    with dataset.writing(CARD) as path:
        path.write_text("\n".join(_lines(run, files)) + "\n", encoding="utf-8")


def _lines(run: Path, files: Mapping[str, str]) -> Iterator[str]:
    history, totals = read_history(run), counts_of(run).totals
    yield from ("---", "tags: [batchkit]", "configs:", "- config_name: default", "  data_files:")
    for split, pattern in files.items():
        yield from (f"  - split: {split}", f"    path: {json.dumps(pattern)}")
    yield from ("---", _MARK, "", f"# {run.name}", "")
    of = "" if history.total is None else f" of {history.total:,}"
    yield f"{totals.ok:,} ok, {totals.failed:,} failed{of} rows at {utc_now()}"
    if checked := history.self_checks.in_words():
        yield from ("", checked)
    job = toml_of(job_of_run(run), only_set=True).strip()
    fence = "`" * 3
    while fence in job:
        fence += "`"
    yield from ("", "The job, with secrets masked:", "", f"{fence}toml", job, fence)
