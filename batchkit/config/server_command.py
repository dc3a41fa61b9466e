"""Commands that start a server (``[engine.server]``). A command is checked when the job is read; ``{port}`` and
``{host}`` are filled in when the server starts."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from batchkit.config.masking import MASK, is_secret, masked, masked_text
from batchkit.config.regular_file import exists, is_file
from batchkit.config.terminal import shortened
from batchkit.config.values import split_command

HOST = "127.0.0.1"
_PLACEHOLDER = re.compile(r"(?<!\{)\{(\w+)\}(?!\})")  # matches neither JSON nor Jinja
# Options of llama-server and `vllm serve` that change speed or address, not the answers.
_SPEED_ONLY = frozenset(
    [
        "--host",
        "--port",
        *("-t", "--threads", "-tb", "--threads-batch", "--threads-http"),
        *("-b", "--batch-size", "-ub", "--ubatch-size"),
        *("-ngl", "--gpu-layers", "--n-gpu-layers", "-ts", "--tensor-split", "-dev", "--device"),
        "--cache-ram",
        *("--max-num-seqs", "--max-num-batched-tokens", "--gpu-memory-utilization"),
        *("--kv-cache-memory-bytes", "-O", "--swap-space", "--cpu-offload-gb"),
        *("-tp", "--tensor-parallel-size", "-pp", "--pipeline-parallel-size"),
        *("-dp", "--data-parallel-size", "--uvicorn-log-level", "--download-dir"),
    ]
)
_SPEED_FLAGS = frozenset(  # options of the same kind that take no value
    ["--mlock", "--no-mmap", "--no-webui", "--no-ui", "--enforce-eager", "--no-enforce-eager"]
)
# Options whose file or folder affects the answers. Files of other options (logs, caches, keys) do not.
_NAMES_FILE = re.compile(
    r"-m|-mm|-jf|--[\w-]*(?:model|lora|mmproj|template|tokenizer|grammar|schema|config|vector)[\w-]*"
)

# These mark the folder of a model or adapter.
_CONFIGS = ("config.json", "adapter_config.json", "params.json")
_BETWEEN = re.compile(r"""[=,:"'{}\[\]\s]+""")  # NAME=path, adapter.gguf:0.5, a.gguf,b.gguf, JSON
_DECIDES = (".gguf", ".sh", ".py")


def check_command(command: str) -> str:
    """Return ``command`` unchanged if it passes ``{port}`` to the server and contains no secret.

    Raises:
        ValueError: The command is unusable; the message describes the problem.
    """
    try:
        words = split_command(command)
    except ValueError as error:
        raise ValueError(
            f"command can't be split into words ({error}): {shortened(masked_text(command))}"
        ) from None
    if not words:
        raise ValueError("command is empty: give the command that starts the server")
    for name in set(_PLACEHOLDER.findall(command)) - {"port", "host"}:
        raise ValueError(f"command: {{{name}}} is unknown; use {{port}} and {{host}}")
    if "{port}" not in command:
        raise ValueError(
            "command has no {port}: batchkit picks a free port and must pass it to the server, for example"
            " with --port {port}"
        )
    for word in words:
        if (named := _names_a_secret(word)) is not None:
            raise ValueError(
                f"command: {named} would show the key in job.toml and in the process list;"
                " put the key into the environment (LLAMA_API_KEY, VLLM_API_KEY, HF_TOKEN): the server gets"
                " the run's environment"
            )
    return command


def _names_a_secret(word: str) -> str | None:
    """Return the part of ``word`` that contains a secret, with the secret masked: an option, ``NAME=value``, a header
    or a URL. Return None if no part does."""
    if word.startswith("-") and is_secret(word.partition("=")[0].lstrip("-")):
        return word.partition("=")[0]
    parts = [word, *word.split()]  # a shell command in quotes (sh -c '…') is one word
    hidden = ((part, masked(part)) for part in parts if MASK not in part)
    return next((without for part, without in hidden if without != part), None)


def words_of(command: str, *, port: int) -> list[str]:
    """Split the command into words and replace ``{port}`` and ``{host}``."""
    return [
        word.replace("{port}", str(port)).replace("{host}", HOST) for word in shlex.split(command)
    ]


def llama_server(
    model: str, *, max_model_len: int, max_num_seqs: int, task: str = "generate"
) -> str:
    """Return the ``llama-server`` command that serves the ``.gguf`` file ``model``. The context length ``-c`` is
    divided among all ``-np`` slots. Texts to embed or score must fit into one physical batch (``-ub``)."""
    batch = f"-b {max_model_len} -ub {max_model_len}"
    pooling = {"embed": f"--embedding {batch} ", "score": f"--reranking {batch} "}
    return (
        f"llama-server -m {shlex.quote(model)} -c {max_model_len * max_num_seqs} -np {max_num_seqs}"
        f" {pooling.get(task, '')}--threads {_threads()} --port {{port}}"
    )


def what_decides_answers(command: str) -> list[str]:
    """Return the command's words without options that change only speed or address. If the remaining words change,
    answers may change, so a run is not resumed."""
    return list(_without_speed(shlex.split(command)))


def files_named(command: str) -> Iterator[str]:
    """Yield the files and folders in the command that affect the answers: models, adapters, chat templates, scripts.
    The program itself is left out: a run may be resumed with another version of the server."""
    option = ""
    for word in _words_within(command):
        value = word
        if word.startswith("-"):
            option, _, value = word.partition("=")
        for name in filter(None, dict.fromkeys([value, *_BETWEEN.split(value)])):
            if _is_model_or_script(name) or (_NAMES_FILE.fullmatch(option) and exists(name)):
                yield name


def _words_within(command: str) -> Iterator[str]:
    """Yield the command's words. After a word that contains spaces (a quoted shell command), also yield the words in
    it."""
    for word in shlex.split(command):
        yield word
        if len(parts := word.split()) > 1:
            yield from parts


def _is_model_or_script(name: str) -> bool:
    if name.endswith(_DECIDES):
        return is_file(name)
    return any(is_file(f"{name}/{config}") for config in _CONFIGS)


def _without_speed(words: list[str]) -> Iterator[str]:
    yield Path(words[0]).name
    is_value = False
    for word in words[1:]:
        name, equals, _ = word.partition("=")
        is_speed = name in _SPEED_FLAGS | _SPEED_ONLY or (is_value and not word.startswith("-"))
        is_value = name in _SPEED_ONLY and not equals
        if not is_speed:
            yield word


def _threads() -> int:
    """Return OMP_NUM_THREADS if it is set, otherwise the number of cores available to this process."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdecimal() and int(wanted):
        return int(wanted)
    return len(os.sched_getaffinity(0))
