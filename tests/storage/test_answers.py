"""Answers are found by the hash of their request, in a log of any length."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from hashlib import blake2b
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchkit.errors import StoreError
from batchkit.storage.answers import INDEX, AnswerIndex, SeenHashes
from batchkit.storage.lines import encoded
from tests.support.full_disk import full_disk
from tests.support.records import generation, record

FIRST_SLOTS = 4096
FULL = FIRST_SLOTS // 2  # entries with which a table of this size is still used


def hash_of(name: object) -> str:
    return blake2b(str(name).encode(), digest_size=16).hexdigest()


def line(
    index: int,
    request_hash: str = "",
    text: str | None = "yes",
    fields: dict[str, Any] | None = None,
) -> bytes:
    """An ok record of a log; a failed one if ``text`` is None."""
    found = record(index, text, fields=fields)
    found.request_hash = request_hash or hash_of(index)
    return encoded(found)


def lines(indexes: range) -> bytes:
    return b"".join(line(index) for index in indexes)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "results.jsonl"


@pytest.fixture
def opened(log: Path) -> Iterator[Callable[..., AnswerIndex]]:
    """Opens an index of the log, after more lines were written to it."""
    held: list[AnswerIndex] = []

    def open_one(more: bytes = b"") -> AnswerIndex:
        append(log, more)
        held.append(AnswerIndex(log))
        return held[-1]

    yield open_one
    for index in held:
        index.close()


Opened = Callable[..., AnswerIndex]


def append(log: Path, more: bytes) -> None:
    with log.open("ab") as file:
        file.write(more)


def made(log: Path, more: bytes) -> None:
    """An index is made, by a process that ends."""
    append(log, more)
    AnswerIndex(log).close()


def found(index: AnswerIndex, request_hash: str) -> int | None:
    """The row whose answer is found."""
    line = index.find(request_hash)
    return None if line is None else int(line["index"])


def missing(index: AnswerIndex, indexes: range) -> list[int]:
    return [n for n in indexes if found(index, hash_of(n)) != n]


def slots(log: Path) -> int:
    return (log.with_name(INDEX).stat().st_size - 64) // 16


# Finding


def test_every_answer_is_found_and_nothing_else(opened: Opened) -> None:
    index = opened(lines(range(1000)))
    assert missing(index, range(1000)) == []
    assert [found(index, hash_of(n)) for n in range(1000, 2000)] == [None] * 1000


def test_the_whole_line_is_returned(opened: Opened) -> None:
    raw = line(7, text="grüße\n", fields={"status": "failed", "q": [1, None]})
    assert opened(line(6) + raw + line(8)).find(hash_of(7)) == orjson.loads(raw)


def test_generations_are_found_too(opened: Opened) -> None:
    index = opened(generation(3).raw)
    assert found(index, "0" * 32) == 3


@pytest.mark.parametrize("text", [None, "", " \n"], ids=["failed", "empty", "blank"])
def test_a_line_without_an_answer_is_not_found_and_hides_none(
    log: Path, opened: Opened, text: str | None
) -> None:
    asked = hash_of("x")
    without = line(0, asked, text, {"status": "ok"})
    index = opened(without)
    assert found(index, asked) is None
    append(log, line(1, asked) + without + line(2, asked))
    index.update()
    assert found(index, asked) == 1


def test_the_hash_of_a_line_is_not_taken_from_its_fields(opened: Opened) -> None:
    fields = {"status": "failed", "request_hash": hash_of("y")}
    index = opened(line(0, "", '"request_hash":"no"', fields) + line(1, "", None, fields))
    assert found(index, hash_of("y")) is None
    assert found(index, hash_of(0)) == 0


def test_a_torn_last_line_is_found_once_it_is_whole(log: Path, opened: Opened) -> None:
    raw = line(1)
    index = opened(line(0) + raw[:-1])
    assert [found(index, hash_of(n)) for n in range(2)] == [0, None]
    append(log, b"\n")
    index.update()
    assert [found(index, hash_of(n)) for n in range(2)] == [0, 1]


def test_a_torn_line_may_be_replaced(log: Path, opened: Opened) -> None:
    index = opened(line(0) + line(1)[:-9])
    os.truncate(log, len(line(0)))
    append(log, line(2))
    index.update()
    assert [found(index, hash_of(n)) for n in range(3)] == [0, None, 2]


@pytest.mark.parametrize("size", [2**14 - 1, 2**14, 2**14 + 1, 2**18 + 1])
def test_a_line_may_be_longer_than_what_is_read_first(opened: Opened, size: int) -> None:
    long = line(1, text="x" * (size - len(line(1, text="x")) + 1))
    assert len(long) == size
    index = opened(line(0) + long + line(2))
    assert missing(index, range(3)) == []
    assert index.find(hash_of(1)) == orjson.loads(long)


def test_of_two_hashes_with_the_same_first_8_bytes_none_gets_the_answer_of_the_other(
    opened: Opened,
) -> None:
    one, other = hash_of("x"), hash_of("x")[:16] + hash_of("y")[:16]
    index = opened(line(0, one))
    assert found(index, other) is None
    index = opened(line(1, other))
    assert found(index, one) == 0
    assert found(index, other) in (1, None)


# Growing


def test_the_table_grows_over_several_sizes(log: Path, opened: Opened) -> None:
    index, sizes = opened(b""), []
    for begin in range(0, 12_000, 1500):
        append(log, lines(range(begin, begin + 1500)))
        index.update()
        sizes.append(slots(log) // FIRST_SLOTS)
    assert (sizes[0], sizes[-1]) == (1, 16)
    assert missing(index, range(0, 12_000, 7)) == []


def test_copies_of_an_answer_take_no_room(log: Path, opened: Opened) -> None:
    index = opened(b"".join(line(n, hash_of("x")) for n in range(4 * FULL)))
    assert slots(log) == FIRST_SLOTS
    assert found(index, hash_of("x")) == 0


def test_an_index_is_continued_by_the_next_process(log: Path, opened: Opened) -> None:
    made(log, lines(range(100)))
    broken = log.read_bytes()[:-1000].replace(b'"ok"', b'"no"') + log.read_bytes()[-1000:]
    log.write_bytes(broken)  # is not read again
    index = opened(lines(range(100, 200)))
    assert missing(index, range(98, 200)) == []


def test_memory_does_not_grow_with_the_log(log: Path, opened: Opened) -> None:
    """Python's own blocks are counted, before and after an index of 20 times as many lines."""
    made(log, lines(range(500)))
    before = sys.getallocatedblocks()
    index = opened(lines(range(500, 10_000)))
    assert sys.getallocatedblocks() - before < 500
    assert found(index, hash_of(9_999)) == 9_999


