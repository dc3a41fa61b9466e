"""Imports point down. The table is the architecture; docs/architecture.md draws the same one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parent.parent / "batchkit"

LAYERS: list[set[str]] = [  # from the bottom; a folder counts as one
    {
        "errors",
        "fsspec_urls",
        "indexset",
        "job_values",
        "masking",
        "plain_json",
        "regular_file",
        "terminal",
        "wording",
    },
    {
        "types",
        "checksum",
        "files",
        "config",
        "job_file",
        "job_problems",
        "ledger",
        "stopping",
        "rowhash",
        "faults",
        "host_memory",
        "shard",
        "server_command",
        "schema",
    },
    {
        "sources",
        "media",
        "engines",
        "prompts",
        "templates",
        "openai_body",
        "openai_lines",
        "ordering",
        "prefetch",
        "window",
        "retry",
        "store",
        "runfolder",
        "manifest",
        "progress",
        "records",
        "summary",
        "suspects",
        "ladder",
        "truncation",
        "scoring",
        "scorebook",
        "leases",
        "winners",
        "predictions",
        "bootstrap",
    },
    {"inputs", "supervisor", "attempts", "join", "outputs", "hints", "table", "requeue"},
    {"resume", "worker"},
    {"cluster"},
    {"processor"},
    {
        "run",
        "validate",
        "export",
        "audit",
        "verify",
        "repair",
        "doctor",
        "machine",
        "demo_model",
        "score",
        "judge",
        "realhit",
        "report",
        "compare",
        "merge",
        "parity",
    },
    {"tuning"},
    {"cli"},
]
WITHIN_A_LAYER = {
    ("fsspec_urls", "masking"): "what is told of a URL that fails holds no secrets",
    ("job_file", "config"): "a job file becomes the tables of config",
    ("config", "shard"): "a key of the input that is checked as the job is read",
    ("config", "server_command"): "a key of the engine that is checked as the job is read",
    ("schema", "types"): "what a foreign answer becomes",
    ("ledger", "schema"): "a line is checked as it is read",
    ("job_file", "job_problems"): "what is wrong with it is told in words",
    ("job_problems", "config"): "the words come from the tables",
    ("prompts", "media"): "rendering a row loads its images",
    ("prompts", "openai_body"): "a row may bring an OpenAI request",
    ("prompts", "retry"): "a first attempt has its temperature too",
    ("prompts", "templates"): "a prompt is made of templates",
    ("templates", "engines"): "its processes end with the run, as the guard of a server does",
    ("prompts", "truncation"): "a text that was cut is rendered anew",
    ("engines", "ladder"): "a batch of transformers that ran out of memory goes the same way down",
    ("window", "engines"): "it adapts to EngineLoad, a part of the engines' contract",
    ("manifest", "runfolder"): "the names of the files in a run folder",
    ("scoring", "engines"): "its process ends with the run, as the guard of a server does",
    ("scoring", "templates"): "a pattern, as a template, needs a process that can be ended",
    ("records", "scoring"): "a record carries what its answer scored",
    ("leases", "suspects"): "what a dead worker held is replayed in halves",
    ("scorebook", "runfolder"): "the right answers may be those of another run",
    ("scorebook", "store"): "whose log is checked before it is read",
    ("doctor", "machine"): "the doctor judges what the machine found",
    ("run", "score"): "what waits for the end of a run is scored then",
    ("merge", "judge"): "what a judge was paid for goes along",
    ("merge", "score"): "a merged run is scored where all its parts are",
    ("score", "judge"): "a judge is one of the scorers",
    ("export", "realhit"): "one of the formats",
    ("verify", "audit"): "both count the rows that have no record",
    ("repair", "verify"): "what verify finds is what is set aside",
    ("report", "compare"): "a page of several runs has what compare found",
}
OUTSIDE = {"__init__", "__main__", "torchvision_mend"}  # doors, and a part of set-up
FOREIGN_HOMES = {  # who alone may import it; never when the module itself is imported
    "vllm": {"engines.vllm"},
    "torch": {
        "demo_model",
        "torchvision_mend",
        "engines.vllm",
        "engines.transformers.answer",
        "engines.transformers.batch",
        "engines.transformers.decoding",
        "engines.transformers.device",
        "engines.transformers.engine",
    },
    "transformers": {
        "demo_model",
        "engines.vllm",
        "engines.transformers",
        "engines.transformers.answer",
        "engines.transformers.decoding",
        "engines.transformers.engine",
        "engines.transformers.loading",
        "engines.transformers.rendering",
    },
    "torchvision": {"torchvision_mend"},
    "httpx": {"engines.connections"},
    "httpcore": {"engines.wire"},
    "pandas": set(),
    "ray": {"cluster.actor", "cluster.crew", "cluster.local", "cluster.session"},
}


class Import(NamedTuple):
    """``module`` imports ``target``; ``at_top`` where importing the one imports the other."""

    module: str
    target: str
    at_top: bool


def imports_of(path: Path) -> Iterator[Import]:
    module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
    return _imports(module, ast.parse(path.read_text(encoding="utf-8")), at_top=True)


def _imports(module: str, node: ast.AST, *, at_top: bool) -> Iterator[Import]:
    match node:
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            nodes: list[ast.stmt] = node.orelse  # for the type checker alone
        case ast.Import(names=names):
            yield from (Import(module, alias.name, at_top) for alias in names)
            return
        case ast.ImportFrom(module=str(target), names=names):
            if target == "batchkit":
                yield from (Import(module, f"batchkit.{alias.name}", at_top) for alias in names)
            else:
                yield Import(module, target, at_top)
            return
        case _:
            nodes = list(ast.iter_child_nodes(node))  # type: ignore[arg-type]
    inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    for child in nodes:
        yield from _imports(module, child, at_top=at_top and not inside)


IMPORTS = list(chain.from_iterable(map(imports_of, sorted(PACKAGE.rglob("*.py")))))
OWN = [
    (found.module.split(".")[0], found.target.split(".")[1])
    for found in IMPORTS
    if found.target.startswith("batchkit.")
]


def layer_of(module: str) -> int:
    return next(number for number, layer in enumerate(LAYERS) if module in layer)


def test_every_module_has_a_layer() -> None:
    paths = (path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
    modules = {path.with_suffix("").parts[0] for path in paths}
    assert modules - OUTSIDE == set().union(*LAYERS)


def test_no_module_imports_a_higher_one() -> None:
    upward = {
        f"{module} imports {target}"
        for module, target in OWN
        if module not in OUTSIDE
        and target in set().union(*LAYERS)
        and layer_of(target) > layer_of(module)
    }
    assert not upward


def test_modules_of_one_layer_import_each_other_only_as_listed() -> None:
    beside = {
        (module, target)
        for module, target in OWN
        if module not in OUTSIDE
        and module != target
        and target in set().union(*LAYERS)
        and layer_of(target) == layer_of(module)
    }
    assert beside == set(WITHIN_A_LAYER), "a pair that is gone leaves the list too"


def test_no_module_imports_in_a_circle() -> None:
    """Listed pairs may not make one, and neither may the modules of a folder among themselves."""
    exact: dict[str, set[str]] = {}
    for module, target, at_top in IMPORTS:
        if at_top and target.startswith("batchkit."):
            exact.setdefault(module, set()).add(target.removeprefix("batchkit."))
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " → ".join([*path, module])
        if module not in done:
            for target in exact.get(module, ()):
                visit(target, (*path, module))
            done.add(module)

    for module in exact:
        visit(module, ())


@pytest.mark.parametrize("package", FOREIGN_HOMES)
def test_heavy_package_is_imported_only_at_home_and_only_on_use(package: str) -> None:
    users = {
        (found.module, found.at_top) for found in IMPORTS if found.target.split(".")[0] == package
    }
    assert users <= {(module, False) for module in FOREIGN_HOMES[package]}


def test_engines_are_reached_only_through_their_door() -> None:
    """The dict in ``engines/__init__.py`` imports them by name."""
    users = {
        found.module
        for found in IMPORTS
        if found.target.startswith(
            tuple(
                f"batchkit.engines.{name}"
                for name in ("vllm", "transformers", "dry_run", "openai_server")
            )
        )
        and not found.module.startswith("engines.transformers")
    }
    assert not users


def test_command_line_imports_its_commands_on_use() -> None:
    allowed = {"batchkit.__version__", "batchkit.errors", "batchkit.masking", "batchkit.terminal"}
    at_top = {found.target for found in IMPORTS if found.module == "cli" and found.at_top}
    assert {target for target in at_top if target.startswith("batchkit")} <= allowed
