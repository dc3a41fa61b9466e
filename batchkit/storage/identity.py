"""The identity of a run: all settings and file hashes that decide its answers.

Keys of the job file that decide answers are marked ``Identity`` (``config/tables/base.py``). Keys that change only the
speed (batch sizes, intervals) are marked ``Free``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson

from batchkit.config.masking import FINGERPRINT, MASK, home_of, masked, secrets_in
from batchkit.config.regular_file import exists, is_file, open_regular, read_bytes, read_text
from batchkit.config.server_command import files_named, what_decides_answers
from batchkit.config.speed_options import SPEED_OPTIONS
from batchkit.config.tables import EngineTable, JobConfig, StepTable, Table
from batchkit.config.tables.base import Mark
from batchkit.config.terminal import shortened
from batchkit.config.tool_definitions import is_template, tools_in
from batchkit.errors import EngineError, JobError

_MOST_SHOWN, _SHOWN_BEFORE = 100, 30  # characters of a changed value to show
_CREDENTIAL = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w+/=%.~-]{20,}", re.ASCII)
# Options that may name a file or folder which decides the answers. Other options name folders that change
# while an engine works (download_dir), or are compared as text (chat_template).
_FILE_OPTIONS = ("tokenizer", "generation_config", "hf_config_path")
# These formats change the weights; other formats only read the same weights in another way.
_LOAD_FORMATS = ("dummy", "bitsandbytes")
# Keys whose value is a dict by name, such as the commit of each hub name. A name is compared only if both
# identities have it.
_LEARNED = ("engine.commits", "engine.served")  # known once an engine is loaded, or has answered
_FOUND = (*_LEARNED, "prompt.files", "engine.loras")
# Under these keys the order of a dict matters, because it is part of a prompt or of a schema.
_ORDERED = (
    "vars.",
    "input.cross",
    "sampling.",
    "pooling.",
    "engine.options.",
    "prompt.chat_template_kwargs",
    "prompt.tools",
)
# Keys of an engine that name its model.
_MODEL = ("kind", "model", "lora", "options.revision", "server.command")
# Keys of [scoring] that change which choice [select] picks.
_READ_TO_SELECT = {
    *("extract", "choices", "reference", "reference_run", "scorers", "mode", "rules"),
}
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
CHANGING = "changing"  # stored instead of the hash of a file that changed while a run read it
_WHOLE_BYTES = 8 * 2**20  # of a larger file only blocks are read
_BLOCKS, _BLOCK_BYTES, _END_BYTES = 64, 2**16, 2**20


def identity(job: JobConfig, prompt_files: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the identity of a run as one dict by dotted key, with secrets masked.

    ``prompt_files``: hashes of the files that the prompts of all rows include.
    """
    found = dict(_marked(job))
    for name in ("steps", "engines", "prompt.system_file", "prompt.user_file", "retry.reask_note"):
        del found[name]
    found |= {f"vars.{name}": value for name, value in found.pop("vars").items()}
    found |= {"prompt.texts": job.prompt.texts or None, **_of_texts(job), **_of_engine(job, found)}
    for step in job.steps:
        found |= _of_step(job, step)
    for name, engine in job.engines.items():
        found |= _of_named_engine(name, engine)
    if job.select.by is not None:
        scorers = {
            name: parameters
            for name, parameters in job.scoring.scorers.items()
            if job.select.by == "scorer" and job.select.scorer in (None, name)
        }
        scoring = job.scoring.model_copy(update={"scorers": scorers})
        found["select.scoring"] = scoring.model_dump(include=_READ_TO_SELECT, exclude_defaults=True)
    if job.rollout is not None:
        place, _, name = job.rollout.function.rpartition(":")
        found |= {"rollout.function": f"{Path(place).name}:{name}", **of_function(job)}
    if prompt_files:
        found["prompt.files"] = prompt_files
    if not job.may_have_vectors:  # without vectors it has no effect
        del found["output.vector_dtype"]
    plain: dict[str, Any] = orjson.loads(orjson.dumps(found, default=str))
    return {k: masked(v, k, _fingerprint_mask, _fingerprint_part) for k, v in plain.items()}


def _of_texts(job: JobConfig) -> dict[str, Any]:
    """Return the texts of the system prompt and the user prompt, the tools and the settings of ``retry.reask``, by key.

    Texts are read from their files if the job names files.
    """
    return {
        "prompt.system": _text(job.prompt.system, job.prompt.system_file),
        "prompt.user": _text(job.prompt.user, job.prompt.user_file),
        "prompt.tools": _tools(job.prompt.tools),
        "retry.reask": _reask(job),
    }


