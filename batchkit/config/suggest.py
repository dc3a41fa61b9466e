"""Suggestions for mistyped names and for names that other tools use."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

QUOTE = "quote a prompt and a glob, because the shell splits them: --prompt '… {{ column }}' --input 'data/*.csv'"
NAMES = {
    "engine.model": "model_name model_name_or_path model_path model_id pretrained checkpoint",
    "engine.base_url": "api_base api_url openai_api_base endpoint server_url",
    "engine.options.dtype": "torch_dtype",
    "engine.options.gpu_memory_utilization": "gpu_memory gpu_memory_fraction mem_fraction_static",
    "engine.options.max_model_len": "max_seq_len max_seq_length context_length ctx_len n_ctx max_context",
    "engine.options.max_num_seqs": "batch_size max_batch_size per_device_eval_batch_size max_running_requests",
    "engine.options.pipeline_parallel_size": "pp pp_size",
    "engine.options.quantization": "load_in_4bit load_in_8bit",
    "engine.options.tensor_parallel_size": "tp tp_size tensor_parallel gpus num_gpus n_gpus",
    "input.path": "input_file input_path input_files dataset dataset_path data_path data_file",
    "input.limit": "max_rows max_samples num_samples",
    "media.fps": "video_fps",
    "media.num_frames": "video_frames nframes max_frames",
    "output.dir": "output_dir output_folder out_dir save_dir result_dir",
    "output.export": "output.path output.file output.format output_file output_path output_format",
    "pooling.use_activation": "normalize normalize_embeddings",
    "prompt.system": "system_prompt system_message",
    "prompt.user": "user_prompt prompt_template user_message instruction messages",
    "run.max_in_flight": "concurrency max_concurrency max_concurrent_requests",
    "sampling.max_tokens": "tokens max_token max_new_tokens max_length max_output_tokens max_completion_tokens",
    "sampling.n": "num_return_sequences n_samples",
    "sampling.stop": "stop_sequences stop_words",
    "sampling.structured_outputs": "guided_choice guided_json guided_regex guided_grammar guided_decoding"
    " response_format json_schema",
    "sampling.temperature": "temp",
    "sampling.top_k": "topk",
    "sampling.top_p": "topp",
    "scoring.scorers.em": "accuracy exact_match exact",
    "scoring.scorers.rouge-l": "rouge rougeL",
    "scoring.scorers.sacrebleu": "bleu",
    "--csv": "--xlsx --excel --output --format",
    "--model": "-m",
    "--output": "-o --out --output-file",
    "--limit": "-n --max-rows --max-samples --num-samples",
    "| length": "len",
    "| sort": "sorted",
    "| string": "str",
    "| tojson": "json to_json",
    "batchkit compare": "diff parity",
    "batchkit export": "convert download results",
    "batchkit init": "new create",
    "batchkit retry-failed": "retry",
    "batchkit run": "resume continue start infer batch generate",
    "batchkit score": "evaluate eval",
    "batchkit status": "ls list",
    "batchkit find-bs": "bench benchmark",
    "batchkit validate": "check test",
    "batchkit view": "ui dashboard",
}
"""The names that other tools use, by batchkit's name: a dotted key of the job file, an option, a template filter, or a
command. The last part of a dotted key is found, too. docs/job-file.md prints this table."""
ELSEWHERE = {key.rpartition(".")[2]: key for key in NAMES if "." in key} | {
    name: here for here, names in NAMES.items() for name in names.split()
}


def called_here(name: str, table: str = "", kind: str = ".") -> str | None:
    """Return batchkit's name for a setting or command that another tool calls ``name``, or None if there is none.
    ``table``: the table that contains the unknown key; a result in the same table is returned without the table's name.
    ``kind``: text that the result must contain: ``.`` for a key of the job, ``--`` for an option, ``|`` for a template
    filter, ``batchkit`` for a command."""
    below = f"{table}." if table else ""
    here = ELSEWHERE.get(f"{below}{name}") or ELSEWHERE.get(name) or ""
    return here.removeprefix(below) if kind in here and here != f"{below}{name}" else None


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the name in ``known`` that the user probably means with ``name``: batchkit's word for another tool's name,
    or the most similar one. Return None if the similarity is below ``cutoff`` (1 means equal)."""
    known = [*known]
    if (here := ELSEWHERE.get(name, "").rpartition(".")[2].removeprefix("| ")) in known:
        return here
    by_small = {one.lower(): one for one in known}
    near = difflib.get_close_matches(name.lower(), by_small, n=1, cutoff=cutoff)
    return by_small[near[0]] if near else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a suggestion to append to a message about the unknown ``name``, or "" if there is none."""
    near = nearest(name, known)
    return "" if near is None else f"; did you mean {near!r}?"
