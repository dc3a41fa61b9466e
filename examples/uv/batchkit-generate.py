# /// script
# requires-python = ">=3.11"
# dependencies = ["batchkit-vllm[vllm,remote,store]"]
# ///
"""Answer a prompt for each row of a table, with a model on vLLM. One file: copy it, and change it.

    uv run batchkit-generate.py reviews.csv answers.parquet --model Qwen/Qwen3-8B --prompt "Positive? {{ review }}"

INPUT and OUTPUT are files, s3:// or gs:// addresses, or datasets on the Hugging Face hub:

    uv run batchkit-generate.py hf://datasets/OWNER/NAME hf://datasets/ME/ANSWERS \
        --model Qwen/Qwen3-VL-8B-Instruct --prompt "Describe it." --images "{{ image }}"

The same command resumes. With --store, it also resumes on another machine, so a time limit loses nothing:

    hf jobs uv run --flavor l4x1 --timeout 4h --secrets HF_TOKEN --secrets AWS_ACCESS_KEY_ID \
        --secrets AWS_SECRET_ACCESS_KEY batchkit-generate.py … --store s3://bucket/runs --name reviews
"""

from __future__ import annotations

import argparse
import os
import sys


def main() -> None:
    given = vars(parser().parse_args())
    settings = {"output.store": given.pop("store")}
    settings["engine.options.max_model_len"] = given.pop("max_model_len")
    command = [sys.executable, "-m", "batchkit", "run"]
    for name, value in given.items():
        for one in value if isinstance(value, list) else [value]:
            if one is not None:
                command += [f"--{name.replace('_', '-')}", str(one)]
    for key, value in settings.items():
        if value is not None:
            command += ["--set", f"{key}={value}"]
    print("+ batchkit", *command[3:], file=sys.stderr, flush=True)
    # Replace this process, so that batchkit gets the signal that announces the end of a job.
    os.execv(sys.executable, command)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description="Answer a prompt for each row of INPUT.",
        allow_abbrev=False,
    )
    add = made.add_argument
    add("input", help="file, glob or address with the rows: .jsonl .csv .parquet …")
    add("output", help="file or address for the answers: .parquet, .jsonl, .csv, or a dataset")
    add("--model", required=True, help="name on the Hugging Face hub, or a folder")
    add("--prompt", required=True, help="template of the prompt: 'Positive? {{ column }}'")
    add("--system", help="template of the system prompt")
    add("--images", action="append", help="column with an image: '{{ column }}'; may be repeated")
    add("--id", help="column with the id of each row; default: id, if there is one")
    add("--max-tokens", type=int, help="maximum number of tokens of an answer; default 256")
    add("--temperature", type=float, help="0, the default, is greedy")
    add("--set", action="append", help="KEY=VALUE: any key of a job file; may be repeated")
    add("--limit", type=int, help="maximum number of rows")
    add("--max-model-len", type=int, help="maximum number of tokens of prompt and answer")
    add("--keep", help="columns of INPUT to write: A,B; default: all")
    add("--name", help="name of the run; default: after INPUT and MODEL")
    add(
        "--store", help="s3://bucket/runs: copy the run there while it works, and resume from there"
    )
    return made


if __name__ == "__main__":
    main()
