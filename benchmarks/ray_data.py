"""batchkit against Ray Data LLM (``ray.data.llm``: vLLM's engine in an actor of Ray's).

    python benchmarks/ray_data.py [--rounds 3] [--rows 600] [--setting CPU|simulated] [--quick]

For the rows, and what is counted, see commands.py. Ray's script, ray_script.py, runs twice: with
its default stages (chat template, tokenizer and detokenizer have actors of their own), and with
tokenizer and detokenizer left to vLLM, which is faster where cores are few. ``--quick`` runs only
that one. It writes a block of rows when all of them are answered.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from commands import OPTIONS, Tool, compare, options, settings
from models import build_ending_model
from text import SAMPLING, write

SCRIPT = Path(__file__).with_name("ray_script.py")
STAGES: Mapping[str, Mapping[str, Any]] = {
    "Ray, default": {},
    "Ray, fewer": {"tokenize_stage": False, "detokenize_stage": False},
}


def main() -> None:
    args = options(__doc__)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = str(folder / "model")
        build_ending_model(folder / "model", text_only=True)
        rows = write(folder / "rows.jsonl", args.rows)
        job = {
            "input": {"format": "jsonl"},
            "prompt": {"user": "{{ q }}"},
            "engine": {"model": model, "options": OPTIONS},
            "sampling": SAMPLING,
        }
        tools = [ray_data(tool, model) for tool in list(STAGES)[args.quick :]]
        chosen = settings(args.setting, rows, dict.fromkeys(STAGES, 1.1))
        compare("ray_data", folder, chosen, job, tools, rounds=args.rounds)


def ray_data(name: str, model: str) -> Tool:
    def command(rows: Path, options: Mapping[str, Any], _: Path) -> list[str]:
        table = {"model": model, "options": options, "stages": STAGES[name], "sampling": SAMPLING}
        return [sys.executable, str(SCRIPT), str(rows), "results", json.dumps(table)]

    return Tool(name, command, "results/*.json", answers)


def answers(files: Sequence[Path]) -> list[Any]:
    """Return text and number of tokens of each answer, in the order of the rows. A question begins
    with the number of its row."""
    found = [json.loads(line) for file in files for line in file.open()]
    found.sort(key=lambda answer: int(answer["q"].partition(":")[0]))
    return [[answer["text"], answer["completion_tokens"]] for answer in found]


if __name__ == "__main__":
    main()
