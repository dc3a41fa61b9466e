"""Rows through Ray Data LLM, as in its documentation: the script that ray_data.py measures.

    python ray_script.py ROWS RESULTS '{"model": …, "options": {…}, "stages": {…}, "sampling": {…}}'

A row's ``model`` is the folder of its adapter (adapters.py). With ``"then": "…"`` each answer goes through a second stage, behind that text (steps.py); its engine is
another one, and its rows are those blocks of which the first stage has answered every row.

Ray is started for this script alone, on 127.0.0.1, without dashboard and usage statistics.
``num_cpus`` is more than the machine has: with its two cores there would be no room for the actors,
and with a few more the last blocks would wait to be written. The engine asks for one of them and no
GPU (``placement_group_config``); Ray sets OMP_NUM_THREADS to that one, which was faster than two
(3.2 s for 3.9). Batches have Ray's default size, 32 rows, eight at once; 16 and 300 were as fast.
``log_engine_metrics`` is off: vLLM's part in it needs all that Ray Serve depends on.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any
from uuid import uuid4

CORES = 10  # for four actors, and for tasks that read and write
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_AUTH_TOKEN"] = uuid4().hex  # or Ray leaves one in the home folder
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # Ray listens on 127.0.0.1 alone


def main() -> None:
    import ray

    rows, results, table = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    with tempfile.TemporaryDirectory(prefix="ray") as scratch:
        ray.init(
            address="local",
            num_cpus=CORES,
            num_gpus=0,
            include_dashboard=False,
            object_store_memory=2**29,
            logging_level=logging.ERROR,
            _temp_dir=scratch,
        )
        try:
            generate(rows, results, table)
        finally:
            ray.shutdown()


def generate(rows: str, results: str, table: dict[str, Any]) -> None:
    import ray.data
    from ray.data.llm import build_processor, vLLMEngineProcessorConfig

    config = vLLMEngineProcessorConfig(
        model_source=table["model"],
        engine_kwargs=table["options"],
        placement_group_config={"bundles": [{"CPU": 1}]},
        log_engine_metrics=False,
        **table["stages"],
    )
    sampling = table["sampling"]

    def asked(row: dict[str, Any]) -> dict[str, Any]:
        messages = [{"role": "user", "content": row["q"]}]
        adapter = {"model": row["model"]} if "model" in row else {}
        return {"messages": messages, "sampling_params": sampling, **adapter}

    def asked_then(row: dict[str, Any]) -> dict[str, Any]:
        messages = [{"role": "user", "content": table["then"] + row["text"]}]
        return {"q": row["q"], "messages": messages, "sampling_params": sampling}

    found = build_processor(config, preprocess=asked, postprocess=answered)(
        ray.data.read_json(rows, lines=True)
    )
    if "then" in table:
        found = build_processor(config, preprocess=asked_then, postprocess=answered)(found)
    found.write_json(Path(results).absolute().as_uri())


def answered(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "q": row["q"],
        "text": row["generated_text"],
        "completion_tokens": row["num_generated_tokens"],
    }


if __name__ == "__main__":
    main()
