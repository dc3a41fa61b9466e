"""Any function that asks one after another and side by side, killed after any of its generations, goes on as
if nothing had happened: nothing that was recorded is asked again, and equal answers lead to the same end."""

from __future__ import annotations

import hashlib
from contextlib import chdir
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batchkit.storage.log import STEPS
from tests.support.chat_server import serving
from tests.support.rollouts import RUN, calls, cut_back, records, run, write

pytestmark = pytest.mark.slow

# A program is a word, which is asked with what was answered before it, or parts: one after another, or side
# by side.
SOLVE = """
import asyncio

async def solve(row, generate):
    async def play(part, seen):
        if isinstance(part, str):
            return (await generate(f"{part} {seen}", step=part if part == "named" else "")).text
        how, parts = part
        if how == "all":
            return "+".join(await asyncio.gather(*(play(one, seen) for one in parts)))
        for one in parts:
            seen = await play(one, seen)
        return seen

    return await play(row["program"], "q")
"""
WORDS = st.sampled_from(["a", "b", "named"])
PROGRAMS = st.recursive(
    WORDS,
    lambda parts: st.tuples(
        st.sampled_from(["all", "seq"]), st.lists(parts, min_size=1, max_size=4)
    ),
    max_leaves=8,
)


def n_calls(part: Any) -> int:
    return 1 if isinstance(part, str) else sum(map(n_calls, part[1]))


# Equal questions side by side, of which one goes on.
@pytest.mark.release
@example([("all", ["a", "a", ("seq", ["a", "a"]), "a"])] * 3, [0.2, 0.5, 0.8], False)
@settings(max_examples=40)
@given(
    programs=st.lists(PROGRAMS, min_size=1, max_size=3),
    kills=st.lists(st.floats(0, 1), min_size=1, max_size=3),
    same=st.booleans(),
)
def test_a_killed_function_goes_on_as_if_nothing_had_happened(
    programs: list[Any], kills: list[float], same: bool
) -> None:
    """``same``: equal questions get equal answers; else no two answers are alike."""
    numbers = count()

    def before(text: str, body: dict[str, Any]) -> str:
        return hashlib.sha256(text.encode()).hexdigest()[:4] if same else f"n{next(numbers)}"

    total = sum(map(n_calls, programs))
    with TemporaryDirectory() as folder, chdir(folder), serving(before) as server:
        each = {"deduplicate": False}
        write(SOLVE, [{"program": program} for program in programs], server, run=each)
        assert run().exit_code == 0
        answers = [record["text"] for record in records()]
        assert server.answered.total() == total
        for share in kills:
            left = round(share * total)
            kept = cut_back(RUN, left)
            server.answered.clear()
            ended = run()
            assert ended.exit_code == 0, ended.stderr
            assert server.answered.total() == total - left
            assert Path(RUN, STEPS).read_bytes().startswith(kept)
            found = calls(RUN)
            assert (found.total(), len(found)) == (total, total)
            if same or left == total:
                assert [record["text"] for record in records()] == answers
            answers = [record["text"] for record in records()]
