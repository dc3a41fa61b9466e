"""Imports point down. The table is the architecture; docs/architecture.md draws the same one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest

from batchkit import _HOMES
from batchkit.engines import ENGINES

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "batchkit"

# From the bottom. What stands in one line may not import each other either.
LAYERS: list[set[str]] = [
    {"errors"},
    {"types"},
    {"config"},
    {"storage"},
    {"isolation"},
    {"sources"},
    {"rendering"},
    {"engines"},
    {"scoring"},
    {"runs"},
    {"execution"},
    {"commands"},
    {"serve"},
    {"cli"},
    {"contrib"},  # which nothing imports: the tables of the seams name what is in it
]
DOORS = {"__init__", "__main__"}
FOREIGN_HOMES = {  # the modules or folders that alone import it; never when they are imported
    "vllm": {"engines.vllm"},
    "torch": {
        "commands.demo_model",
        "commands.doctor.torchvision_fix",
        "engines.transformers",
        "engines.vllm.timestamps",
    },
    "transformers": {"commands.demo_model", "engines.transformers", "scoring.scorers"},
    "torchvision": set(),
    "httpx": {
        "engines.openai.connections",
        "rendering.media.download",
        "serve.webhooks",
    },
    "pandas": {"execution.generate"},
    "lance": {"commands.export.tables"},
    "deltalake": {"commands.export.tables"},
    "prometheus_client": {"execution.prometheus", "serve.batch_routes"},
    "ray": {"execution.cluster"},
    "fastapi": {"serve"},
    "python_multipart": {"serve.forms"},
    "starlette": {"commands.view", "serve"},
    "uvicorn": {"commands.view"},
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
                homes = ((alias.name, f"batchkit.{alias.name}") for alias in names)
                yield from (Import(module, _HOMES.get(*home), at_top) for home in homes)
            else:
                yield Import(module, target, at_top)
            return
        case _:
            nodes = list(ast.iter_child_nodes(node))  # type: ignore[arg-type]
    inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    for child in nodes:
        yield from _imports(module, child, at_top=at_top and not inside)


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    return list(chain.from_iterable(map(imports_of, sorted(PACKAGE.rglob("*.py")))))


@pytest.fixture(scope="module")
def at_top(imports: list[Import]) -> dict[str, set[str]]:
    """By module, which of ours it imports when it is imported."""
    found = {one.module: set[str]() for one in imports}
    for one in imports:
        if one.at_top and one.target.startswith("batchkit."):
            found[one.module].add(one.target.removeprefix("batchkit."))
    return found


def layer_of(module: str) -> int:
    return next(number for number, layer in enumerate(LAYERS) if module in layer)


def test_the_package_has_these_names_and_no_others() -> None:
    names = {
        path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or any(path.glob("*.py"))
    }
    assert names - {"__pycache__"} - DOORS == set().union(*LAYERS)


def test_imports_point_down(imports: list[Import]) -> None:
    own = [
        (found.module.split(".")[0], found.target.split(".")[1])
        for found in imports
        if found.target.startswith("batchkit.")
    ]
    upward = {
        f"{module} imports {target}"
        for module, target in own
        if module not in DOORS
        and module != target
        and target != "__version__"
        and layer_of(target) >= layer_of(module)
    }
    assert not upward


def test_a_plug_in_inside_the_package_imports_only_what_any_plug_in_may(
    imports: list[Import],
) -> None:
    page = (TESTS.parent / "docs/plugins.md").read_text(encoding="utf-8")
    listed = re.findall(r"`(batchkit(?:\.\w+)+)`", page.partition("## Public modules")[2])
    plug_ins = [found for found in imports if found.module.startswith("contrib.")]
    used = {found.target for found in plug_ins if found.target.startswith("batchkit.")}
    own = {target for target in used if target.startswith("batchkit.contrib.")}
    assert own
    assert used - own <= {*listed, *_HOMES.values()}


def test_a_command_that_reads_a_run_imports_nothing_that_makes_one(
    at_top: dict[str, set[str]],
) -> None:
    """``show``, ``export`` and the pages, and all that they import; the others are methods of ``batchkit.Run``."""
    readers = ("commands.show", "commands.export", "commands.report", "commands.view", "runs")
    due, seen = [module for module in at_top if module.startswith(readers)], set[str]()
    while due:
        seen.add(module := due.pop())
        due += at_top.get(module, set()) - seen
    assert not {module for module in seen if module.startswith("execution")}


def test_no_module_imports_in_a_circle(at_top: dict[str, set[str]]) -> None:
    """Neither may the modules of one folder among themselves."""
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " → ".join([*path, module])
        if module not in done:
            for target in at_top.get(module, ()):
                visit(target, (*path, module))
            done.add(module)

    for module in at_top:
        visit(module, ())


@pytest.mark.parametrize("package", FOREIGN_HOMES)
def test_heavy_package_is_imported_only_at_home_and_only_on_use(
    package: str, imports: list[Import]
) -> None:
    """A module that is itself imported only on use may import it at its top."""
    users = [found for found in imports if found.target.split(".")[0] == package]
    homes = {
        next((home for home in FOREIGN_HOMES[package] if found.module.startswith(home)), found)
        for found in users
    }
    assert homes == FOREIGN_HOMES[package]
    imported = {found.target for found in imports if found.at_top}
    assert not imported & {f"batchkit.{found.module}" for found in users if found.at_top}


def test_engines_are_reached_only_through_their_door(imports: list[Import]) -> None:
    """``ENGINES`` names them; ``engines/registry.py`` opens them."""
    homes = tuple(".".join(module.split(".")[:3]) for module in ENGINES.values())
    users = {found.module for found in imports if found.target.startswith(homes)}
    assert not {user for user in users if not f"batchkit.{user}".startswith(homes)}


def test_command_line_imports_its_commands_on_use(imports: list[Import]) -> None:
    allowed = {
        "batchkit.errors",
        "batchkit.config.masking",
        "batchkit.config.terminal",
    }
    of_cli = (found for found in imports if found.module.split(".")[0] == "cli" and found.at_top)
    others = {found.target for found in of_cli if not found.target.startswith("batchkit.cli")}
    assert {target for target in others if target.startswith("batchkit")} <= allowed


def test_tests_import_no_other_test_and_share_what_is_in_support() -> None:
    for path in TESTS.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert text.count("\n") <= 600, f"{path} has more than 600 lines: split it by behaviour"
        found = re.findall(r"^ *(?:from|import) ((?:tests|conftest)\b\S*)", text, re.MULTILINE)
        assert all(name.startswith("tests.support") for name in found), f"{path}: {found}"
