"""How a job file becomes a ``JobConfig``: read, overridden, checked, its paths made absolute."""

from __future__ import annotations

import glob
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any

from batchkit.config.masking import learn, learn_secret, masked, masked_text
from batchkit.config.problems import annotation_of, homes_of, shown
from batchkit.config.regular_file import is_dir, is_file, read_bytes, read_text
from batchkit.config.suggest import QUOTE, did_you_mean
from batchkit.config.tables import (
    EngineTable,
    InputTable,
    JobConfig,
    MediaTable,
    PromptTable,
    RolloutTable,
    ScoringTable,
)
from batchkit.config.terminal import shortened
from batchkit.config.tool_definitions import is_template
from batchkit.config.urls import bare, check_user_info, is_remote
from batchkit.config.values import check_values, reason_of
from batchkit.errors import JobError

_SCHEMA = "sampling.structured_outputs.json"
_ESCAPED = re.compile(r"\[([*?[])\]")  # by glob.escape
_REMEDIES = {  # by the beginning of what tomllib says
    "Invalid value": '; a text needs straight quotes ("text"), and true and false small letters',
    "Invalid hex value": "; \\ begins an escape in \"…\": write '…', or / for it",
    "Unescaped '\\'": "; \\ begins an escape in \"…\": write '…', or / for it",
    "Illegal character '\\n'": '; a text of several lines needs three quotes: """…"""',
}


def load_job(
    path: Path,
    overrides: Sequence[str] = (),
    given: Mapping[str, Any] = MappingProxyType({}),
    *,
    if_missing: Mapping[str, Any] = MappingProxyType({}),
) -> JobConfig:
    """The job in ``path`` with the ``KEY=VALUE`` overrides applied and its paths made absolute.

    ``given`` are values by dotted key that replace those of both; its ``input.path`` is looked up in
    the working directory, as a shell completes it. ``if_missing``: tables that the file need not have.

    Raises:
        JobError: unreadable, not TOML, or any key wrong; one message lists all problems.
    """
    table = {**if_missing, **_read(path)}
    if (rows := given.get("input.path")) is not None:
        given = {**given, "input.path": _find_input(rows, Path.cwd())}
    job = make_job(table, str(path), overrides, given, base=path.parent)
    return job.as_made_in(str(path.resolve()))


def check_not_moved(path: Path, job: JobConfig, overrides: Sequence[str]) -> None:
    """Raise JobError if ``path`` is in a run folder that was moved, and ``overrides`` do not say where to run ``job``."""
    if any(override.startswith(("name=", "output.dir=")) for override in overrides):
        return
    here = path.resolve().parent
    if is_file(str(here / "manifest.json")) and here != job.folder.resolve():
        raise JobError(
            f"{path}: is of a run folder that was moved here from {job.folder}; to continue it here:"
            f" --set output.dir={here.parent} --set name={here.name}"
        )


def resolved_job(path: Path) -> JobConfig:
    """The job in a ``job.toml`` that a run has written: nothing in it is filled in or looked for. Raises as
    ``load_job``."""
    job = with_filled(parse_job(_read(path), str(path)))
    learn_secrets(job)
    return job


def _read(path: Path) -> dict[str, Any]:
    try:
        data = read_bytes(path)
    except FileNotFoundError:
        if is_file(str(path.with_name("manifest.json"))):
            raise JobError(
                f"{path}: is missing; `batchkit run` with the job file that made the run writes it again, and"
                " `status` and `verify` work without it"
            ) from None
        near = did_you_mean(path.name, (file.name for file in path.parent.glob("*.toml")))
        near = f"; {QUOTE}" if "{" in path.name else near
        raise JobError(f"{path}: no such job file{near}") from None
    except IsADirectoryError:
        raise JobError(
            f"{path}: is a folder; give a job file (of a run folder, name {path}/job.toml)"
        ) from None
    except OSError as error:
        raise JobError(f"{path}: can't be read: {error.strerror}") from error
    try:
        return tomllib.loads(data.decode("utf-8-sig"))
    except (RecursionError, ValueError) as error:  # ValueError also for thousands of digits
        if path.suffix.lower() in (".yaml", ".yml"):
            raise JobError(
                f"{path}: is YAML, and a job file is TOML (`batchkit init` writes one)"
            ) from None
        if path.suffix.lower() not in ("", ".toml"):
            raise JobError(
                f"{path}: is no job file, which is TOML. If it holds the rows: batchkit run --model MODEL"
                f" --input {path} --prompt '… {{{{ column }}}}', or name it in a job file (`batchkit init`"
                f" writes one); {QUOTE}"
            ) from None
        if isinstance(error, UnicodeDecodeError):
            raise JobError(f"{path}: is not UTF-8 text; save it as UTF-8") from None
        if isinstance(error, tomllib.TOMLDecodeError):
            problem = _problem_in(data.decode("utf-8-sig"), error)
            raise JobError(f"{path}: not valid TOML: {problem}") from None
        raise JobError(f"{path}: can't be read: {reason_of(error)}") from error


