"""Loading of a job file: read it, apply overrides, check it, and make its paths absolute."""

from __future__ import annotations

import glob
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence, Set
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
    RunTable,
    ScoringTable,
)
from batchkit.config.terminal import shortened
from batchkit.config.tool_definitions import is_template
from batchkit.config.urls import bare, check_user_info, is_remote
from batchkit.config.values import check_values, reason_of
from batchkit.errors import JobError

VARIANT = "variant"
"""Key of the ``[[variant]]`` tables, which are not part of the job that they change (``config/variants.py``)."""
_SCHEMA = "sampling.structured_outputs.json"
_ESCAPED = re.compile(r"\[([*?[])\]")  # glob.escape writes special characters in this form
_REMEDIES = {  # by the start of tomllib's message
    "Invalid value": '; write text in straight quotes ("text"), and true and false in lower case',
    "Invalid hex value": "; \\ starts an escape in \"…\": write '…', or use / instead",
    "Unescaped '\\'": "; \\ starts an escape in \"…\": write '…', or use / instead",
    "Illegal character '\\n'": '; text of several lines needs three quotes: """…"""',
}


def load_job(
    path: str | Path,
    overrides: Sequence[str] = (),
    given: Mapping[str, Any] = MappingProxyType({}),
    *,
    if_missing: Mapping[str, Any] = MappingProxyType({}),
) -> JobConfig:
    """Load the job in ``path``, apply the ``KEY=VALUE`` overrides and make its paths absolute.

    ``given`` holds values by dotted key, which replace the values of the file and of the overrides. An ``input.path``
    in ``given`` is relative to the working directory, like a shell argument. ``if_missing`` holds tables that are used
    if the file lacks them.

    Raises:
        JobError: The file is unreadable or not TOML, or keys are wrong. One message lists all problems.
    """
    path = Path(path)
    table = {**if_missing, **job_table(path)}
    table.pop(VARIANT, None)
    job = make_job(table, str(path), overrides, with_input_found(given), base=path.parent)
    return job.as_made_in(str(path.resolve()))


