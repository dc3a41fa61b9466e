"""Generations that were paid for once are used by whatever comes later: a retry, a changed job, a merge,
a larger budget."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from batchkit.storage.log import STEPS
from tests.support.chat_server import ChatServer, Refused, error, serving
from tests.support.command_line import batchkit
from tests.support.dry_runs import shard, status, verify
from tests.support.rollouts import (
    RUN,
    SOLVE,
    THREE,
    calls,
    cut_back,
    generations,
    records,
    run,
    write,
)
from tests.support.rows import read_jsonl

pytestmark = [pytest.mark.usefixtures("in_an_empty_folder"), pytest.mark.slow]

N_ROWS = 6
ROWS = [{"key": f"k{n}", "q": f"q{n}"} for n in range(N_ROWS)]
BY_KEY = {"input": {"id": "key"}}
ONE_AT_A_TIME = {"run": {"max_in_flight": 1}}
REVISED = [*THREE[:2], {**THREE[2], "prompt": {"user": "Better: {{ steps.judge.text }}"}}]


def asked(server: ChatServer) -> Counter[str]:
    """How often each kind of prompt was asked for since the last time, by its first word."""
    found = Counter[str]()
    for text, count in server.answered.items():
        found[text.split()[0].strip(":")] += count
    server.answered.clear()
    return found


def is_sound() -> bool:
    return batchkit("verify").exit_code == 0


# --on-change requeue


def test_generations_move_with_their_rows() -> None:
    with serving(lambda text, body: f"<{text}>") as server:
        write(None, ROWS, server, steps=THREE, **BY_KEY)
        run()
        before = {record["id"]: record["text"] for record in records()}
        asked(server)
        write(None, [{"key": "new", "q": "new"}, *ROWS[:4]], server, steps=THREE, **BY_KEY)
        found = run("--on-change", "requeue")
        assert "4 records kept, 2 rows to run again" in found.stderr
        assert asked(server) == {"Answer": 1, "Judge": 1, "Revise": 1}
    ids = ["new", "k0", "k1", "k2", "k3"]
    assert [record["id"] for record in records()] == ids
    assert all(before.get(r["id"], r["text"]) == r["text"] for r in records())
    assert {(line["index"], line["id"]) for line in generations()} == {*enumerate(ids)}
    assert set(calls(RUN).values()) == {1}
    assert (verify()["generations"], is_sound()) == (15, True)
    assert len(read_jsonl(RUN / f"{STEPS}.before-1")) == 18


@pytest.mark.parametrize("moved", [False, True], ids=["", "rows moved"])
@pytest.mark.parametrize(
    ("solve", "changed", "left", "kept", "again"),
    [
        (None, {"steps": REVISED}, 18, 18, {"Better": 6}),
        (None, {"steps": REVISED}, 9, 9, {"Better": 6, "Judge": 3}),
        (SOLVE, {}, 30, 30, {"Check": 6}),
        # Another model would not give them.
        (None, {"steps": REVISED, "sampling": {"temperature": 0.5}}, 18, 0, {"Answer": 6, "Judge": 6, "Better": 6}),
    ],
    ids=["last step", "last step of a killed run", "function", "sampling"],
)  # fmt: skip
def test_a_changed_job_asks_only_for_what_follows_from_the_change(
    solve: str | None,
    changed: dict[str, Any],
    left: int,
    kept: int,
    again: dict[str, int],
    moved: bool,
) -> None:
    tables = BY_KEY | ONE_AT_A_TIME
    with serving(lambda text, body: f"<{text}>") as server:
        write(solve, ROWS, server, **tables, **({} if solve else {"steps": THREE}))
        run()
        cut_back(RUN, left)
        asked(server)
        rows = [*reversed(ROWS)] if moved else ROWS
        write(solve and solve.replace("twice", "three times"), rows, server, **tables, **changed)
        assert run().exit_code == 2
        found = run("--on-change", "requeue")
        assert found.exit_code == 0, found.stderr
        words = f"{kept} of their generations can be used again"
        assert (words in found.stderr) == (kept > 0)
        assert asked(server) == again
    assert len(records()) == N_ROWS
    assert all(row["q"] in record["text"] for row, record in zip(rows, records(), strict=True))
    assert (verify()["generations"], is_sound()) == (kept + sum(again.values()), True)
    assert len(read_jsonl(RUN / f"{STEPS}.before-1")) == left


def test_a_killed_run_goes_on_after_a_change() -> None:
    """Its rows have generations of both kinds by then."""
    with serving(lambda text, body: f"<{text}>") as server:
        write(None, ROWS, server, steps=THREE, **ONE_AT_A_TIME)
        run()
        write(None, ROWS, server, steps=REVISED, **ONE_AT_A_TIME)
        run("--on-change", "requeue")
        cut_back(RUN, 18 + 3)
        asked(server)
        assert run().exit_code == 0
        assert asked(server) == {"Better": 3}
    assert len(records()) == N_ROWS
    assert is_sound()


def test_another_selection_chooses_again_among_the_same_answers() -> None:
    one = [{"name": "draft", "prompt": {"user": "{{ q }}"}, "extract": "number", "scorers": ["em"], "reference": "a"}]  # fmt: skip
    rows = [{"q": f"q{n}", "a": "5"} for n in range(3)]
    several = {"n": 3, "temperature": 1.0}
    with serving(lambda text, body: "5") as server:
        write(None, rows, server, steps=one, sampling=several, select={"by": "scorer"})
        assert run().exit_code == 0
        assert [record.get("votes") for record in records()] == [None] * 3
        write(None, rows, server, steps=one, sampling=several, select={"by": "majority"})
        assert run("--on-change", "requeue").exit_code == 0
        assert server.answered.total() == 3
    assert [record["votes"] for record in records()] == [{"5": 3}] * 3


# merge


def test_merged_shards_have_the_generations_of_both() -> None:
    write(SOLVE, ROWS)
    for number in range(2):
        run("--shard", f"{number}/2")
    shards = [shard(number, 2) for number in range(2)]
    merged = batchkit("merge", *shards, "--into", RUN)
    assert merged.exit_code == 0, merged.stderr
    assert calls(RUN) == calls(shards[0]) + calls(shards[1])
    assert (verify()["generations"], is_sound()) == (30, True)
    assert run().json["skipped"] == N_ROWS


def test_a_partial_merge_goes_on_where_its_rows_were() -> None:
    with serving(lambda text, body: f"<{text}>") as server:
        write(None, ROWS, server, steps=THREE, **ONE_AT_A_TIME)
        for number in range(2):
            run("--shard", f"{number}/2")
        there = len(generations(shard(1, 2)))
        cut_back(shard(1, 2), there - 2)
        assert (
            batchkit("merge", shard(0, 2), shard(1, 2), "--into", RUN, "--partial").exit_code == 3
        )
        asked(server)
        assert run().exit_code == 0
        assert asked(server) == {"Revise": 2}
    assert set(calls(RUN).values()) == {1}
    assert (verify()["generations"], is_sound()) == (18, True)


def test_a_partial_merge_goes_on_where_a_generation_was_damaged() -> None:
    numbers = iter(range(100))
    with serving(lambda text, body: f"<{text} {next(numbers)}>") as server:
        write(None, ROWS, server, steps=THREE, **ONE_AT_A_TIME)
        for number in range(2):
            run("--shard", f"{number}/2")
        cut_back(shard(1, 2), len(generations(shard(1, 2))) - 2)
        ledger = shard(1, 2) / STEPS
        lines = ledger.read_bytes().splitlines(keepends=True)
        lines[1] = b"\x07" * (len(lines[1]) - 1) + b"\n"
        ledger.write_bytes(b"".join(lines))
        batchkit("merge", shard(0, 2), shard(1, 2), "--into", RUN, "--partial")
        asked(server)
        ended = run()
        assert ended.exit_code == 0, ended.stderr
        assert asked(server) == {"Answer": 1, "Judge": 1, "Revise": 2}
    assert is_sound()


def test_of_a_row_that_two_runs_have_the_generations_are_those_of_its_record() -> None:
    numbers = iter(range(100))
    with serving(lambda text, body: f"{next(numbers)}") as server:
        write(None, ROWS, server, steps=THREE)
        for name in ("one", "two"):
            run("--set", f"name={name}")
    cut_back(Path("output/two"), 17)
    merged = batchkit("merge", "output/one", "output/two", "--into", RUN)
    assert merged.exit_code == 0, merged.stderr
    texts = {(line["index"], line["text"]) for line in generations()}
    assert {(record["index"], record["text"]) for record in records()} < texts
    assert (verify()["generations"], is_sound()) == (18, True)


# retry-failed, budgets

FAILS_AT_THE_THIRD = """
from pathlib import Path
async def solve(row, generate):
    draft = await generate(f"Answer: {row['q']}")
    judged = await generate(f"Judge {draft.text}")
    if row["q"] in ("q1", "q4") and not Path("fixed").exists():
        raise ValueError("no third")
    return (await generate(f"Revise {judged.text}")).text
