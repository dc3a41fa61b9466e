"""The ledger: what was written stays, what was torn is cut off, and a kill costs nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from zlib import crc32

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchkit.errors import StoreError
from batchkit.storage.checkpoint import CHECKPOINT, Totals, check_log
from batchkit.storage.ledger import Ledger, RecordLine, line_of
from batchkit.storage.log import RESULTS, STEPS, read_lines
from batchkit.storage.newest_lines import NewestLog, read_newest
from batchkit.storage.steps import GenerationLine
from batchkit.storage.vectors import Vectors
from tests.support.full_disk import full_disk
from tests.support.records import (
    facts,
    generation,
    indexes,
    record,
    reopened,
    vector,
    with_vector,
    write,
)


def kill(folder: Path) -> None:
    """What SIGKILL does to the store in ``folder``: no flush, no sync; the kernel closes its file."""
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the descriptor of this very listing is gone by now
            if descriptor.readlink() == folder / RESULTS:
                os.close(int(descriptor.name))


def read_whole(folder: Path, scratch: Path) -> dict[str, Any]:
    """The same from the log alone, in a copy without a checkpoint."""
    scratch.mkdir(exist_ok=True)
    (scratch / CHECKPOINT).unlink(missing_ok=True)
    shutil.copy(folder / RESULTS, scratch / RESULTS)
    return reopened(scratch)


MIXED = [record(0), record(1, None), record(2, "né"), record(3, None, kind="media"), record(1)]


# What a row's record means


def test_records_count_once_written_and_the_checkpoint_comes_later(tmp_path: Path) -> None:
    assert list(read_newest(tmp_path / RESULTS)) == []
    ledger = Ledger(tmp_path)
    assert list(read_newest(tmp_path / RESULTS)) == []
    ledger.write([line_of(record(0))])
    assert (ledger.totals.ok, indexes(tmp_path)) == (1, [0])
    assert not (tmp_path / CHECKPOINT).exists()
    ledger.close()
    assert (tmp_path / CHECKPOINT).exists()
    assert (tmp_path / RESULTS).stat().st_mode & 0o111 == 0


def test_newest_record_of_a_row_decides(tmp_path: Path) -> None:
    write(tmp_path, record(0), record(1, None), record(2), record(1, "late"), record(2, None))
    write(tmp_path, record(7, None, kind="media"), record(7, None, kind="timeout"))
    write(tmp_path, *(record(index, None, kind="empty") for index in (8, 9)), record(8))
    found = reopened(tmp_path)
    assert found["completed"] == [0, 1, 8]
    assert found["failed_by_kind"] == {"template": [2], "timeout": [7], "empty": [9]}
    assert (found["records"], found["tokens"]) == (10, (12, 8))
    newest = {r["index"]: (r["status"], r["text"]) for r in read_newest(tmp_path / RESULTS)}
    failed = ("failed", None)
    ok = ("ok", "yes")
    assert newest == {0: ok, 1: ("ok", "late"), 2: failed, 7: failed, 8: ok, 9: failed}


def test_generations_of_a_row_are_known_until_it_has_its_record(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.write([generation(0), generation(1)])
    ledger.write([line_of(record(0))])
    assert [len(ledger.steps.known(index)) for index in (0, 1)] == [0, 1]
    ledger.close()


# Torn tails and garbage


def test_torn_tail_is_redone_and_kept_under_a_number_of_its_own(tmp_path: Path) -> None:
    whole = write(tmp_path, record(0), record(1))
    tails = [
        b'{"index":2,"id":"q2","status":"o',
        line_of(record(2)).raw[:-1],
    ]  # the newline is missing
    for number, torn in enumerate(tails, start=1):
        with (tmp_path / RESULTS).open("ab") as file:
            file.write(torn)
        ledger = Ledger(tmp_path)
        assert f"ended with {len(torn)} broken bytes" in ledger.messages[0]
        assert (tmp_path / f"{RESULTS}.torn-{number}").read_bytes() == torn
        assert (tmp_path / RESULTS).read_bytes() == whole
        assert not ledger.totals.is_settled(2)
        ledger.close()
    write(tmp_path, record(2))
    assert indexes(tmp_path) == [0, 1, 2]


GARBAGE = {
    "NULs": bytes(4096),
    "NULs and a newline": bytes(100) + b"\n",
    "noise": bytes(range(256)) * 4,
    "an empty line": b"\n",
    "half a record": b'{"index":9,"id":"q9","status":"ok","att\n',
    "a record's head and its end": b'{"index":9,"id":"q9",\0\0\0\0"input_hash":"0"}\n',
    "two records run together": b'{"index":9,"id":"q9","sta{"index":8,"status":"ok","usage":null}\n',
    "JSON that is no record": b'{"a":1}\n[1,2]\n"text"\nnull\n3\n',
    "an index that is text": b'{"index":"9","status":"ok"}\n',
    "an index below zero": b'{"index":-1,"status":"ok"}\n',
    "an index past 32 bits": b'{"index":99999999999,"status":"ok"}\n',
    "usage that is text": b'{"index":9,"status":"ok","usage":"many"}\n',
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_garbage_tail_is_cut_off_and_kept(tmp_path: Path, garbage: bytes) -> None:
    whole = write(tmp_path, record(0), record(1))
    (tmp_path / RESULTS).write_bytes(whole + garbage)
    ledger = Ledger(tmp_path)
    ledger.write([line_of(record(2))])
    ledger.close()
    assert reopened(tmp_path)["completed"] == [0, 1, 2]
    assert indexes(tmp_path) == [0, 1, 2]
    assert (tmp_path / f"{RESULTS}.torn-1").read_bytes() == garbage


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_before_whole_records_is_left_to_a_repair(tmp_path: Path, name: str) -> None:
    garbage = GARBAGE[name].removesuffix(b"\n") + b"\n"
    whole = write(tmp_path, *(record(index) for index in range(4)))
    lines = whole.splitlines(keepends=True)
    (tmp_path / RESULTS).write_bytes(b"".join([*lines[:2], garbage, *lines[2:]]))
    (tmp_path / CHECKPOINT).unlink()
    if name != "usage that is text":  # an export of a run that crashed and was not opened since
        assert indexes(tmp_path) == [0, 1, 2, 3]
    place = len(lines[0] + lines[1])
    with pytest.raises(StoreError, match=rf"the record at byte {place} is damaged.*--repair"):
        Ledger(tmp_path)
    assert len((tmp_path / RESULTS).read_bytes()) == len(whole + garbage)


@pytest.mark.slow
def test_log_cut_at_any_byte_keeps_every_whole_record(tmp_path: Path) -> None:
    made = MIXED[:3]
    log = write(tmp_path / "whole", *made)
    folder = tmp_path / "cut"
    for size in range(len(log) + 1):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / RESULTS).write_bytes(log[:size])
        n_whole = log[:size].count(b"\n")
        expected = Totals()
        for one in made[:n_whole]:
            expected.add(one)

        assert indexes(folder) == [one.index for one in made[:n_whole]], size
        ledger = Ledger(folder)
        assert facts(ledger.totals) == facts(expected), size
        ledger.write([line_of(record(99))])
        kill(folder)
        lines = list(read_lines(folder / RESULTS))
        assert [line.record and line.record.index for line in lines] == [
            *(one.index for one in made[:n_whole]),
            99,
        ], size


# The checkpoint is a cache


def sealed(**changes: Any) -> Any:
    """A checkpoint with some keys replaced, as if a run had written it; None takes a key away."""

    def damage(content: bytes) -> bytes:
        table = orjson.loads(content) | changes | {"seal": None}
        content = orjson.dumps({key: value for key, value in table.items() if value is not None})
        return content[:-1] + b',"seal":%d}' % crc32(content)

    return damage


CHECKPOINT_DAMAGE = {
    "missing": lambda content: None,
    "empty": lambda content: b"",
    "cut in half": lambda content: content[: len(content) // 2],
    "NULs": lambda content: bytes(len(content)),
    "not an object": lambda content: b"[]",
    "another offset": lambda content: content.replace(b'"offset":', b'"offset":1'),
    "version from the future": sealed(version=2),
    "no offset": sealed(offset=None),
    "range below zero": sealed(completed=[[-1, 0]]),
    "ranges are text": sealed(completed="0-2"),
    "kinds are a list": sealed(failed_by_kind=[]),
}


@pytest.mark.parametrize("damage", CHECKPOINT_DAMAGE.values(), ids=CHECKPOINT_DAMAGE)
def test_damaged_checkpoint_changes_nothing(tmp_path: Path, damage: Any) -> None:
    folder = tmp_path / "run"
    write(folder, *MIXED)
    expected = read_whole(folder, tmp_path / "log-alone")
    assert reopened(folder) == expected

    content = damage((folder / CHECKPOINT).read_bytes())
    (folder / CHECKPOINT).unlink()
    if content is not None:
        (folder / CHECKPOINT).write_bytes(content)
    with (folder / RESULTS).open("ab") as file:  # what the killed process flushed after it
        file.write(line_of(record(8)).raw)
    ledger = Ledger(folder)
    assert ledger.totals.ok == expected["ok"] + 1
    ledger.close()
    assert reopened(folder) == read_whole(folder, tmp_path / "log-alone")


def test_any_changed_byte_before_the_checkpoint_is_noticed(tmp_path: Path) -> None:
    write(tmp_path, *MIXED)
    whole = write(tmp_path, record(7))
    for place in range(0, len(whole), 7):
        changed = bytearray(whole)
        changed[place] ^= 1
        (tmp_path / RESULTS).write_bytes(changed)
        with pytest.raises(StoreError, match=r"results\.jsonl: .*verify --repair"):
            Ledger(tmp_path)
        with pytest.raises(StoreError, match=r"results\.jsonl: .*verify --repair"):
            check_log(tmp_path)
    (tmp_path / RESULTS).write_bytes(whole)
    assert reopened(tmp_path)["completed"] == [0, 1, 2, 7]


def test_what_was_cut_off_before_the_checkpoint_is_noticed(tmp_path: Path) -> None:
    whole = write(tmp_path, *MIXED)
    for size in range(0, len(whole), 11):
        (tmp_path / RESULTS).write_bytes(whole[:size])
        with pytest.raises(StoreError, match=r"results\.jsonl: .*verify --repair"):
            Ledger(tmp_path)
    (tmp_path / RESULTS).write_bytes(whole[: whole.index(b"\n") + 1])
    with pytest.raises(StoreError, match=rf"has \d+ bytes, but had {len(whole)} at the last"):
        Ledger(tmp_path)


def test_checkpoint_says_what_the_contract_promises(tmp_path: Path) -> None:
    log = write(tmp_path, *MIXED)
    found = orjson.loads((tmp_path / CHECKPOINT).read_bytes())
    assert found["version"] == 1
    assert found["offset"] == len(log)
    assert found["completed"] == [[0, 2]]
    assert found["failed"] == [[3, 3]]
    assert found["counts"] | {"records": 5, "ok": 3, "failed": 1} == found["counts"]


def test_checkpoint_is_replaced_in_one_step(tmp_path: Path) -> None:
    """A reader that opened the old one still reads all of it."""
    (tmp_path / f"{CHECKPOINT}.tmp").write_bytes(b'{"version":1,"off')  # a killed process left it
    ledger = Ledger(tmp_path)
    ledger.write([line_of(record(0))])
    ledger.sync()
    with (tmp_path / CHECKPOINT).open("rb") as old:
        ledger.write([line_of(record(1))])
        ledger.sync()
        assert orjson.loads(old.read())["completed"] == [[0, 0]]
    ledger.close()
    assert orjson.loads((tmp_path / CHECKPOINT).read_bytes())["completed"] == [[0, 1]]
    assert sorted(path.name for path in tmp_path.iterdir()) == [CHECKPOINT, RESULTS]


def test_nothing_new_leaves_the_checkpoint_alone(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.write([line_of(record(0))])
    ledger.sync()
    (tmp_path / CHECKPOINT).unlink()
    assert ledger.sync() == 0.0
    assert not (tmp_path / CHECKPOINT).exists()
    kill(tmp_path)


# A full disk

LINES: dict[str, Callable[[int], RecordLine | GenerationLine]] = {
    "records": lambda index: line_of(record(index, "x" * 50)),
    "generations": lambda index: generation(index, "x" * 50),
    "vectors": with_vector,
    "long vectors": lambda index: with_vector(index, 400),
}


@pytest.mark.parametrize(
    ("what", "log", "limit"),
    [
        ("records", RESULTS, 10_000),
        ("records", RESULTS, 10_240),
        ("generations", STEPS, 10_001),
        ("vectors", RESULTS, 4000),
        ("vectors", RESULTS, 6001),
        ("vectors", RESULTS, 20_000),
        ("long vectors", RESULTS, 20_001),
    ],
)
def test_full_disk_leaves_whole_lines_and_the_ledger_outlives_it(
    tmp_path: Path, what: str, log: str, limit: int
) -> None:
    ledger, flushed, made = Ledger(tmp_path), 0, LINES[what]

    def fill() -> None:
        nonlocal flushed
        for first in range(0, 1000, 7):
            ledger.write(map(made, range(first, first + 7)))
            ledger.flush()
            flushed = first + 7

    said = r"File too large.*; every .*run the same command again"
    with full_disk(limit), pytest.raises(StoreError, match=said):
        fill()
    assert flushed == (ledger.steps.spent.generations or ledger.totals.ok) > 0
    content = (tmp_path / log).read_bytes()
    assert len(content) <= limit
    assert content.endswith(b"\n")
    found = [orjson.loads(line)["index"] for line in content.splitlines()]
    assert found == list(range(flushed))
    ledger.sync()  # records that waited when the disk was full are written after all
    if what != "generations":
        flushed += 7
        assert indexes(tmp_path) == list(range(flushed))
    ledger.write(map(made, range(flushed, 1000)))
    ledger.close()
    again = Ledger(tmp_path)
    assert not again.messages
    assert (again.steps.spent.generations or again.totals.ok) == 1000
    again.close()
    vectors = Vectors(tmp_path)
    for one in read_newest(tmp_path / RESULTS) if "vectors" in what else ():
        found_vector = vectors.of(one)
        assert found_vector.tolist() == vector(one["index"], len(found_vector)).tolist()


def test_checkpoint_that_can_not_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.write([line_of(record(0))])
    ledger.sync()
    before = (tmp_path / CHECKPOINT).read_bytes()
    ledger.write([line_of(record(1))])
    with (
        full_disk(100),
        pytest.raises(StoreError, match=r"checkpoint\.json: can't write: File too large"),
    ):
        ledger.sync()
    assert (tmp_path / CHECKPOINT).read_bytes() == before
    kill(tmp_path)
    assert reopened(tmp_path)["completed"] == [0, 1]


# Any order of events

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 6), st.booleans()),
        st.tuples(st.sampled_from(["sync", "close", "kill", "tear"])),
    ),
    max_size=30,
)


@pytest.mark.slow
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(steps=EVENTS)
def test_store_agrees_with_a_dict_whatever_happens(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[Any, ...]]
) -> None:
    folder = tmp_path_factory.mktemp("store")
    model: dict[int, str] = {}
    ledger, n_written = Ledger(folder), 0
    for number, (verb, *what) in enumerate(steps):
        if verb == "append":
            index, ok = what
            text = f"step {number}" if ok else None
            ledger.write([line_of(record(index, text))])
            model[index], n_written = text or "", n_written + 1
            continue
        if verb in ("sync", "close"):
            getattr(ledger, verb)()
        else:
            kill(folder)
            if verb == "tear":
                with (folder / RESULTS).open("ab") as file:
                    file.write(line_of(record(3, "torn")).raw[: 5 + number])
        if verb != "sync":
            ledger = Ledger(folder)
        assert set(ledger.totals.completed) == {i for i, text in model.items() if text}
        assert set(ledger.totals.failed_rows) == {i for i, text in model.items() if not text}
        assert ledger.totals.records == n_written
    ledger.close()
    found = [(r["index"], r["text"] or "") for r in read_newest(folder / RESULTS)]
    assert found == sorted(model.items())
    assert len(NewestLog(folder / RESULTS).rows) == len(model)
    shutil.rmtree(folder)
