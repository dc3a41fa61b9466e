"""Why a model did not load, in one paragraph with the remedy.

Causes are recognised by type, or by words of the message where vLLM, transformers and the drivers
raise plain ValueError and RuntimeError. An unrecognised error is shown as it is.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from pydantic import ValidationError


class Cause(NamedTuple):
    """One way to fail: a type name or words of the message, and what to do about it."""

    sign: re.Pattern[str]
    remedy: str


_CAUSES = [
    Cause(re.compile(r"GatedRepoError|gated repo", re.IGNORECASE),
          "It is gated: accept its terms on the hub, then set HF_TOKEN to a token that may read it."),
    Cause(re.compile(r"RepositoryNotFoundError|is not a valid model identifier|Repo id must be"),
          "No such folder here and no such name on the hub: check the spelling; a private model needs"
          " HF_TOKEN."),
    Cause(re.compile(r"LocalEntryNotFoundError|ConnectError|ConnectionError|couldn't connect|"
                     r"OfflineModeIsEnabled"),
          "The hub can't be reached and the model is not in its cache: download it where there is a"
          " network and give its folder as engine.model."),
    Cause(re.compile(r"does not recognize this architecture|are not supported for now|"
                     r"has no vLLM implementation"),
          "The installed vLLM or transformers don't know this architecture: upgrade them (`batchkit"
          " doctor` shows both), or take another model."),
    Cause(re.compile(r"estimated maximum model length is (?P<fits>\d+)"),
          "The KV cache is too small for one request of max_model_len: set"
          " engine.options.max_model_len = {fits} or less, or give it more memory"
          " (gpu_memory_utilization, kv_cache_memory_bytes, tensor_parallel_size)."),
    Cause(re.compile(r"No available memory for the cache blocks|OutOfMemoryError"),
          "The weights leave no memory: free the GPU, quantise, spread the model over more GPUs"
          " (tensor_parallel_size), or lower max_model_len and max_num_seqs."),
    Cause(re.compile(r"Unknown quantization method|unknown quantization name|Invalid quantization"),
          "vLLM has no such quantization: leave engine.options.quantization out (a quantised model names"
          " its own), or take one of those listed."),
    Cause(re.compile(r"does not match the quantization|Cannot find the config file for"),
          "The model was not saved with this quantization: leave engine.options.quantization out, or"
          " take a model that was (its name often ends in -AWQ, -GPTQ or -FP8)."),
    Cause(re.compile(r"is not supported for quantization method"),
          "This quantization needs another engine.options.dtype: one of those listed."),
    Cause(re.compile(r"quantization is currently not supported|not supported for the current GPU|"
                     r"Minimum capability"),
          "This device can't run the model's quantization: take the model in another one, or"
          " unquantised, or a newer GPU."),
    Cause(re.compile(r"divisible by (tensor|the tensor)[ -]?(model )?parallel|"
                     r"must be divisible by tensor"),
          "The model can't be split so: set engine.options.tensor_parallel_size to a number that"
          " divides the one in the message, for example 1 or 2."),
    Cause(re.compile(r"is larger than the number of available GPUs"),
          "The model needs tensor_parallel_size × pipeline_parallel_size GPUs: lower them, or check"
          " CUDA_VISIBLE_DEVICES (`nvidia-smi` lists the GPUs)."),
    Cause(re.compile(r"NUMA nodes to bind"),
          "On a CPU each of tensor_parallel_size workers takes a NUMA node of its own (`lscpu` lists"
          " them): lower it, or name the cores in VLLM_CPU_OMP_THREADS_BIND, for example 0-15|16-31."),
    Cause(re.compile(r"NUMA binding|numa_bind|numactl"),
          "Leave engine.options.numa_bind out; with it, numactl must be installed, and in Docker"
          " allowed by --cap-add SYS_NICE."),
    Cause(re.compile(r"Available memory on node"),
          "The NUMA node that this process runs on has too little memory free: free some, lower"
          " engine.options.kv_cache_memory_bytes, or start the run on another node (numactl)."),
    Cause(re.compile(r"less than (desired|requested)"),
          "Something else holds the memory: free it, or lower gpu_memory_utilization or"
          " kv_cache_memory_bytes."),
    Cause(re.compile(r"any model weights"),
          "The folder has no weights: download them whole (*.safetensors)."),
    Cause(re.compile(r"SafetensorError|header too (large|small)|invalid header"),
          "A weight file is damaged, most likely cut off in a download: fetch it again."),
    Cause(re.compile(r"torchvision::|operator torchvision"),
          "torchvision does not fit torch: `batchkit doctor` says what to install."),
    Cause(re.compile(r"Failed to infer device type"),
          "vLLM finds no device that it was built for: `batchkit doctor` shows what it sees; on a"
          " machine without a GPU, install vllm-cpu."),
    Cause(re.compile(r"driver on your system is too old|no CUDA-capable device|CUDA driver version|"
                     r"no kernel image"),
          "The GPU driver or the GPU does not fit this build of torch: `batchkit doctor` shows them."),
]  # fmt: skip


def explain(error: BaseException, model: str) -> str:
    """A message that ``model`` can't be loaded: ``error``, shortened to its first paragraph, and a
    remedy if its own type and words, or those of its causes, are known."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    text = "\n".join(f"{type(link).__name__}: {link}" for link in chain)
    paragraph = " ".join(_plain(error).strip().split("\n\n")[0].split())[:600]
    for known in _CAUSES:
        if found := known.sign.search(text):
            remedy = known.remedy.format(**found.groupdict())
            return f"{model} can't be loaded. {remedy}\n  ({type(error).__name__}: {paragraph})"
    return f"{model} can't be loaded: {type(error).__name__}: {paragraph}"


def _plain(error: BaseException) -> str:
    """Without what pydantic adds: the arguments, and a link to its docs."""
    if not isinstance(error, ValidationError):
        return str(error)
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    return "; ".join(
        ": ".join([*map(str, problem["loc"]), problem["msg"].removeprefix("Value error, ")])
        for problem in problems
    )