def _problem_in(text: str, error: tomllib.TOMLDecodeError) -> str:
    """What is wrong with ``text``, and the line at which Python's reader stopped."""
    reason, _, place = str(error).partition(" (at ")
    lines = text.rstrip().splitlines() or [""]
    found = re.match(r"line (\d+)", place)  # otherwise it is the end of the document
    number = min(int(found[1]) if found else len(lines), len(lines))
    reason += next((fix for start, fix in _REMEDIES.items() if reason.startswith(start)), "")
    line = shortened(masked_text(lines[number - 1].strip()), 120)
    return f"line {number}: {reason}\n  {line}"


def make_job(
    table: dict[str, Any],
    origin: str,
    overrides: Sequence[str] = (),
    given: Mapping[str, Any] = MappingProxyType({}),
    *,
    base: Path | None = None,
) -> JobConfig:
    """As ``load_job``, from a table; relative paths are looked up in ``base`` first."""
    made_dry = [_leave_out_engine(table, override) for override in overrides]
    for override in overrides:
        _override(table, override)
    for key, value in given.items():
        _put(table, key.split("."), value, key)
    base = base or Path.cwd()
    _read_schemas(table, base)
    job = resolve_paths(parse_job(table, origin), base)
    return job.as_trial() if any(made_dry) else job


def _read_schemas(table: Mapping[str, Any], base: Path) -> None:
    """Replace each name of a file in ``structured_outputs.json`` by the schema in that file."""
    steps, scoring = table.get("steps"), table.get("scoring")
    judge = scoring.get("judge") if isinstance(scoring, Mapping) else None
    for place in (table, judge, *(steps if isinstance(steps, list) else ())):
        match place:
            case {"sampling": {"structured_outputs": {"json": str(text)} as wanted}}:
                if not text.lstrip().startswith("{"):
                    wanted["json"] = _schema_in(_find(text, base, _SCHEMA))


def _schema_in(path: Path) -> Any:
    try:
        return json.loads(read_text(str(path)))
    except OSError as error:
        raise JobError(
            f"{_SCHEMA}: {path}: {error.strerror}; give a table, JSON, or the name of a file with a JSON schema"
        ) from error
    except (ValueError, RecursionError) as error:
        raise JobError(f"{_SCHEMA}: {path}: is not JSON: {reason_of(error)}") from error


def parse_job(table: Mapping[str, Any], origin: str) -> JobConfig:
    """A checked job; ``origin`` names the file in errors.

    Raises:
        JobError: with one line per problem: key, what was found, what was expected.
    """
    learn(os.environ)
    with suppress(ValueError):  # what is too deep or too long is refused below
        check_values(table)
        learn(table)
    return JobConfig.model_validate(table, context={"origin": origin})


def parse_value(text: str) -> Any:
    """``text`` as a TOML value if it is one (``0``, ``true``, ``["a"]``), else the text."""
    try:
        table = tomllib.loads(f"value = {text}")
    except (RecursionError, ValueError):
        return text
    return table["value"] if len(table) == 1 else text


def masked_override(override: str) -> str:
    """``KEY=VALUE`` with secrets masked, as it may be shown and written to a file."""
    key, equals, text = override.partition("=")
    if not equals:
        return masked_text(override)
    value = parse_value(text)
    hidden = masked(value, key.strip())
    if hidden == value:
        return override
    return f"{key}={hidden if isinstance(hidden, str) else shown(hidden)}"


