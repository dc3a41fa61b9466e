"""The check behind ``batchkit serve --check``: do the files and run folders on disk match the database?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from batchkit.errors import BatchkitError, JobError
from batchkit.runs.status import counts_of
from batchkit.serve.batch import UNFINISHED
from batchkit.serve.files import KINDS_OF_FILES
from batchkit.serve.store import Object, Store
from batchkit.storage.checkpoint import check_log
from batchkit.storage.runfolder import is_run


@dataclass(frozen=True)
class Audit:
    """The result of ``serve --check``. ``problems`` has one line per problem."""

    folder: str
    files: int
    batches: int
    problems: list[str]

    @property
    def exit_code(self) -> int:
        return 1 if self.problems else 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def to_text(self) -> str:
        found = f"{len(self.problems)} problems" if self.problems else "no problem"
        head = f"{self.folder}: {self.files:,} files, {self.batches:,} batches, {found}"
        return "\n".join([head, *(f"  {line}" for line in self.problems)])


def audit(folder: Path) -> Audit:
    """Compare the database of the server in ``folder`` with its files and run folders. Nothing is written.

    While a server is running, unfinished uploads may be reported as problems.

    Raises:
        JobError: The folder has no server database.
    """
    database = folder / "serve.db"
    if not database.is_file():
        raise JobError(
            f"{folder}: is not the folder of a server, because it has no serve.db; give the server's folder with --folder"
        )
    with closing(Store(database)) as store:
        files = [one.doc for kind in KINDS_OF_FILES for one in store.all(kind)]
        batches = [one.doc for one in store.all("batch")]
        problems = [text for text in (store.problems(),) if text]
    problems += _of_files(files, folder / "files")
    for batch in batches:
        problems += _of_batch(batch, folder / "batches" / batch["id"], {f["id"] for f in files})
    named = {batch["id"] for batch in batches}
    runs = (folder / "batches").glob("batch_*")
    problems += (
        f"{run.name}: has a run folder but is not in the database"
        for run in runs
        if run.name not in named
    )
    return Audit(str(folder), len(files), len(batches), problems)


def _of_files(files: list[Object], folder: Path) -> Iterator[str]:
    for file in files:
        path = folder / file["id"]
        if not path.is_file():
            yield f"{file['id']}: its content is missing"
        elif path.stat().st_size != file["bytes"]:
            yield f"{file['id']}: has {path.stat().st_size:,} bytes, expected {file['bytes']:,}"
    names = {file["id"] for file in files}
    yield from (
        f"{path.name}: is not in the database"
        for path in folder.iterdir()
        if path.name not in names
    )


def _of_batch(batch: Object, folder: Path, files: set[str]) -> Iterator[str]:
    name, counts = batch["id"], batch["request_counts"]
    if batch["status"] in UNFINISHED and batch["input_file_id"] not in files:
        yield f"{name}: is {batch['status']}, but its input file is missing"
    if not is_run(folder):
        return
    try:
        check_log(folder)
        totals = counts_of(folder).totals
    except BatchkitError as error:
        yield f"{name}: {error}"
        return
    if batch["status"] == "completed" and (totals.ok, totals.ok + totals.failed) != (
        counts["completed"],
        counts["total"],
    ):
        yield f"{name}: its run has {totals.ok:,} ok, {totals.failed:,} failed, but the database says {counts}"
