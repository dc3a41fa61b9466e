"""``steps.jsonl``: what a kill or damage from outside leaves of it, and what the next start
makes of that."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from typing import Any

import orjson
import pytest

from batchkit.storage.ledger import Ledger
from batchkit.storage.log import STEPS, read_generations
from batchkit.storage.steps import line_with
from tests.support.chat_server import serving
from tests.support.command_line import batchkit
from tests.support.dry_runs import status, verify
from tests.support.rollouts import (
    RUN,
    SOLVE,
    THREE,
    calls,
    cut_back,
    records,
    run,
    write,
)

pytestmark = [pytest.mark.usefixtures("in_an_empty_folder"), pytest.mark.slow]

LEDGER = RUN / STEPS
CHECKPOINT = RUN / "checkpoint.json"
N_ROWS = 6
KINDS = pytest.mark.parametrize(("solve", "n"), [(None, 3), (SOLVE, 5)], ids=["steps", "rollout"])


def prepare(solve: str | None = None, server: Any = None, **tables: Any) -> None:
    """One generation at a time: the first of each row, then the second of each, and so on."""
    if solve is None:
        tables["steps"] = THREE
    write(solve, N_ROWS, server, **({"run": {"max_in_flight": 1}} | tables))


def lines() -> list[bytes]:
    return LEDGER.read_bytes().splitlines(keepends=True)


def each_once(n: int) -> bool:
    """Whether every row has ``n`` generations, each recorded once."""
    found = calls(RUN)
    return set(found.values()) == {1} and Counter(key[0] for key in found) == dict.fromkeys(
        range(N_ROWS), n
    )


@KINDS
def test_a_row_goes_on_where_a_kill_at_any_generation_left_it(solve: str | None, n: int) -> None:
    with serving(lambda text, body: f"<{text}>") as server:
        prepare(solve, server)
        assert run().exit_code == 0
        answers, asked = [record["text"] for record in records()], Counter(server.answered)
        for left in (0, 1, n - 1, n, n + 2, N_ROWS * n - 1):
            before = cut_back(RUN, left)
            server.answered.clear()
            assert run().exit_code == 0
            assert LEDGER.read_bytes().startswith(before)
            assert each_once(n)
            assert server.answered.total() == N_ROWS * n - left
            assert server.answered <= asked
            assert [record["text"] for record in records()] == answers
    assert verify() | {"generations": N_ROWS * n, "generations_lost": 0} == verify()


@pytest.mark.parametrize("torn", [b'{"index":1,"ste', b"\0" * 700, b'{"index":0}', b"\n"])
def test_torn_generation_is_asked_for_again(torn: bytes) -> None:
    prepare()
    run()
    before = cut_back(RUN, 4)
    with LEDGER.open("ab") as ledger:
        ledger.write(torn)
    assert verify()["torn_bytes"] == len(torn)
    found = run()
    assert found.exit_code == 0, found.stderr
    if not torn.endswith(b"\n"):
        assert f"{STEPS} ended with {len(torn)} broken bytes, which were moved" in found.stderr
        assert (RUN / f"{STEPS}.torn-1").read_bytes() == torn
    assert LEDGER.read_bytes().startswith(before)
    counts = {"generations": N_ROWS * 3, "generations_lost": 0, "generations_duplicate": 0}
    assert verify() | counts == verify()


@KINDS
def test_damaged_generation_of_an_open_row_is_asked_for_again(solve: str | None, n: int) -> None:
    """The others of the row answer what is asked again, and nothing else: the new answer differs."""
    numbers = iter(range(1000))
    with serving(lambda text, body: f"<{text} {next(numbers)}>") as server:
        prepare(solve, server)
        run()
        found = cut_back(RUN, N_ROWS + 3).splitlines(keepends=True)
        found[1] = b"\x07" * (len(found[1]) - 1) + b"\n"
        LEDGER.write_bytes(b"".join(found))
        assert verify()["torn_bytes"] == len(found[1])
        assert f"{STEPS}: the record at byte {len(found[0])} is damaged" in run().stderr
        assert batchkit("verify", "--repair").exit_code == 0
        assert (RUN / f"{STEPS}.before-1").read_bytes() == b"".join(found)
        server.answered.clear()
        ended = run()
        assert ended.exit_code == 0, ended.stderr
        left = N_ROWS * n - (N_ROWS + 3)
        assert server.answered.total() == left + 2  # what is lost, and what followed from it
    assert {record["status"] for record in records()} == {"ok"}
    assert verify()["generations_duplicate"] == verify()["generations_lost"] == 0
    assert batchkit("verify").exit_code == 0


def cut_in_half() -> None:
    LEDGER.write_bytes(LEDGER.read_bytes()[: LEDGER.stat().st_size // 2])


def shifted() -> None:
    LEDGER.write_bytes(b"x" + LEDGER.read_bytes())


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut_in_half, "is damaged"),
        (LEDGER.unlink, "has 0 bytes, but had"),
        (shifted, "the record at byte 0 is damaged"),
    ],
)
def test_file_that_is_not_that_of_the_checkpoint_is_refused_until_it_is_repaired(
    damage: Any, said: str
) -> None:
    prepare()
    run("--limit", "4")
    answers = [record["text"] for record in records()]
    damage()
    refused = run()
    assert (refused.exit_code, "Traceback" in refused.stderr) == (1, False)
    assert f"{STEPS}: " in refused.stderr
    assert said in refused.stderr
    assert "verify --repair" in refused.stderr
    audit = batchkit("verify", "--json")
    assert audit.exit_code == 1
    assert said in audit.json["damage"]
    assert batchkit("verify", "--repair").exit_code == 0
    assert verify()["generations_lost"] == 0
    assert run().exit_code == 0
    assert [record["text"] for record in records()][:4] == answers
    assert batchkit("verify").exit_code == 0


def test_lost_generation_of_a_finished_row_is_found_and_its_answer_kept() -> None:
    prepare()
    run()
    before = records()
    found = lines()
    LEDGER.write_bytes(b"".join([found[0], b"?" * (len(found[1]) - 1) + b"\n", *found[2:]]))
    audit = batchkit("verify", "--json")
    assert audit.exit_code == 1
    expected = {"generations": 17, "generations_lost": 1, "generations_lost_rows": [1]}
    assert audit.json | expected | {"torn_bytes": len(found[1])} == audit.json
    repaired = batchkit("verify", "--repair")
    assert (
        "1 rows have lost generations; the rows' answers are kept"
        in repaired.stdout + repaired.stderr
    )
    assert (RUN / f"{STEPS}.before-1").exists()
    assert batchkit("verify").exit_code == 0
    after = records()
    assert after[1] == before[1] | {"generations_lost": 1}
    assert [*after[:1], *after[2:]] == [*before[:1], *before[2:]]


def test_generations_lost_behind_the_checkpoint_are_said_counted_and_noted() -> None:
    prepare()
    run()
    answers, tokens = [record["text"] for record in records()], status()["completion_tokens"]
    CHECKPOINT.unlink()  # as if none had been written yet
    LEDGER.write_bytes(b"".join(lines()[:-4]))
    for said in (True, False):
        found = run()
        assert found.exit_code == 0
        assert (f"{STEPS} has lost 4 generations" in found.stderr) == said
        assert status()["completion_tokens"] == tokens
        assert [record["text"] for record in records()] == answers
        assert sum(record.get("generations_lost", 0) for record in records()) == 4
        assert batchkit("verify").exit_code == 0
        CHECKPOINT.unlink()


def test_repair_finds_both_generations_where_the_newline_between_them_was_lost() -> None:
    prepare()
    run()
    before = sorted(lines())
    LEDGER.write_bytes(LEDGER.read_bytes().replace(b"}\n{", b"} {", 1))
    assert verify()["generations"] == 16
    batchkit("verify", "--repair")
    assert sorted(lines()) == before
    assert batchkit("verify").exit_code == 0


def test_generation_that_is_there_twice_is_found_and_set_aside() -> None:
    prepare()
    run()
    before = LEDGER.read_bytes()
    with LEDGER.open("ab") as ledger:
        ledger.write(lines()[7])
    audit = batchkit("verify", "--json")
    assert audit.exit_code == 1
    expected = {"generations_duplicate": 1, "generations_duplicate_rows": [1], "generations": 19}
    assert audit.json | expected == audit.json
    for _ in range(2):
        batchkit("verify", "--repair")
        assert LEDGER.read_bytes() == before
        assert batchkit("verify").exit_code == 0
    assert not (RUN / f"{STEPS}.before-2").exists(), "what is sound is left alone"


def test_checkpoint_says_where_the_first_open_row_begins() -> None:
    prepare()
    run("--limit", "4")
    steps = orjson.loads(CHECKPOINT.read_bytes())["steps"]
    assert steps["first"] == steps["end"] == LEDGER.stat().st_size
    assert (steps["generations"], steps["completion_tokens"]) == (12, 72)
    assert run().exit_code == 0
    assert (status()["generations"], status()["completion_tokens"]) == (18, 108)


def test_a_generation_that_ends_after_its_row_is_not_kept_in_memory() -> None:
    prepare()
    run()
    with closing(Ledger(RUN)) as ledger:
        there = [*read_generations(RUN)]
        ledger.write(line_with(line.record) for line in there if line.record is not None)
        assert ledger.steps.spent.generations == 2 * 3 * N_ROWS
        assert [ledger.steps.known(index) for index in range(N_ROWS)] == [[]] * N_ROWS


def test_status_counts_generations_of_rows_under_way() -> None:
    prepare()
    run()
    cut_back(RUN, 14)
    found = status()
    assert (found["ok"], found["generations"], found["completion_tokens"]) == (2, 14, 14 * 6)
    assert "generations: 14" in batchkit("status").stdout
