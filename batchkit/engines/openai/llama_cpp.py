"""llama.cpp's server ignores fields that it doesn't know, so what it lacks of vLLM's is refused here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from batchkit.engines.openai.api import PAIR
from batchkit.errors import RequestError

# What it lacks, and the values of these that change nothing.
_LACKS: Mapping[str, tuple[Any, ...]] = {
    "repetition_penalty": (1,),
    "repetition_detection": (),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logprob_token_ids": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": ({},),  # other than JSON, which is sent as response_format
}
_LACKS_OF_POOLING: Mapping[str, tuple[Any, ...]] = {
    "use_activation": (
        True,
    ),  # its vectors have the length 1; its scores are as the model gives them
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "add_special_tokens": (True,),
    "padding": (False,),
    "mm_processor_kwargs": ({},),
    "instruction": (),
    "max_tokens_per_query": (),
    "max_tokens_per_doc": (),
}
_ITS_OWN = {
    "repetition_penalty": "repeat_penalty",
    "structured_outputs": "grammar",
    "use_activation": "embd_normalize",
}


def serves(models: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a list of models is one of llama.cpp's."""
    return any(model.get("owned_by") == "llamacpp" for model in models)


def check(body: Mapping[str, Any]) -> None:
    """
    Raises:
        RequestError: naming the parameter that the server would ignore.
    """
    is_pair = not PAIR.isdisjoint(body)
    for name, neutral in {**_LACKS, **_LACKS_OF_POOLING}.items():
        is_activation = name == "use_activation"
        if name in body and (body[name] not in neutral or (is_pair and is_activation)):
            own = None if is_pair else _ITS_OWN.get(name)
            hint = f", or use its own engine.options.extra_body.{own}" if own else ""
            table = "pooling" if name in _LACKS_OF_POOLING else "sampling"
            raise RequestError(
                f"{table}.{name}: llama.cpp's server lacks it, and would answer without it; leave it"
                f" out{hint}"
            )
