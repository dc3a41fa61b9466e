"""A power cut takes what no fsync has reached, of some files and not of others: what a checkpoint or a record
relies on is on disk before it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchkit.storage.checkpoint import CHECKPOINT
from batchkit.storage.ledger import Ledger, line_of
from batchkit.storage.log import RESULTS, STEPS, read_generations
from batchkit.storage.newest_lines import read_newest
from batchkit.storage.vectors import Vectors
from tests.support.records import generation, record, with_vector


class Disk:
    """How many bytes of each file of ``folder`` its last fsync has seen."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._sizes, real = folder, dict[Path, int](), os.fsync

        def fsync(file: int) -> None:
            real(file)
            self._sizes[Path(f"/proc/self/fd/{file}").readlink()] = os.fstat(file).st_size

        monkeypatch.setattr(os, "fsync", fsync)

    def after_a_cut(self, copy: Path, lucky: str) -> Path:
        """The folder as a power cut leaves it, where the file ``lucky`` has reached the disk on its own. The newest
        checkpoint has: its rename may."""
        shutil.copytree(self._folder, copy)
        for path in (path for path in copy.rglob("*") if path.is_file()):
            if path.name not in (lucky, CHECKPOINT):
                os.truncate(path, self._sizes.get(self._folder / path.relative_to(copy), 0))
        return copy


def with_generation(index: int) -> list[Any]:
    made = record(index)
    made.generations = 1
    return [generation(index), line_of(made)]


LINES: dict[str, Callable[[int], list[Any]]] = {
    "records": lambda index: [line_of(record(index))],
    "vectors": lambda index: [with_vector(index)],
    "generations": with_generation,
    "generations beside plain records": lambda index: (
        with_generation(index) if index % 2 else [line_of(record(index))]
    ),
    "generations of open rows": lambda index: [generation(index)],
}


@pytest.mark.parametrize("lucky", ["none", RESULTS, STEPS])
@pytest.mark.parametrize("kind", LINES)
def test_power_cut_leaves_all_before_the_checkpoint_and_no_record_alone(
    kind: str, lucky: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, now, synced = tmp_path / "run", 0.0, 0
    run.mkdir()
    disk = Disk(run, monkeypatch)
    ledger = Ledger(run, clock=lambda: now)
    for index in range(8):
        now += 0.4
        ledger.write(LINES[kind](index))
        if index % 3 == 2:
            ledger.sync()
            synced = ledger.totals.ok
        copy = disk.after_a_cut(tmp_path / f"{index}", lucky)
        Ledger(copy).close()
        records = list(read_newest(copy / RESULTS))
        assert len(records) >= synced
        for one in records if kind == "vectors" else ():
            Vectors(copy).of(one)
        there = {line.record.index for line in read_generations(copy) if line.record}
        assert there >= {one["index"] for one in records if "generations" in one}
    ledger.close()