def with_input_found(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``given`` with its ``input.path``, if there is one, made absolute. The path is looked up in the working
    directory."""
    rows = given.get("input.path")
    return given if rows is None else {**given, "input.path": _find_input(rows, Path.cwd())}


def check_not_moved(path: Path, job: JobConfig, overrides: Sequence[str]) -> None:
    """Raise JobError if ``path`` is in a run folder that was moved, because ``job`` still names the old folder. If
    ``overrides`` names a folder, nothing is checked."""
    if any(override.startswith(("name=", "output.dir=")) for override in overrides):
        return
    here = path.resolve().parent
    if is_file(str(here / "manifest.json")) and here != job.folder.resolve():
        raise JobError(
            f"{path}: this run folder was moved here from {job.folder}; to resume the run here, add"
            f" --set output.dir={here.parent} --set name={here.name}"
        )


def resolved_job(path: Path) -> JobConfig:
    """Load the ``job.toml`` that a run wrote into its folder. Its paths are already absolute, so they are used
    unchanged. Raises JobError like ``load_job``."""
    job = with_filled(parse_job(job_table(path), str(path)))
    learn_secrets(job)
    return job


def job_table(path: Path) -> dict[str, Any]:
    """Return the content of a job file. Raise JobError if it can't be read or is not TOML."""
    try:
        data = read_bytes(path)
    except FileNotFoundError:
        if is_file(str(path.with_name("manifest.json"))):
            raise JobError(
                f"{path}: the file is missing; `batchkit run` with the original job file writes it again;"
                " `status` and `verify` work without it"
            ) from None
        near = did_you_mean(path.name, (file.name for file in path.parent.glob("*.toml")))
        near = f"; {QUOTE}" if "{" in path.name else near
        raise JobError(f"{path}: no such job file{near}") from None
    except IsADirectoryError:
        raise JobError(
            f"{path}: is a folder; give a job file (for a run folder: {path}/job.toml)"
        ) from None
    except OSError as error:
        raise JobError(f"{path}: can't be read: {error.strerror}") from error
    try:
        return tomllib.loads(data.decode("utf-8-sig"))
    except (RecursionError, ValueError) as error:  # ValueError also for thousands of digits
        if path.suffix.lower() in (".yaml", ".yml"):
            raise JobError(
                f"{path}: is YAML, but a job file is TOML (`batchkit init` writes one)"
            ) from None
        if path.suffix.lower() not in ("", ".toml"):
            raise JobError(
                f"{path}: is not a job file (TOML). If it holds the rows: batchkit run --model MODEL"
                f" --input {path} --prompt '… {{{{ column }}}}', or name it in a job file (`batchkit init`"
                f" writes one); {QUOTE}"
            ) from None
        if isinstance(error, UnicodeDecodeError):
            raise JobError(f"{path}: is not UTF-8 text; save the file as UTF-8") from None
        if isinstance(error, tomllib.TOMLDecodeError):
            problem = _problem_in(data.decode("utf-8-sig"), error)
            raise JobError(f"{path}: not valid TOML: {problem}") from None
        raise JobError(f"{path}: can't be read: {reason_of(error)}") from error


def _problem_in(text: str, error: tomllib.TOMLDecodeError) -> str:
    """Describe a TOML error: its reason, a remedy if there is a known one, and the line at which the parser stopped."""
    reason, _, place = str(error).partition(" (at ")
    lines = text.rstrip().splitlines() or [""]
    # No match: the parser stopped at the end of the document.
    found = re.match(r"line (\d+)", place)
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
    """Make a job from ``table``, as ``load_job`` does from a file. ``origin`` names the table in messages. Relative
    paths are looked up in ``base`` (the job file's folder), then in the working directory."""
    # Before any override is applied, because another override may set an option of the dry-run engine.
    made_dry = [_leave_out_engine(table, override) for override in overrides]
    for override in overrides:
        _override(table, override)
    for key, value in given.items():
        put(table, key.split("."), value, key)
    base = base or Path.cwd()
    _read_schemas(table, base)
    job = resolve_paths(parse_job(table, origin), base)
    return job.as_trial() if any(made_dry) else job


def _read_schemas(table: Mapping[str, Any], base: Path) -> None:
    """Replace each file name in ``structured_outputs.json`` with the schema in that file."""
    steps = table.get("steps")
    for place in (table, *(steps if isinstance(steps, list) else ())):
        match place:
            case {"sampling": {"structured_outputs": {"json": str(text)} as wanted}}:
                if not text.lstrip().startswith("{"):
                    wanted["json"] = _schema_in(_find(text, base, _SCHEMA))


def _schema_in(path: Path) -> Any:
    try:
        return json.loads(read_text(str(path)))
    except OSError as error:
        raise JobError(
            f"{_SCHEMA}: {path}: {error.strerror}; give a table, JSON text, or the name of a file with a JSON schema"
        ) from error
    except (ValueError, RecursionError) as error:
        raise JobError(f"{_SCHEMA}: {path}: is not JSON: {reason_of(error)}") from error


def parse_job(table: Mapping[str, Any], origin: str) -> JobConfig:
    """Check ``table`` and return the job; ``origin`` names the file in messages.

    Raises:
        JobError: The job is invalid. The message has one line per problem: key, value found, value expected.
    """
    learn(os.environ)
    with suppress(ValueError):  # the validation below reports values that are too deep or too long
        check_values(table)
        learn(table)
    return JobConfig.model_validate(table, context={"origin": origin})


def parse_value(text: str) -> Any:
    """Parse ``text`` as a TOML value, for example ``0``, ``true`` or ``["a"]``. Text that is not a TOML value is
    returned unchanged."""
    try:
        table = tomllib.loads(f"value = {text}")
    except (RecursionError, ValueError):
        return text
    return table["value"] if len(table) == 1 else text


def masked_override(override: str) -> str:
    """Return ``KEY=VALUE`` with secrets masked, safe to print and store."""
    key, equals, text = override.partition("=")
    if not equals:
        return masked_text(override)
    value = parse_value(text)
    hidden = masked(value, key.strip())
    if hidden == value:
        return override
    return f"{key}={hidden if isinstance(hidden, str) else shown(hidden)}"


def check_override(override: str, flag: str = "--set") -> None:
    """Raise JobError if ``override`` does not have the form KEY=VALUE."""
    key, equals, _ = override.partition("=")
    if not equals or not all(key.strip().split(".")):
        key = next(iter(homes_of(JobConfig, key)), key if "." in key else "sampling.temperature")
        raise JobError(
            f"{flag} {masked_override(override)}: write KEY=VALUE without spaces, for example {flag} {key}=…"
        )


def _override(table: dict[str, Any], override: str) -> None:
    check_override(override)
    key, _, text = override.partition("=")
    parts = key.strip().split(".")
    value = parse_value(text)
    if not isinstance(value, str) and annotation_of(JobConfig, parts) in (str, str | None):
        value = text  # a folder named "2024" is text, not a number
    put(table, parts, value, f"--set {masked_override(override)}")


def _leave_out_engine(table: Any, override: str) -> bool:
    """If ``override`` is ``engine.kind=dry-run``, remove all other keys of ``[engine]`` except ``model``, because they
    are for the job's own engine. The same applies to ``engines.NAME.kind``. Return True if the engine was of another
    kind before."""
    key, _, kind = override.partition("=")
    *parts, last = key.strip().split(".")
    is_engine = parts == ["engine"] or (parts[:1] == ["engines"] and len(parts) == 2)
    if not is_engine or (last, kind.strip()) != ("kind", "dry-run"):
        return False
    for part in parts:
        table = table.get(part) if isinstance(table, dict) else None
    if not isinstance(table, dict) or table.get("kind") == "dry-run":
        return False
    # Unknown keys stay, and are reported.
    for name in ({*table} & {*EngineTable.model_fields}) - {"model"}:
        del table[name]
    return True


def put(table: Any, parts: list[str], value: Any, origin: str) -> None:
    """Set the key whose dotted parts are ``parts`` to ``value``. ``origin`` names the setting in messages."""
    *parents, last = parts
    for depth, part in enumerate(parents):
        key = ".".join(parents[:depth])
        if isinstance(table, list):
            table = _one_of(table, part, key, origin)
        else:
            table = table.setdefault(part, {})
        is_list = isinstance(table, list) and table and all(isinstance(v, dict) for v in table)
        if not isinstance(table, dict) and not is_list:
            name = ".".join(parts[: depth + 1])
            raise JobError(f"{origin}: {name} is a single value and has no keys; set {name} itself")
    if isinstance(table, list):
        raise JobError(f"{origin}: {'.'.join(parts)} is a table; name one of its keys")
    table[last] = value


def _one_of(tables: list[dict[str, Any]], part: str, key: str, origin: str) -> dict[str, Any]:
    """Return the table whose name or index is ``part`` from ``tables``, the list of tables at ``key`` of the job.
    ``origin`` names the setting in messages."""
    by_name = {str(number): table for number, table in enumerate(tables)}
    by_name |= {str(table["name"]): table for table in tables if "name" in table}
    if part in by_name:
        return by_name[part]
    names = [str(table.get("name", number)) for number, table in enumerate(tables)]
    hint = did_you_mean(part, names) or f"; {key} has {', '.join(names)}"
    raise JobError(f"{origin}: {key} has no {part!r}{hint}")


def resolve_paths(job: JobConfig, base: Path) -> JobConfig:
    """Return the job with absolute paths, so that it means the same in any working directory. Relative paths are looked
    up in ``base``, then in the working directory."""
    update: dict[str, Any] = {
        "prompt": _with_files_found(job.prompt, base, "prompt"),
        "scoring": _scoring_resolved(job.scoring, base),
        "run": _run_resolved(job.run, base),
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
    # Not with model_copy, which would mark the root as set by the user: `serve` checks whether the user set it.
    given, media = job.media.model_fields_set, {**job.media.model_dump(), "root": root}
    update["media"] = MediaTable.model_construct(given, **media)
    update["input"] = input_table.below(root)
    job = with_filled(job.model_copy(update=update)).as_made_in(str(Path.cwd()))
    learn_secrets(job)
    return job


def learn_secrets(job: JobConfig) -> None:
    """Make ``masked_text`` mask the secrets of ``job`` and of the environment in this process."""
    learn(os.environ, job.model_dump())
    for engine in (job.engine, *job.engines.values()):
        learn_secret(os.environ.get(engine.api_key_env, "").strip())


def _media_root(job: JobConfig, base: Path, rows: InputTable) -> str:
    """Return ``media.root`` as an absolute folder, or unchanged if it is an fsspec URL. If the job does not set
    ``media.root`` and the rows are files outside the default folder, return the folder of these files."""
    root = _fill(job.media.root, job, "media.root")
    if not is_remote(root):
        root = str(_find(root, base, "media.root"))
        folder = None if "root" in job.media.model_fields_set else _folder_of_files(rows)
        if folder is None or Path(os.path.normpath(folder)).is_relative_to(root):
            return root
        return folder
    check_user_info(root, "media.root")
    charts = [table.scorers.get("chart", {}) for table in job.scoring.tables]
    if job.scoring.allow_code and any(chart.get("table") for chart in charts):
        raise JobError(
            f"scoring.scorers.chart.table: tables can be read only from a local folder, but media.root is {bare(root)};"
            " set media.root to a local folder that holds them, or remove scoring.scorers.chart.table"
        )
    return root


def _folder_of_files(rows: InputTable) -> str | None:
    """Return the folder of an input whose rows are files; None for other inputs and for http(s) URLs."""
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
    """Return ``engine`` with absolute paths of its adapter folders. A value that is not an existing folder is left
    unchanged, because it may be a name on the Hugging Face hub."""
    if not engine.loras:
        return engine
    loras = {}
    for name, value in engine.loras.items():
        path = _find(value, base, f"engine.loras.{name}")
        loras[name] = str(path) if path.is_dir() else value
    return engine.model_copy(update={"loras": loras})


def _scoring_resolved(scoring: ScoringTable, base: Path) -> ScoringTable:
    if scoring.reference_run is None:
        return scoring
    run = _run_folder(scoring.reference_run, base, "scoring.reference_run")
    return scoring.model_copy(update={"reference_run": run})


def _run_resolved(run: RunTable, base: Path) -> RunTable:
    if not run.reuse:
        return run
    found = [_run_folder(name, base, "run.reuse") for name in run.reuse]
    return run.model_copy(update={"reuse": found})


def _run_folder(name: str, base: Path, key: str) -> str:
    """Return the path of another run's folder. It may be created later, below the working directory."""
    found = _find(name, base, key)
    return str(found if found.exists() else Path.cwd() / name)


def _rollout_resolved(rollout: RolloutTable, base: Path) -> RolloutTable:
    """Return ``rollout`` with the absolute path of its function's file. A module name is replaced with the path of its
    file if the file is beside the job file or in the working directory. Otherwise the module is an installed one."""
    place, _, name = rollout.function.rpartition(":")
    is_file = place.endswith(".py")
    path = _find(place if is_file else f"{place.replace('.', '/')}.py", base, "rollout.function")
    if not is_file and not path.is_file():  # an installed module
        return rollout
    return rollout.model_copy(update={"function": f"{path}:{name}"})


def _fill(template: str, job: JobConfig, key: str) -> str:
    """Render ``template`` with the job's ``[vars]``."""
    if "{" not in template:
        return template
    from jinja2 import StrictUndefined
    from jinja2.sandbox import SandboxedEnvironment

    try:
        environment = SandboxedEnvironment(undefined=StrictUndefined)
        return environment.from_string(template).render(job.vars)
    except Exception as error:  # a template may run any expression
        raise JobError(
            f"{key}: {shortened(repr(template), 200)}: {reason_of(error)}; [vars] has {list(job.vars)}"
        ) from error


def _find(path: str, base: Path, key: str) -> Path:
    """Return ``path`` as an absolute path: in ``base`` (the job file's folder), or in the working directory if the file
    exists only there. ``key`` names the setting in messages."""
    path = at_home(path)
    beside, here = base.resolve() / path, Path.cwd() / path
    try:
        return here if not beside.exists() and here.exists() else beside
    except OSError as error:  # no permission to search the folder, or the text is not a path
        raise JobError(f"{key}: {shown(path)}: {error.strerror}") from error


def _find_input(path: str, base: Path) -> str:
    """Return an input's path as an absolute path, like ``_find``. A URL is not changed, but in
    ``zip://*.jsonl::rows.zip`` the path of the archive becomes absolute. The folder before a glob pattern is escaped,
    because a pattern in the folder ``a[1]`` would otherwise match files of the folder ``a1``."""
    if path == "-":
        raise JobError(
            'input.path = "-": standard input is not supported, because a resumed run could not read it again; save it as a'
            " file, and give that file"
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
    """Return ``path`` with ``~`` or ``$HOME`` at its start expanded, as a shell does."""
    is_there = path.startswith(("~/", "$HOME/"))
    return str(Path(path.replace("$HOME", "~", 1)).expanduser()) if is_there else path


def _matches(pattern: str) -> bool:
    return glob.has_magic(pattern) and next(glob.iglob(pattern, recursive=True), None) is not None


def prompt_columns(job: JobConfig) -> frozenset[str]:
    """Return the input columns that the job's prompts use. Names from ``[vars]`` and ``input.cross``, and place marks
    such as ``image``, are not columns. An invalid template adds no names; its error is reported when the template is
    used."""
    found = set[str]().union(*(names_in(text) - marks for text, marks in _texts(job)))
    return frozenset(found - job.vars.keys() - job.input.cross.keys())


def names_in(template: str) -> set[str]:
    """Return the names that ``template`` uses, and the keys in brackets (``{{ row["my column"] }}``). An invalid template
    has none."""
    from jinja2 import Environment, TemplateError, nodes
    from jinja2.meta import find_undeclared_variables

    try:
        tree = Environment().parse(template)
        keys = (item.arg for item in tree.find_all(nodes.Getitem))
        constants = (key.value for key in keys if isinstance(key, nodes.Const))
        return find_undeclared_variables(tree) | {it for it in constants if isinstance(it, str)}
    except (TemplateError, RecursionError):
        return set()


def with_filled(job: JobConfig) -> JobConfig:
    """Return the job with ``input.filled`` set to the columns of its prompts, which ``input.empty = "skip"`` checks.
    Call this after paths are resolved, because templates in prompt files name columns, too."""
    if job.input.empty != "skip":
        return job
    return job.model_copy(update={"input": job.input.with_filled(prompt_columns(job))})


def _texts(job: JobConfig) -> Iterator[tuple[str, Set[str]]]:
    """Yield the text of each prompt template, and the names that are place marks (``{{ image }}``) instead of
    columns."""
    for _, its in job.of_each_step():
        prompt, pair, no_marks = its.prompt, its.pair, frozenset[str]()
        for text, file, marks in (
            (prompt.user, prompt.user_file, prompt.marks),
            (prompt.system, prompt.system_file, no_marks),
            (pair.query, None, no_marks),
            (pair.documents, None, no_marks),
        ):
            with suppress(OSError, UnicodeDecodeError):
                yield text or "" if file is None else read_text(file), marks
