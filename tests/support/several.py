"""Jobs with several generations for each row: ``[[steps]]``, three of them, and a ``[rollout]`` of five."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from batchkit.storage.steps import STEPS
from tests.support.rows import read_jsonl

THREE_STEPS = """
[[steps]]
name = "draft"
prompt.user = "Answer: {{ q }}"
[[steps]]
name = "judge"
prompt.user = "Judge {{ steps.draft.text }}"
[[steps]]
name = "revise"
prompt.user = "Revise {{ steps.draft.text }} after {{ steps.judge.text }}"
"""
ROLLOUT = """
[rollout]
function = "solve.py:solve"
"""
SOLVE = """
async def solve(row, generate):
    draft = await generate(f"Answer: {row['q']}")
    judged = await generate(f"Judge {draft.text}")
    revised = await generate(f"Revise {draft.text} after {judged.text}")
    checks = await generate.many([f"Check {revised.text} once", f"Check {revised.text} twice"])
    return {"answer": revised.text, "checks": [check.text for check in checks]}
"""
CALLS = {
    THREE_STEPS: [("draft", 0), ("judge", 0), ("revise", 0)],
    ROLLOUT: [("", number) for number in range(5)],
}


def generations(run: Path) -> list[dict[str, Any]]:
    """The ledger's lines; each must be whole."""
    path = run / STEPS
    return read_jsonl(path) if path.exists() else []


def calls(run: Path) -> Counter[tuple[int, str, int]]:
    """How often the ledger has each call of each row."""
    return Counter((line["index"], line["step"], line["call"]) for line in generations(run))


def each_once(kind: str, n_rows: int) -> Counter[tuple[int, str, int]]:
    """``calls`` of a finished run."""
    return Counter((row, *call) for row in range(n_rows) for call in CALLS[kind])