"""


def test_a_retried_rollout_asks_from_where_it_failed() -> None:
    with serving(lambda text, body: f"<{text}>") as server:
        write(FAILS_AT_THE_THIRD, ROWS, server)
        assert run().exit_code == 3
        assert asked(server) == {"Answer": 6, "Judge": 6, "Revise": 4}
        Path("fixed").touch()
        assert batchkit("retry-failed").exit_code == 0
        assert asked(server) == {"Revise": 2}
    newest = {record["index"]: record for record in read_jsonl(RUN / "results.jsonl")}
    assert [newest[n]["text"] for n in range(N_ROWS)] == [
        f"<Revise <Judge <Answer: {row['q']}>>>" for row in ROWS
    ]
    assert_counts_each_once()


def test_a_retried_step_is_asked_again_and_those_before_it_are_not() -> None:
    refuses = True

    def before(text: str, body: dict[str, Any]) -> str:
        if refuses and text.startswith("Revise") and "q3" in text:
            raise Refused(400, error("not now"))
        return f"<{text}>"

    with serving(before) as server:
        write(None, ROWS, server, steps=THREE)
        assert run().exit_code == 3
        assert asked(server) == {"Answer": 6, "Judge": 6, "Revise": 5}
        assert batchkit("retry-failed").exit_code == 3
        refuses = False
        assert batchkit("retry-failed").exit_code == 0
        assert asked(server) == {"Revise": 1}
    of_row = [line for line in generations() if line["index"] == 3]
    assert [line["status"] for line in of_row] == ["ok", "ok", "failed", "failed", "ok"]
    assert_counts_each_once()


def test_a_retry_with_another_model_mixes_no_answers_of_both() -> None:
    """Nor does a retry after that, with the run's own model again."""
    refuses = True

    def before(text: str, body: dict[str, Any]) -> str:
        if refuses and text.startswith("Judge"):
            raise Refused(400, error("not now"))
        return f"<{text.split()[0]} {body['model']}>"

    with serving(before) as server:
        write(None, 2, server, steps=THREE[:2])
        server.names.append("other")
        assert run().exit_code == 3
        assert asked(server) == {"Answer": 2}
        assert batchkit("retry-failed", "--set", "engine.model=other").exit_code == 3
        assert asked(server) == {"Answer": 2}
        refuses = False
        assert batchkit("retry-failed").exit_code == 0
        assert asked(server) == {"Judge": 2}
    newest = read_jsonl(RUN / "results.jsonl")[-2:]
    assert {record["steps"]["draft"]["text"] for record in newest} == {"<Answer: tiny>"}
    assert_counts_each_once()


