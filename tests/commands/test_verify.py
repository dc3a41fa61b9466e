"""``status`` and ``verify``: what they count, and each fault that ``verify`` finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from zlib import crc32

import orjson
import pytest

from tests.support.command_line import batchkit
from tests.support.dry_runs import LOG, RUN, finished, prepare, rows_that_fail, run, write_job

pytestmark = [pytest.mark.usefixtures("in_an_empty_folder"), pytest.mark.slow]


def test_verify_accounts_for_every_row() -> None:
    rows_that_fail(10, every=5)
    write_job()
    run("--limit", "5")
    found = batchkit("verify", "--json").ok()
    expected = {
        "rows": 5,
        "records": 5,
        "ok": 4,
        "failed": 1,
        "pending": 0,
        "lost": 0,
        "duplicates": 0,
        "checkpoint_matches": True,
        "torn_bytes": 0,
    }
    assert found.json | expected == found.json
    assert batchkit("verify").stdout.splitlines()[-1] == "sound"


def change_checkpoint(**changes: Any) -> None:
    path = RUN / "checkpoint.json"
    table = orjson.loads(path.read_bytes()) | changes
    del table["seal"]
    content = orjson.dumps(table)
    path.write_bytes(content[:-1] + b',"seal":%d}' % crc32(content))


def plant_second_answer() -> None:
    with LOG.open("ab") as log:
        log.write(LOG.read_bytes().splitlines(keepends=True)[3])


def plant_lost_row() -> None:
    change_checkpoint(completed=[[0, 9], [11, 12]])


def plant_forgotten_row() -> None:
    change_checkpoint(completed=[[0, 8]])


def plant_short_log() -> None:
    LOG.write_bytes(b"".join(LOG.read_bytes().splitlines(keepends=True)[:-1]))


def plant_wrong_counts() -> None:
    counts = orjson.loads((RUN / "checkpoint.json").read_bytes())["counts"]
    change_checkpoint(counts=counts | {"ok": 11, "records": 11})


@pytest.mark.parametrize(
    ("plant", "found_out"),
    [
        (plant_second_answer, {"duplicates": 1, "ok": 10, "records": 11}),
        (plant_lost_row, {"lost": 2, "checkpoint_matches": False}),
        (plant_forgotten_row, {"lost": 0, "checkpoint_matches": False}),
        (plant_short_log, {"lost": 1, "checkpoint_matches": False, "ok": 9, "pending": 1}),
        (plant_wrong_counts, {"checkpoint_matches": False}),
    ],
)
def test_verify_finds_a_planted_fault(plant: Callable[[], None], found_out: dict[str, Any]) -> None:
    finished(10)
    plant()
    found = batchkit("verify", "--json")
    assert found.json | found_out == found.json
    assert found.exit_code == 1
    assert batchkit("verify").stdout.splitlines()[-1] == "NOT SOUND"


def test_verify_outlives_a_damaged_checkpoint_and_counts_torn_bytes() -> None:
    """The next start cuts them off; no finished row is in them."""
    finished(10)
    with LOG.open("ab") as log:
        log.write(b'{"index":10,"id":"1')
    found = batchkit("verify", "--json")
    assert (found.exit_code, found.json["torn_bytes"], found.json["ok"]) == (0, 19, 10)
    for content in ("", "[]", "{}", '{"version": 7}', "null"):
        (RUN / "checkpoint.json").write_text(content)
        assert batchkit("verify", "--json").json["ok"] == 10


def test_rows_left_to_another_run_are_counted_as_skipped() -> None:
    prepare(10, input={"id": "key"})
    run("--limit", "6", "--set", "name=other")
    found = run("--skip-from", "output/other")
    assert found.json | {"total": 10, "ok": 4, "skipped": 6} == found.json
    assert batchkit("status", "--json").json["pending"] == 0