def _of_engine(job: JobConfig, found: dict[str, Any]) -> dict[str, Any]:
    """Return the identity of ``job.engine``. Removes from ``found`` the marked keys that the result replaces by hashes
    or parts."""
    options = found.pop("engine.options")
    its = {
        f"engine.options.{name}": value
        for name, value in options.items()
        if name not in SPEED_OPTIONS and (name != "load_format" or value in _LOAD_FORMATS)
    }
    its |= {
        "engine.model_files": model_fingerprint(job.engine.model_source),
        "engine.lora_files": model_fingerprint(job.engine.lora or ""),
        "engine.chat_template_text": _chat_template(options.get("chat_template")),
    }
    if (command := found.pop("engine.server.command", None)) is not None:
        its["engine.server.command"] = what_decides_answers(command)
    if loras := found.pop("engine.loras"):
        its["engine.loras"] = {
            name: adapter_fingerprint(place) or place for name, place in loras.items()
        }
    if files := {name: model_fingerprint(name) for name in _files(job)}:
        its["engine.files"] = files
    if commits := hub_commits(job):
        its["engine.commits"] = commits
    return its


def _of_named_engine(name: str, engine: EngineTable) -> dict[str, Any]:
    """Return the identity of the engine ``name`` in ``[engines]``, without unset keys."""
    its = identity(JobConfig(engine=engine))
    return {
        f"engines.{name}.{key.removeprefix('engine.')}": value
        for key, value in its.items()
        if key.startswith("engine.") and value is not None
    }


def _of_step(job: JobConfig, step: StepTable) -> dict[str, Any]:
    """Return the identity of one of ``[[steps]]``: all values that decide its answers or the values that later steps
    get."""
    its = job.of_step(step)
    of_both = ("prompt.", "sampling.")
    found = {
        "place": job.steps.index(step),
        **{key: value for key, value in _marked(step) if not key.startswith(("name", *of_both))},
        **step.model_dump(include={"extract", "scorers"}),
        **{key: value for key, value in _marked(its) if key.startswith(of_both)},
        **_of_texts(its),
    }
    found = {key: value for key, value in found.items() if not key.endswith("_file")}
    return {f"steps.{step.name}.{k}": v for k, v in found.items() if v not in (None, [], {})}


def of_function(job: JobConfig) -> dict[str, str | None]:
    """Return the hash of the file that contains ``rollout.function``, under the key ``rollout.source``.

    The hash is None if the file can't be read. Without ``[rollout]`` the result is {}.
    """
    if job.rollout is None:
        return {}
    place = job.rollout.function.rpartition(":")[0]
    try:
        path = place if place.endswith(".py") else getattr(find_spec(place), "origin", None)
        source = hashlib.sha256(read_bytes(path or "")).hexdigest()[:16]
    except (OSError, ImportError, ValueError):  # the code that loads the function reports the error
        source = None
    return {"rollout.source": source}


def _files(job: JobConfig) -> Iterator[str]:
    """Yield files and folders that the engine's options or its server's command name, and that decide the answers."""
    if job.engine.server is not None and job.engine.server.command is not None:
        yield from files_named(job.engine.server.command)
    for name in _FILE_OPTIONS:
        value = job.engine.options.get(name)
        if isinstance(value, str) and exists(value):
            yield value


def engine_identity(job: JobConfig) -> dict[str, Any]:
    """Return the part of ``identity`` about the engine and its files. The files are opened again at each start.

    Commits of models on the hub are left out, since loading a model may fetch a newer one.
    """
    found = {k: v for k, v in identity(job).items() if k.startswith(("engine.", "engines."))}
    return {k: v for k, v in found.items() if v is not None and home_of(k) not in _LEARNED}


