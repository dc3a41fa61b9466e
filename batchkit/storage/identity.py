"""The identity of a run: all settings and file hashes that decide its answers.

Keys of the job file that decide answers are marked ``Identity`` (``config/tables/base.py``). Keys that change only the
speed (batch sizes, intervals) are marked ``Free``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson

from batchkit.config.masking import FINGERPRINT, MASK, home_of, masked, secrets_in
from batchkit.config.regular_file import exists, is_file, read_bytes, read_text
from batchkit.config.server_command import files_named, what_decides_answers
from batchkit.config.speed_options import SPEED_OPTIONS
from batchkit.config.tables import EngineTable, JobConfig, StepTable, Table
from batchkit.config.tables.base import Mark
from batchkit.config.terminal import shortened
from batchkit.config.tool_definitions import is_template, tools_in
from batchkit.errors import EngineError, JobError
from batchkit.storage.fingerprints import adapter_fingerprint, model_fingerprint

_MOST_SHOWN, _SHOWN_BEFORE = 100, 30  # characters of a changed value to show
_CREDENTIAL = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w+/=%.~-]{20,}", re.ASCII)
# Options that may name a file or folder which decides the answers. Other options name folders that change
# while an engine works (download_dir), or are compared as text (chat_template).
_FILE_OPTIONS = ("tokenizer", "generation_config", "hf_config_path")
# These formats change the weights; other formats only read the same weights in another way.
_LOAD_FORMATS = ("dummy", "bitsandbytes")
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
_MODEL = {
    f"engine.{name}" for name in ("kind", "model", "lora", "options.revision", "server.command")
}
# Keys of [scoring] that change which choice [select] picks.
_READ_TO_SELECT = {
    *("extract", "choices", "reference", "reference_run", "scorers", "mode", "rules"),
}
Facts = Mapping[str, Mapping[str, Any]]
"""Facts by dotted key and name, such as the commit of each model on the hub."""
CHANGING = "changing"  # stored instead of the hash of a file that changed while a run read it


@dataclass(frozen=True, slots=True)
class Identity:
    """Everything that decides the answers of a run.

    - ``job``: settings by dotted key, with secrets masked.
    - ``files``: hashes of the files from which engines and functions are loaded, by dotted key.
    - ``found``: facts, which are compared name by name, if both identities have the name.
    """

    job: dict[str, Any]
    files: dict[str, Any]
    found: dict[str, dict[str, Any]]

    def get(self, key: str, default: Any = None) -> Any:
        """Return the setting ``key`` of the job."""
        return self.job.get(key, default)

    def with_secrets_of(self, then: Identity) -> Identity:
        """Return this identity with its masked secrets replaced by secrets of ``then``, where they may be the same."""
        return replace(self, job=known_of(self.job, then.job))

    def with_facts(self, found: Facts) -> Identity:
        """Return this identity with the facts of ``found`` added; they replace facts with the same name."""
        return replace(self, found=_joined(self.found, found))


def identity(job: JobConfig, prompt_files: Mapping[str, str] | None = None) -> Identity:
    """Return the identity of a run.

    ``prompt_files``: hashes of the files that the prompts of all rows include.
    """
    of_engines = engine_identity(job)
    settings = {
        key: value for key, value in _marked(job) if not key.startswith(("engine.", "engines"))
    }
    for name in ("steps", "prompt.system_file", "prompt.user_file", "retry.reask_note"):
        del settings[name]
    settings |= {f"vars.{name}": value for name, value in settings.pop("vars").items()}
    settings |= {"prompt.texts": job.prompt.texts or None, **_of_texts(job)}
    for step in job.steps:
        settings |= _of_step(job, step)
    if job.select.by is not None:
        scorers = {
            name: parameters
            for name, parameters in job.scoring.scorers.items()
            if job.select.by == "scorer" and job.select.scorer in (None, name)
        }
        scoring = job.scoring.model_copy(update={"scorers": scorers})
        settings["select.scoring"] = scoring.model_dump(
            include=_READ_TO_SELECT, exclude_defaults=True
        )
    if job.rollout is not None:
        place, _, name = job.rollout.function.rpartition(":")
        settings["rollout.function"] = f"{Path(place).name}:{name}"
    if not job.may_have_vectors:  # without vectors it has no effect
        del settings["output.vector_dtype"]
    found: dict[str, Any] = {
        f"{key}.commits": hub_commits(engine) or None for key, engine in _engines(job)
    }
    found["prompt.files"] = prompt_files or None
    return Identity(
        of_engines.job | _as_stored(settings),
        of_engines.files,
        of_engines.found | _as_stored(found),
    )


def engine_identity(job: JobConfig) -> Identity:
    """Return the part of ``identity`` about engines and the files that are opened again at each start.

    Commits of models on the hub are left out, since loading a model may fetch a newer one.
    """
    settings, files, found = dict[str, Any](), dict[str, Any](), dict[str, Any]()
    for key, engine in _engines(job):
        settings |= {f"{key}.{name}": value for name, value in _settings_of(engine).items()}
        files |= {f"{key}.{name}": value for name, value in _files_of(engine).items()}
        loras = {name: adapter_fingerprint(at) or at for name, at in engine.loras.items()}
        found[f"{key}.loras"] = loras or None
    if job.rollout is not None:
        files["rollout.source"] = _hash_of_function(job.rollout.function.rpartition(":")[0])
    return Identity(*map(_as_stored, (settings, files, found)))


def _engines(job: JobConfig) -> Iterator[tuple[str, EngineTable]]:
    """Yield each engine of the job with its key: ``engine`` or ``engines.NAME``."""
    yield "engine", job.engine
    yield from ((f"engines.{name}", engine) for name, engine in job.engines.items())


def _as_stored(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part of an identity as JSON has it, without unset keys and with secrets masked."""
    plain: dict[str, Any] = orjson.loads(orjson.dumps(part, default=str))
    return {
        key: masked(value, key, _fingerprint_mask, _fingerprint_part)
        for key, value in plain.items()
        if value is not None
    }


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