# Another log, another process


def test_a_log_that_was_replaced_is_indexed_anew(log: Path, opened: Opened) -> None:
    made(log, lines(range(100)))
    log.unlink()
    index = opened(lines(range(200, 400)))
    assert missing(index, range(200, 400)) == []
    assert [found(index, hash_of(n)) for n in range(100)] == [None] * 100


@pytest.mark.parametrize("left", [0, 50])
def test_a_log_that_became_shorter_is_indexed_anew(log: Path, opened: Opened, left: int) -> None:
    made(log, lines(range(100)))
    os.truncate(log, len(lines(range(left))))
    index = opened()
    assert missing(index, range(left)) == []
    assert found(index, hash_of(99)) is None


@pytest.mark.parametrize(
    "content", [b"", b"x" * 10, b"answers1" + bytes(99), b"answers1" + b"\xff" * 200]
)
def test_a_damaged_index_is_made_again(log: Path, opened: Opened, content: bytes) -> None:
    log.with_name(INDEX).write_bytes(content)
    assert missing(opened(lines(range(10))), range(10)) == []


def test_an_index_that_was_cut_is_made_again(log: Path, opened: Opened) -> None:
    made(log, lines(range(10)))
    os.truncate(log.with_name(INDEX), 1000)
    assert missing(opened(), range(10)) == []