def check_override(override: str, flag: str = "--set") -> None:
    """Raises JobError if ``override`` is not KEY=VALUE."""
    key, equals, _ = override.partition("=")
    if not equals or not all(key.strip().split(".")):
        key = next(iter(homes_of(JobConfig, key)), key if "." in key else "sampling.temperature")
        raise JobError(
            f"{flag} {masked_override(override)}: write KEY=VALUE in one word, as in {flag} {key}=…"
        )


def _override(table: dict[str, Any], override: str) -> None:
    check_override(override)
    key, _, text = override.partition("=")
    parts = key.strip().split(".")
    value = parse_value(text)
    if not isinstance(value, str) and annotation_of(JobConfig, parts) in (str, str | None):
        value = text  # a folder named "2024" is a name and not a number
    _put(table, parts, value, f"--set {masked_override(override)}")


def _leave_out_engine(table: Any, override: str) -> bool:
    """``--set engine.kind=dry-run`` tries any job: what only its own engine knows is left out.

    So does ``--set scoring.judge.engine.kind=dry-run`` for the judge's, and ``engines.NAME.kind``. True if no model
    will answer what another engine's would have.
    """
    key, _, kind = override.partition("=")
    *parts, last = key.strip().split(".")
    is_engine = parts[-1:] == ["engine"] or (parts[:1] == ["engines"] and len(parts) == 2)
    if not is_engine or (last, kind.strip()) != ("kind", "dry-run"):
        return False
    for part in parts:
        table = table.get(part) if isinstance(table, dict) else None
    if not isinstance(table, dict) or table.get("kind") == "dry-run":
        return False
    for name in ({*table} & {*EngineTable.model_fields}) - {"model"}:  # a wrong key stays one
        del table[name]
    return parts[0] != "scoring"


def _put(table: Any, parts: list[str], value: Any, origin: str) -> None:
    """Set the key that ``parts`` name; ``origin`` names the setting in errors."""
    *parents, last = parts
    for depth, part in enumerate(parents):
        key = ".".join(parents[:depth])
        if isinstance(table, list):
            table = _one_of(table, part, key, origin)
        else:
            table = table.setdefault(part, {})
        is_list = isinstance(table, list) and table and all(isinstance(v, dict) for v in table)
        if not isinstance(table, dict) and not is_list:
            raise JobError(f"{origin}: {'.'.join(parts[: depth + 1])} is a value, not a table")
    if isinstance(table, list):
        raise JobError(f"{origin}: {'.'.join(parts)} is a table; name one of its keys")
    table[last] = value


def _one_of(tables: list[dict[str, Any]], part: str, key: str, origin: str) -> dict[str, Any]:
    """The one of ``tables``, a list of them at ``key``, with the name or the number ``part``."""
    by_name = {str(number): table for number, table in enumerate(tables)}
    by_name |= {str(table["name"]): table for table in tables if "name" in table}
    if part in by_name:
        return by_name[part]
    names = [str(table.get("name", number)) for number, table in enumerate(tables)]
    hint = did_you_mean(part, names) or f"; {key} has {', '.join(names)}"
    raise JobError(f"{origin}: {key} has no {part!r}{hint}")


def resolve_paths(job: JobConfig, base: Path) -> JobConfig:
    """The job with its relative paths made absolute, so that it means the same from anywhere."""
    update: dict[str, Any] = {
        "prompt": _with_files_found(job.prompt, base, "prompt"),
        "scoring": _scoring_resolved(job.scoring, base),
        "output": job.output.model_copy(update={"dir": os.path.realpath(at_home(job.output.dir))}),
        "steps": [
            step.model_copy(
                update={"prompt": _with_files_found(step.prompt, base, f"steps.{step.name}.prompt")}
            )
            for step in job.steps
        ],
        "rollout": job.rollout and _rollout_resolved(job.rollout, base),
        "engine": _with_loras_found(job.engine, base),
        "engines": {name: _with_loras_found(its, base) for name, its in job.engines.items()},
    }
    if job.input.path is not None:
        path = _fill(job.input.path, job, "input.path")
        check_user_info(path, "input.path")
        update["input"] = job.input.model_copy(update={"path": _find_input(path, base)})
    input_table = update.get("input", job.input)
    root = _media_root(job, base, input_table)
    # Not with model_copy, which would say that the root was given: `serve` asks for that.
    given, media = job.media.model_fields_set, {**job.media.model_dump(), "root": root}
    update["media"] = MediaTable.model_construct(given, **media)
    update["input"] = input_table.below(root)
    job = with_filled(job.model_copy(update=update)).as_made_in(str(Path.cwd()))
    learn_secrets(job)
    return job