def _settings_of(engine: EngineTable) -> dict[str, Any]:
    settings = dict(_marked(engine))
    del settings["loras"]  # a fact for each adapter
    settings |= {
        f"options.{name}": value
        for name, value in settings.pop("options").items()
        if name not in SPEED_OPTIONS and (name != "load_format" or value in _LOAD_FORMATS)
    }
    if (command := settings.get("server.command")) is not None:
        settings["server.command"] = what_decides_answers(command)
    return settings


def _files_of(engine: EngineTable) -> dict[str, Any]:
    return {
        "model_files": model_fingerprint(engine.model_source),
        "lora_files": model_fingerprint(engine.lora or ""),
        "chat_template_text": _chat_template(engine.options.get("chat_template")),
        "files": {name: model_fingerprint(name) for name in _files(engine)} or None,
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


def _hash_of_function(place: str) -> str | None:
    """Return the hash of the Python file or module ``place``; None if it can't be read."""
    try:
        path = place if place.endswith(".py") else getattr(find_spec(place), "origin", None)
        return hashlib.sha256(read_bytes(path or "")).hexdigest()[:16]
    except (OSError, ImportError, ValueError):  # the code that loads the function reports the error
        return None


def _files(engine: EngineTable) -> Iterator[str]:
    """Yield files and folders that the engine's options or its server's command name, and that decide the answers."""
    if engine.server is not None and engine.server.command is not None:
        yield from files_named(engine.server.command)
    for name in _FILE_OPTIONS:
        value = engine.options.get(name)
        if isinstance(value, str) and exists(value):
            yield value


def names_same_model(then: Identity, now: Identity) -> bool:
    """Return whether the old identity ``then`` and the new one ``now`` name the same models; options may differ."""
    return all(home_of(key) not in _MODEL for key in changed_settings(then, now))


def hub_commits(engine: EngineTable) -> dict[str, str]:
    """Return the commit hash in the local cache for each model, tokenizer or adapter of the engine that is on the
    hub."""
    names = {name: of for name, of in _hub_names(engine).items() if name and not exists(name)}
    if not names:
        return {}
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:  # a server may run in another environment, with another cache
        return {}
    cache = engine.options.get("download_dir") or HF_HUB_CACHE
    found = {}
    for name, revision in names.items():
        try:
            ref = Path(cache, f"models--{name.replace('/', '--')}", "refs", revision)
            found[name] = ref.read_text().strip()
        except OSError:  # not loaded yet, or the revision is a commit
            continue
    return found


def _hub_names(engine: EngineTable) -> Mapping[str | None, str]:
    """Return names that may be on the Hugging Face hub (model, tokenizer, adapters), with their revisions."""
    if engine.server is not None and engine.server.command is not None:
        words = what_decides_answers(engine.server.command)
        parts = [part for word in words for part in word.split("=", 1)]
        given = dict(pairwise(parts))
        return dict.fromkeys(parts, given.get("--revision", "main"))
    if engine.kind not in ("vllm", "transformers"):
        return {}
    return {
        engine.options.get("tokenizer"): engine.options.get("tokenizer_revision") or "main",
        engine.lora: "main",
        **dict.fromkeys(engine.loras.values(), "main"),
        engine.model_source: engine.options.get("revision") or "main",
    }


def check_found(then: Facts, found: Facts) -> Facts:
    """Return the facts ``then`` with the facts ``found`` added, which a loaded engine reports: hub commits and served
    models.

    Raises:
        EngineError: a reported fact differs from the one in ``then``, so the model has changed.
    """
    if changes := [f"{key}: {beside(old, new)}" for key, old, new in _changed_facts(then, found)]:
        raise EngineError(
            "the model has changed since the run began, and all answers of a run must come from one"
            f" model: {'; '.join(changes)}. Every finished row is on disk: restore that model and run"
            " the same command again, or begin a new run (--fresh)"
        )
    return _joined(then, found)


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


def differences(then: Identity, now: Identity) -> list[str]:
    """Return one line per key whose value differs between two identities: the key, the value ``then``, the value
    ``now``.

    A masked secret of unknown value equals every value. A file that changed while a run used it differs from every
    file, because some rows saw its old content and other rows its new content.
    """
    changes = [
        *_changed(then.job, now.job),
        *_changed(then.files, now.files),
        *_changed_facts(then.found, now.found),
    ]
    changes.sort(key=lambda change: change[0])
    return [f"{key}: {beside(old, new)}" for key, old, new in changes]


def changed_settings(then: Identity, now: Identity) -> set[str]:
    """Return the keys of the job whose values differ between two identities."""
    return {key for key, _, _ in _changed(then.job, now.job)}


def _changed(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield each key whose value differs, with the value ``then`` and the value ``now``."""
    for key in {*then, *now}:
        old, new, sort = then.get(key), now.get(key), not home_of(key).startswith(_ORDERED)
        if _json(known_of(new, old, key), sort=sort) != _json(known_of(old, new, key), sort=sort):
            yield key, old, new


def _changed_facts(then: Facts, now: Facts) -> Iterator[tuple[str, Any, Any]]:
    """Yield each key whose facts differ, with the facts that differ on both sides."""
    for key in then.keys() & now.keys():
        pairs = {name: (old, now[key][name]) for name, old in then[key].items() if name in now[key]}
        differ = {
            name: pair for name, pair in pairs.items() if pair[0] != pair[1] or CHANGING in pair
        }
        if differ:
            yield (
                key,
                {name: old for name, (old, _) in differ.items()},
                {name: new for name, (_, new) in differ.items()},
            )


def _joined(then: Facts, now: Facts) -> dict[str, dict[str, Any]]:
    return {key: {**then.get(key, {}), **now.get(key, {})} for key in {**then, **now}}


def continued(then: Identity, now: Identity) -> Identity:
    """Return the identity of a run that began as ``then`` and is continued as ``now``.

    It is ``now`` with two kinds of values from ``then`` added: masked secrets, and facts of loaded models such as hub
    commits.
    """
    return replace(now.with_secrets_of(then), found=_joined(then.found, now.found))


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