def test_a_process_that_does_not_get_the_lock_has_an_index_of_its_own(
    log: Path, opened: Opened
) -> None:
    first = opened(lines(range(10)))
    then = log.with_name(INDEX).read_bytes()
    second = opened(lines(range(10, 20)))
    assert missing(second, range(20)) == []
    assert log.with_name(INDEX).read_bytes() == then
    first.update()
    assert missing(first, range(20)) == []


def test_a_lock_is_free_after_close(log: Path, opened: Opened) -> None:
    for end in range(10, 40, 10):
        made(log, lines(range(end - 10, end)))
        with closing(AnswerIndex(log)):
            pass
    assert int.from_bytes(log.with_name(INDEX).read_bytes()[16:24], "little") == 30


def test_a_folder_that_is_read_only_is_not_written(log: Path, opened: Opened) -> None:
    append(log, lines(range(10)))
    log.with_name(INDEX).symlink_to(log.with_name("other"))  # refused to root, too
    index = opened()
    assert missing(index, range(10)) == []
    assert {path.name for path in log.parent.iterdir()} == {INDEX, log.name}


def test_a_log_that_is_missing_is_an_error(log: Path) -> None:
    with pytest.raises(StoreError, match="can't be read"):
        AnswerIndex(log)


def test_a_full_disk_is_an_error_that_names_the_file(log: Path) -> None:
    append(log, lines(range(10)))
    with full_disk(1000), pytest.raises(StoreError, match=rf"{log}: can't write {INDEX}"):
        AnswerIndex(log)


def test_kills_while_an_index_is_made_leave_no_table_that_is_too_full(
    log: Path, opened: Opened
) -> None:
    for number in range(1, 4):
        append(log, lines(range((number - 1) * 1900, number * 1900)))
        killed_at_write(1890, log)
    index = opened()
    assert missing(index, range(3 * 1900)) == []
    assert slots(log) > 2 * 3 * 1900
    assert found(index, hash_of("none")) is None


def killed_at_write(number: int, log: Path) -> None:
    """Make an index in a process that dies when it writes for the so-manieth time."""
    if (child := os.fork()) == 0:
        real, left = os.pwrite, number

        def pwrite(*args: Any) -> int:
            nonlocal left
            if not (left := left - 1):
                os._exit(9)
            return real(*args)

        os.pwrite = pwrite
        try:
            AnswerIndex(log)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


# SeenHashes


@given(st.integers(0, 2**32), st.lists(st.integers(0, 300), max_size=400))
def test_a_set_of_hashes_is_a_set(seed: int, asked: list[int]) -> None:
    draw = random.Random(seed)
    hashes = [draw.randbytes(16).hex() for _ in range(301)]
    seen, there = SeenHashes(), set[str]()
    for number in asked:
        request_hash = hashes[number]
        assert seen.add(request_hash) == (request_hash in there)
        there.add(request_hash)


def test_a_set_of_hashes_grows() -> None:
    draw = random.Random(3)
    hashes = [draw.randbytes(16).hex() for _ in range(100_000)]
    seen = SeenHashes()
    assert not any(map(seen.add, hashes))
    assert all(map(seen.add, hashes))


def test_hashes_that_begin_or_end_alike_are_told_apart() -> None:
    seen = SeenHashes()
    alike = ["0" * 32, "0" * 8 + "1" * 24, "1" * 8 + "0" * 24, "f" * 32, "f" * 15 + "e" + "f" * 16]
    assert [seen.add(one) for one in alike] == [False] * 5
    assert [seen.add(one) for one in alike] == [True] * 5


def test_the_answers_of_a_log_are_added(log: Path) -> None:
    append(log, line(0) + line(1, text=None) + line(2))
    seen = SeenHashes()
    seen.add_answers_of(log)
    assert [seen.add(hash_of(n)) for n in range(3)] == [True, False, True]


def test_a_missing_log_has_no_answers(log: Path) -> None:
    seen = SeenHashes()
    seen.add_answers_of(log)
    assert not seen.add(hash_of(0))