def names_same_model(then: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether the old identity ``then`` and the new one ``now`` name the same models; options may differ."""
    names = {f"engine.{name}" for name in _MODEL}
    keys = {key for each in (then, now) for key in each if home_of(key) in names}
    return not differences(*({key: each.get(key) for key in keys} for each in (then, now)))


def hub_commits(job: JobConfig) -> dict[str, str]:
    """Return the commit hash in the local cache for each model, tokenizer or adapter of the job that is on the hub."""
    names = {name: of for name, of in _hub_names(job).items() if name and not exists(name)}
    if not names:
        return {}
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:  # a server may run in another environment, with another cache
        return {}
    cache = job.engine.options.get("download_dir") or HF_HUB_CACHE
    found = {}
    for name, revision in names.items():
        try:
            ref = Path(cache, f"models--{name.replace('/', '--')}", "refs", revision)
            found[name] = ref.read_text().strip()
        except OSError:  # not loaded yet, or the revision is a commit
            continue
    return found


def _hub_names(job: JobConfig) -> Mapping[str | None, str]:
    """Return names that may be on the Hugging Face hub (model, tokenizer, adapters), with their revisions."""
    engine, options = job.engine, job.engine.options
    if engine.server is not None and engine.server.command is not None:
        words = what_decides_answers(engine.server.command)
        parts = [part for word in words for part in word.split("=", 1)]
        given = dict(pairwise(parts))
        return dict.fromkeys(parts, given.get("--revision", "main"))
    if engine.kind not in ("vllm", "transformers"):
        return {}
    return {
        options.get("tokenizer"): options.get("tokenizer_revision") or "main",
        engine.lora: "main",
        **dict.fromkeys(engine.loras.values(), "main"),
        engine.model_source: options.get("revision") or "main",
    }


def check_found(then: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the identity ``then`` with the facts added that a loaded engine reports: hub commits and served models.

    - ``then``: the identity of the run so far.
    - ``found``: the reported facts by identity key, for example ``engine.commits``.

    Raises:
        EngineError: a reported fact differs from the one in ``then``, so the model has changed.
    """
    if changes := differences({key: then.get(key, {}) for key in found}, found):
        raise EngineError(
            "the model has changed since the run began, and all answers of a run must come from one"
            f" model: {'; '.join(changes)}. Every finished row is on disk: restore that model and run"
            " the same command again, or begin a new run (--fresh)"
        )
    return continued(then, {**then, **found})


def _marked(table: Table, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each field that is marked ``Identity``."""
    for name, field in type(table).model_fields.items():
        value = getattr(table, name)
        if Mark.IDENTITY in field.metadata:
            yield f"{prefix}{name}", value
        elif isinstance(value, Table) and Mark.FREE not in field.metadata:
            yield from _marked(value, f"{prefix}{name}.")
    for name, value in (table.model_extra or {}).items():  # [sampling] takes any name
        yield f"{prefix}{name}", value


def scoring_of(job: JobConfig) -> str:
    """Return a hash of ``[scoring]``. A start compares it with the manifest's to notice that the scoring has
    changed."""
    return hash_of(orjson.loads(orjson.dumps(job.scoring.model_dump(), default=str)))


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return one line per key whose value differs between two identities: the key, the value ``then``, the value
    ``now``.

    A masked secret of unknown value equals every value. A file that changed while a run used it differs from every
    file, because some rows saw its old content and other rows its new content.
    """
    then, now = dict(then), dict(now)
    for key in _keys_with_facts(then, now):
        old, new = then.pop(key, {}), now.pop(key, {})
        names = [name for name in old if name in new and CHANGING in (old[name], new[name])]
        new = {**new, **dict.fromkeys(names, f"not one content ({CHANGING})")}
        changed = [name for name in old if name in new and old[name] != new[name]]
        if changed:
            then[key], now[key] = ({name: of[name] for name in changed} for of in (old, new))
    lines = []
    for key in sorted({*then, *now}):
        old, new, sort = then.get(key), now.get(key), not home_of(key).startswith(_ORDERED)
        if _json(known_of(new, old, key), sort=sort) != _json(known_of(old, new, key), sort=sort):
            lines.append(f"{key}: {beside(old, new)}")
    return lines


def continued(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the identity of a run that began as ``then`` and is continued as ``now``.

    It is ``now`` with two kinds of values from ``then`` added: masked secrets, and facts of loaded models such as hub
    commits.
    """
    known: dict[str, Any] = known_of(dict(now), dict(then))
    found = {key: {**then.get(key, {}), **now.get(key, {})} for key in _keys_with_facts(then, now)}
    return known | {key: names for key, names in found.items() if names}


def facts_of(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of ``identity`` that holds facts by name, such as hub commits and hashes of prompt files."""
    return {key: identity[key] for key in _keys_with_facts(identity)}


def _keys_with_facts(*identities: Mapping[str, Any]) -> set[str]:
    """Return the keys in any of ``identities`` that are listed in ``_FOUND``, also those of ``[engines]`` and steps.

    The value of such a key is a dict of facts by name: a model's hub commit, the hash of a prompt file. Under these
    keys, identities are compared and merged name by name.
    """
    return {key for found in identities for key in found if home_of(key) in _FOUND}


def known_of(value: Any, other: Any, key: str = "") -> Any:
    """Return ``value`` with masked secrets replaced by the corresponding parts of ``other``, where they may be the same
    secret.

    ``key``: the dotted key of ``value``. A text ``***`` that is no masked secret is not changed.
    """
    if isinstance(value, dict) and isinstance(other, dict):
        return {
            name: known_of(part, other.get(name, part), f"{key}.{name}" if key else name)
            for name, part in value.items()
        }
    if isinstance(value, list) and isinstance(other, list) and len(value) == len(other):
        return [known_of(part, its, key) for part, its in zip(value, other, strict=True)]
    if isinstance(value, str) and MASK in secrets_in(value, key):
        return other if value in (MASK, masked(other, key)) else value
    return value


def adapter_fingerprint(folder: str) -> str | None:
    """Return a hash of the adapter files in ``folder`` that vLLM reads. Other files, which trainers write, are ignored.

    Returns None if ``folder`` has no such files, or is a name on the hub.
    """
    paths = [path for name in ADAPTER_FILES if (path := Path(folder, name)).is_file()]
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        with open_regular(path) as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16] if paths else None


def model_fingerprint(model: str) -> str | None:
    """Return a hash of a model's file, or of the files in its folder; None if ``model`` is a name.

    Small files are read completely. For large files only both ends and evenly spread blocks are read, since reading a
    whole large model would take minutes.
    """
    place = Path(model)
    if not model or not (place.is_file() or place.is_dir()):
        return None
    digest = hashlib.sha256()
    for path in [place] if place.is_file() else sorted(filter(Path.is_file, place.iterdir())):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with open_regular(path) as file:
            for start, length in _spans(size):
                file.seek(start)
                digest.update(file.read(length))
    return digest.hexdigest()[:16]


def _spans(size: int) -> Iterator[tuple[int, int]]:
    if size <= _WHOLE_BYTES:
        yield 0, size
        return
    yield 0, _END_BYTES
    yield size - _END_BYTES, _END_BYTES
    for n in range(_BLOCKS):
        yield n * (size - _BLOCK_BYTES) // (_BLOCKS - 1), _BLOCK_BYTES


def _reask(job: JobConfig) -> Any:
    """Return the settings that decide when and how ``retry.reask`` asks again; None if it is off, or with
    ``[[steps]]``."""
    if not job.retry.reask or job.steps:
        return None
    of_rules = {"__all__": {"where", "extract"}}
    looked_for = job.scoring.model_dump(include={"extract": True, "rules": of_rules})
    return [job.retry.reask, job.retry.reask_note, looked_for]


def _fingerprint_part(secret: str) -> str:
    """Return the mask for a secret inside a text that the model may see, such as "MD" in "Credentials: MD".

    The mask is ``_fingerprint_mask(secret)``. Credentials in a signed URL become a plain ``***`` without a fingerprint,
    because a newly signed URL leads to the same file.
    """
    return MASK if _CREDENTIAL.fullmatch(secret) else _fingerprint_mask(secret)


def _fingerprint_mask(secret: str) -> str:
    """Return ``***`` and six hex digits of a hash: different for different secrets, without showing them.

    A text that is such a mask already is returned unchanged.
    """
    if FINGERPRINT.fullmatch(secret):
        return secret
    return MASK + hashlib.sha256(secret.encode()).hexdigest()[:6]


def _text(inline: str | None, path: str | None) -> str | None:
    """Return the text ``inline`` from the job file, or the content of the file ``path`` if that is set."""
    if path is None:
        return inline
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError):  # the renderer reports it in more detail
        return None


def _tools(tools: Any) -> Any:
    """Return the tool definitions, read from their file if ``tools`` names one."""
    if not isinstance(tools, str) or is_template(tools):
        return tools
    try:
        return tools_in(tools)
    except JobError:  # the renderer reports it
        return None


def _chat_template(template: Any) -> str | None:
    """Return the text of the file that ``template`` names, or None if it is not a file name."""
    path = str(template or "")  # may also be the template itself
    return _text(None, path) if is_file(path) else None


def hash_of(value: Any) -> str:
    """Return 16 hex digits that are the same for equal JSON values."""
    return hashlib.sha256(_json(value)).hexdigest()[:16]


def _json(value: Any, *, sort: bool = True) -> bytes:
    """Return ``value`` as JSON for a comparison.

    JSON is compared because Python's ``==`` finds 1, 1.0 and True equal, but templates print them differently.
    """
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS if sort else None)


def beside(old: Any, new: Any) -> str:
    """Return ``old → new`` as JSON for a message. Long values are cut to the part where they differ."""
    texts = [orjson.dumps(value).decode() for value in (old, new)]
    if any(len(text) > _MOST_SHOWN for text in texts):
        pairs = enumerate(zip(*texts, strict=False))
        differs = next((n for n, (a, b) in pairs if a != b), min(map(len, texts)))
        start = max(0, differs - _SHOWN_BEFORE)
        texts = ["…" * bool(start) + shortened(text[start:], _MOST_SHOWN) for text in texts]
    return " → ".join(texts)