def learn_secrets(job: JobConfig) -> None:
    """Make ``masked_text`` hide, in this process, what is secret in ``job`` and in the environment."""
    learn(os.environ, job.model_dump())
    for engine in (job.engine, *job.engines.values()):
        learn_secret(os.environ.get(engine.api_key_env, "").strip())


def _media_root(job: JobConfig, base: Path, rows: InputTable) -> str:
    """A folder made absolute; an fsspec URL unchanged. If none is given, one that has the files of
    ``rows``."""
    root = _fill(job.media.root, job, "media.root")
    if not is_remote(root):
        root = str(_find(root, base, "media.root"))
        folder = None if "root" in job.media.model_fields_set else _folder_of_files(rows)
        if folder is None or Path(os.path.normpath(folder)).is_relative_to(root):
            return root
        return folder
    check_user_info(root, "media.root")
    if job.scoring.table is not None and job.scoring.allow_code:
        raise JobError(
            f"scoring.table: charts read their tables from a folder, and media.root is {bare(root)};"
            " set media.root to a folder that holds them, or leave scoring.table out"
        )
    return root


def _folder_of_files(rows: InputTable) -> str | None:
    """The folder of an input whose rows are files; None if they are not, or have web addresses."""
    path = rows.path or ""
    is_folder = path.endswith("/") or is_dir(path)
    if not path or rows.is_run or not (is_folder or rows.rows_are_files(path)):
        return None
    if "://" in path and ("::" in path or not is_remote(path)):
        return None
    if is_folder:
        return path.rstrip("/")
    parts = path.split("/")[:-1]
    fixed = takewhile(lambda part: not glob.has_magic(_ESCAPED.sub("", part)), parts)
    return "/".join(_ESCAPED.sub(r"\1", part) for part in fixed)


def _with_files_found(prompt: PromptTable, base: Path, key: str) -> PromptTable:
    files = {
        name: str(_find(value, base, f"{key}.{name}"))
        for name in ("system_file", "user_file")
        if (value := getattr(prompt, name)) is not None
    }
    if isinstance(prompt.tools, str) and not is_template(prompt.tools):
        files["tools"] = str(_find(prompt.tools, base, f"{key}.tools"))
    return prompt.model_copy(update=files)


def _with_loras_found(engine: EngineTable, base: Path) -> EngineTable:
    """Folders made absolute; what is no folder is a name on the hub, or is missing."""
    if not engine.loras:
        return engine
    loras = {}
    for name, value in engine.loras.items():
        path = _find(value, base, f"engine.loras.{name}")
        loras[name] = str(path) if path.is_dir() else value
    return engine.model_copy(update={"loras": loras})


def _scoring_resolved(scoring: ScoringTable, base: Path) -> ScoringTable:
    update: dict[str, Any] = {}
    if scoring.reference_run is not None:
        run = _find(scoring.reference_run, base, "scoring.reference_run")
        if not run.exists():  # not made yet: runs are made below the working directory
            run = Path.cwd() / scoring.reference_run
        update["reference_run"] = str(run)
    if scoring.judge is not None:
        prompt = _with_files_found(scoring.judge.prompt, base, "scoring.judge.prompt")
        update["judge"] = scoring.judge.model_copy(update={"prompt": prompt})
    return scoring.model_copy(update=update)


def _rollout_resolved(rollout: RolloutTable, base: Path) -> RolloutTable:
    """A file's path made absolute; a module that is a file beside the job file, or in the working
    directory, becomes that file."""
    place, _, name = rollout.function.rpartition(":")
    is_file = place.endswith(".py")
    path = _find(place if is_file else f"{place.replace('.', '/')}.py", base, "rollout.function")
    if not is_file and not path.is_file():  # an installed one
        return rollout
    return rollout.model_copy(update={"function": f"{path}:{name}"})


