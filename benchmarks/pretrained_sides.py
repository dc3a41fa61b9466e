"""The other tools of pretrained.py, as a user calls them: one run of one tool, in a process of its own.

    python benchmarks/pretrained_sides.py TOOL ROWS MODEL ANSWERS

ROWS are JSON lines, ANSWERS JSON lines in the same order, or one matrix (.npy). Each tool has its own defaults, except
that answers about moods are greedy and short, as in batchkit's job. The last line on stdout is JSON: the seconds of
loading, and the seconds from then to the last answer.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

LOAD_S, SLOTS = 300, 8
MAX_TOKENS = 8  # of a review's mood
GRAMMAR = 'root ::= "positive" | "negative"'
Rows = Sequence[Mapping[str, Any]]
Answer = Callable[[Rows], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tool", choices=TOOLS)
    for name in ("rows", "model", "answers"):
        parser.add_argument(name, type=Path)
    args = parser.parse_args()
    with args.rows.open() as lines:
        rows = [json.loads(line) for line in lines]
    began = time.monotonic()
    answer = TOOLS[args.tool](args.model)
    loaded = time.monotonic()
    answers = answer(rows)
    ended = time.monotonic()
    if args.answers.suffix == ".npy":
        import numpy as np

        np.save(args.answers, answers)
    else:
        args.answers.write_text("".join(json.dumps(text) + "\n" for text in answers))
    print(json.dumps({"load_seconds": loaded - began, "seconds": ended - loaded}))


def sentence_transformers(model: Path) -> Answer:
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformer(str(model))
    return lambda rows: encoder.encode([row["text"] for row in rows])


def faster_whisper(model: Path) -> Answer:
    from faster_whisper import WhisperModel

    whisper = WhisperModel(str(model), device="cpu")

    def answer(rows: Rows) -> list[str]:
        return ["".join(part.text for part in whisper.transcribe(row["clip"])[0]) for row in rows]

    return answer


def pipeline(model: Path) -> Answer:
    from transformers import pipeline

    generate = pipeline("text-generation", model=str(model))

    def answer(rows: Rows) -> list[str]:
        chats = [row["messages"] for row in rows]
        found = generate(chats, max_new_tokens=MAX_TOKENS, do_sample=False, return_full_text=False)
        return [choices[0]["generated_text"] for choices in found]

    return answer


def llama_server(model: Path) -> Answer:
    """``llama-server`` with eight slots, and a client with as many threads. The examples of llama.cpp that answer
    several prompts at once (batched, parallel) can't be given a prompt for each row and a grammar."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [os.environ["LLAMA_SERVER"], "-m", str(model), "-np", str(SLOTS), "--port", str(port)]
    server = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + LOAD_S
    while not _is_healthy(url):
        if server.poll() is not None or time.monotonic() > deadline:
            server.kill()
            raise SystemExit(f"{' '.join(words)}: does not start")
        time.sleep(0.02)

    def ask(row: Mapping[str, Any]) -> str:
        body = {"messages": row["messages"], "temperature": 0, "max_tokens": MAX_TOKENS}
        asked = urllib.request.Request(
            f"{url}/v1/chat/completions",
            json.dumps({**body, "grammar": GRAMMAR}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(asked) as reply:
            text: str = json.load(reply)["choices"][0]["message"]["content"]
            return text

    def answer(rows: Rows) -> list[str]:
        try:
            with ThreadPoolExecutor(SLOTS) as threads:
                return list(threads.map(ask, rows))
        finally:
            server.terminate()
            server.wait()

    return answer


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health"):
            return True
    except OSError:  # not there yet, or 503 while it loads
        return False


TOOLS: Mapping[str, Callable[[Path], Answer]] = {
    "SentenceTransformer.encode": sentence_transformers,
    "faster-whisper": faster_whisper,
    "transformers pipeline": pipeline,
    "llama-server": llama_server,
}

if __name__ == "__main__":
    main()