def assert_counts_each_once() -> None:
    """Each generation is in the ledger and in the run's tokens once, though two records of its row have it."""
    assert set(calls(RUN).values()) == {1}
    assert is_sound()
    used = [line["usage"]["completion_tokens"] for line in generations() if line["usage"]]
    assert status()["completion_tokens"] == sum(used)
    assert status()["generations"] == verify()["generations"] == len(generations())


@pytest.mark.parametrize("solve", [None, SOLVE], ids=["steps", "rollout"])
def test_a_budget_counts_the_generations_of_open_rows_once_over_all_starts(
    solve: str | None,
) -> None:
    tokens = 6  # of an answer of the dry-run engine

    def upto(count: int) -> Any:
        tables = {} if solve else {"steps": THREE}
        budget = {"max_completion_tokens": count * tokens}
        write(solve, ROWS, run={"max_in_flight": 1}, budget=budget, **tables)
        return run()

    assert upto(10).json["stopped_by"] == "budget.max_completion_tokens = 60"
    assert len(generations()) == 10
    again = upto(10)
    assert (again.exit_code, "loading model" in again.stderr) == (1, False)
    more = upto(16)
    assert "budget.max_completion_tokens = 96, 36 left" in more.stderr
    assert (len(generations()), status()["completion_tokens"]) == (16, 96)
    assert upto(1000).exit_code == 0
    assert_counts_each_once()