def _fill(template: str, job: JobConfig, key: str) -> str:
    """``template`` with the job's ``[vars]`` filled in."""
    if "{" not in template:
        return template
    from jinja2 import StrictUndefined
    from jinja2.sandbox import SandboxedEnvironment

    try:
        environment = SandboxedEnvironment(undefined=StrictUndefined)
        return environment.from_string(template).render(job.vars)
    except Exception as error:  # a template may compute anything
        raise JobError(
            f"{key}: {shortened(repr(template), 200)}: {reason_of(error)}; [vars] holds {list(job.vars)}"
        ) from error


def _find(path: str, base: Path, key: str) -> Path:
    """``path`` beside the job file if something exists there, else in the working directory."""
    path = at_home(path)
    beside, here = base.resolve() / path, Path.cwd() / path
    try:
        return here if not beside.exists() and here.exists() else beside
    except OSError as error:  # no permission to look there, or the text is not a path
        raise JobError(f"{key}: {shown(path)}: {error.strerror}") from error


def _find_input(path: str, base: Path) -> str:
    """As ``_find``, or a URL; of ``zip://*.jsonl::rows.zip``, the archive is found so. Where ``path`` may be
    a glob, the folder before it is none: in a folder ``a[1]`` it finds no files of ``a1``."""
    if path == "-":
        raise JobError(
            "input.path: -: standard input can't be read again by a resume; save it as a file first"
        )
    path = at_home(path)
    if "://" in path:
        chain, _, last = path.rpartition("::")
        is_archive = chain and "://" not in last
        return f"{chain}::{_find(last, base, 'input.path')}" if is_archive else path
    found = _find(path, base, "input.path")
    if found.exists():
        return str(found)
    beside, here = (
        str(Path(glob.escape(str(folder)), path)) for folder in (base.resolve(), Path.cwd())
    )
    return here if _matches(here) and not _matches(beside) else beside


def at_home(path: str) -> str:
    """``path`` with the home folder for ``~`` or ``$HOME`` at its start, as a shell reads it."""
    is_there = path.startswith(("~/", "$HOME/"))
    return str(Path(path.replace("$HOME", "~", 1)).expanduser()) if is_there else path


def _matches(pattern: str) -> bool:
    return glob.has_magic(pattern) and next(glob.iglob(pattern, recursive=True), None) is not None


def prompt_columns(job: JobConfig) -> frozenset[str]:
    """Names in the texts of its prompts, but those of ``[vars]``, ``input.cross`` and the places of clips; a template
    that can't be used is refused where it is, and has none here."""
    from jinja2 import Environment, TemplateError, nodes
    from jinja2.meta import find_undeclared_variables

    found = set[str]()
    for text in _texts(job):
        with suppress(TemplateError, RecursionError):
            tree = Environment().parse(text)
            found |= find_undeclared_variables(tree)
            found |= {  # {{ row["my column"] }}
                item.arg.value
                for item in tree.find_all(nodes.Getitem)
                if isinstance(item.arg, nodes.Const) and isinstance(item.arg.value, str)
            }
    prompts = [its.prompt for _, its in job.of_each_step()]
    places = {kind for kind in ("audio", "video") if any(getattr(p, f"{kind}s") for p in prompts)}
    return frozenset(found - job.vars.keys() - job.input.cross.keys() - places)


def with_filled(job: JobConfig) -> JobConfig:
    """The job whose input leaves out what ``input.empty`` says, once its prompts' files have been found."""
    if job.input.empty != "skip":
        return job
    return job.model_copy(update={"input": job.input.with_filled(prompt_columns(job))})


def _texts(job: JobConfig) -> Iterator[str]:
    for _, its in job.of_each_step():
        for text in (its.prompt.user, its.prompt.system, its.pair.query, its.pair.documents):
            if isinstance(text, str):
                yield text
        for file in (its.prompt.user_file, its.prompt.system_file):
            with suppress(OSError, UnicodeDecodeError):
                yield "" if file is None else read_text(file)
