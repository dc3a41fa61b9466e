"""Variants of a job: the same job with some keys changed. Each variant is a separate run.

A variant comes from a ``[[variant]]`` table of the job file, or from ``--vary KEY=A,B``. Several ``--vary`` options,
and ``[[variant]]`` tables together with them, give all combinations.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from batchkit.config.export_target import target_of
from batchkit.config.loading import (
    VARIANT,
    check_override,
    job_table,
    make_job,
    parse_value,
    put,
    with_input_found,
)
from batchkit.config.tables import JobConfig
from batchkit.config.urls import bare
from batchkit.errors import JobError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_LONGEST_NAME, _LONGEST_NAMES = 40, 200  # characters; a file name may have 255


class Variant(NamedTuple):
    """A variant of a job. ``settings``: the values that replace the job's values, by dotted key."""

    name: str
    settings: Mapping[str, Any]


def load_variants(
    path: Path,
    folder: Path,
    overrides: Sequence[str] = (),
    given: Mapping[str, Any] = MappingProxyType({}),
    vary: Sequence[str] = (),
) -> list[JobConfig]:
    """Return the job of each variant, or an empty list if the job file and ``vary`` define none.

    ``folder``: the run folder of the job. The run folder of each variant is inside this folder and has the variant's
    name. ``vary`` has texts like ``sampling.temperature=0,0.7``. ``overrides`` and ``given`` apply to all variants (see
    ``load_job``). If a variant changes ``engine.kind``, it keeps only ``model`` of the job's ``[engine]``.

    Raises:
        JobError: The job or a variant is invalid; the message names the variant.
    """
    table = job_table(path)
    tables = _in_file(table.pop(VARIANT, []), str(path))
    groups = [*([tables] if tables else []), *map(_alternatives, vary)]
    found = list[JobConfig]()
    for key in {text.partition("=")[0].strip() for text in vary} & {
        *given,
        *(text.partition("=")[0].strip() for text in overrides),
    }:
        raise JobError(f"--vary {key}: another option sets {key} for all variants; keep one")
    for parts in product(*groups) if groups else ():
        name = "_".join(part.name for part in parts)
        settings = {key: value for part in parts for key, value in part.settings.items()}
        job = _with_settings(table, path, overrides, given, Variant(name, settings))
        renamed = job.with_keys(name=name, output={"dir": str(folder)})
        found.append(renamed.as_trial() if job.is_trial else renamed)
    names = [job.name for job in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise JobError(f"{path}: two variants have the name {twice!r}")
    exports = [text for job in found for text in {*job.output.export} if target_of(text).place]
    if shared := next((text for text in exports if exports.count(text) > 1), None):
        raise JobError(
            f"output.export: {bare(shared)}: each variant would write the same file; name a format instead, which is"
            " written into each run folder"
        )
    return found


def _with_settings(
    table: Mapping[str, Any],
    path: Path,
    overrides: Sequence[str],
    given: Mapping[str, Any],
    variant: Variant,
) -> JobConfig:
    own, origin = deepcopy(dict(table)), f"{path}: variant {variant.name}"
    kind, engine = variant.settings.get("engine.kind"), own.get("engine")
    if kind is not None and isinstance(engine, dict) and engine.get("kind", "vllm") != kind:
        own["engine"] = {name: engine[name] for name in ("model",) if name in engine}
    for key, value in variant.settings.items():
        put(own, key.split("."), value, origin)
    job = make_job(own, origin, overrides, with_input_found(given), base=path.parent)
    return job.as_made_in(str(path.resolve()))


def _in_file(tables: Any, origin: str) -> list[Variant]:
    """Return the variants of the job file's ``[[variant]]`` tables."""
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise JobError(f"{origin}: variant: write each variant as a table [[variant]] with a name")
    found = []
    for table in tables:
        name = table.pop("name", None)
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise JobError(
                f"{origin}: [[variant]]: name is {name!r}; a name has letters, digits, '.', '_' and '-', because it"
                " names the variant's run folder"
            )
        found.append(Variant(name, dict(_leaves(table, ""))))
    return found


def _leaves(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each entry in ``table``, at any depth, that is not a table."""
    for name, value in table.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _alternatives(text: str) -> list[Variant]:
    """Return a variant for each value in ``KEY=A,B`` or ``KEY=["A", "B"]``."""
    check_override(text, "--vary")
    key, _, given = text.partition("=")
    key = key.strip()
    values = parse_value(given)
    if not isinstance(values, list):
        values = [parse_value(part.strip()) for part in given.split(",")]
    if len(values) < 2:
        raise JobError(
            f"--vary {text}: one value, so nothing varies; give several, such as {key}=A,B, or a TOML list"
            f' for texts with commas: {key}=\'["A", "B"]\''
        )
    last, names = key.rpartition(".")[2], list[str]()
    for number, value in enumerate(values, start=1):
        name = _named(last, value) or f"{last}-{number}"
        names.append(f"{last}-{number}" if name in names else name)
    return [Variant(name, {key: value}) for name, value in zip(names, values, strict=True)]


def variant_name(settings: Mapping[str, Any]) -> str:
    """Return a name for a variant with ``settings``, for example ``temperature-0.7``. Long values are left out. Return
    ``default`` if nothing is left."""
    named = (_named(key.rpartition(".")[2], value) for key, value in settings.items())
    return "_".join(filter(None, named))[:_LONGEST_NAMES] or "default"


def _named(key: str, value: Any) -> str:
    """Return a name for ``key`` with ``value``, for example ``top_p-0.9``; "" if the value is empty or too long for a
    name."""
    word = re.sub(r"[^A-Za-z0-9._]+", "-", str(value)).strip("-.")
    return f"{key}-{word}" if 0 < len(word) <= _LONGEST_NAME else ""
