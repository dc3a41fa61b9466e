"""batchkit against Ray Data LLM (``ray.data.llm``: vLLM's engine in an actor of Ray's).

    python benchmarks/ray_data.py [--rounds 3] [--rows 600] [--setting CPU|simulated|documents] [--quick]

For the rows, and what is counted, see commands.py. ``--setting documents`` has the rows of order.py instead:
ten shuffled questions to each of ``--rows`` documents, and a KV cache for a thirtieth of these. Ray's script, ray_script.py, runs twice: with
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

import order
from commands import OPTIONS, Tool, compare, options, settings
from models import build_ending_model
from sides import Setting
from text import SAMPLING, write

SCRIPT = Path(__file__).with_name("ray_script.py")
STAGES: Mapping[str, Mapping[str, Any]] = {
    "Ray, default": {},
    "Ray, fewer": {"tokenize_stage": False, "detokenize_stage": False},
}


def main() -> None:
    args = options(__doc__, "documents")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = str(folder / "model")
        build_ending_model(folder / "model", text_only=True)
        if args.setting == "documents":
            path, engine = folder / "rows.jsonl", order.small_cache(Path(model), args.rows)
            order.write_documents(path, args.rows, order.ASKED, 690)
            chosen = [Setting("documents", path, order.SHORT, dict.fromkeys(STAGES))]
        else:
            path, engine = write(folder / "rows.jsonl", args.rows), OPTIONS
            chosen = settings(args.setting, path, dict.fromkeys(STAGES, 1.1))
        job = {
            "input": {"format": "jsonl"},
            "prompt": {"user": "{{ q }}"},
            "engine": {"model": model, "options": engine},
            "sampling": SAMPLING,
        }
        places = {json.loads(line)["q"]: place for place, line in enumerate(path.open())}
        tools = [ray_data(tool, model, places) for tool in list(STAGES)[args.quick :]]
        compare("ray_data", folder, chosen, job, tools, rounds=args.rounds)


def ray_data(name: str, model: str, places: Mapping[str, int]) -> Tool:
    """Return Ray Data with the stages ``name``. ``places``: the place of each question in the rows."""

    def command(rows: Path, options: Mapping[str, Any], _: Path) -> list[str]:
        table = {"model": model, "options": options, "stages": STAGES[name], "sampling": SAMPLING}
        return [sys.executable, str(SCRIPT), str(rows), "results", json.dumps(table)]

    def answers(files: Sequence[Path]) -> list[Any]:
        found = [json.loads(line) for file in files for line in file.open()]
        found.sort(key=lambda answer: places[answer["q"]])
        return [[answer["text"], answer["completion_tokens"]] for answer in found]

    return Tool(name, command, "results/*.json", answers)


if __name__ == "__main__":
    main()
