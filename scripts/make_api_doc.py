"""Writes docs/api.txt: the names, signatures, commands and flags that batchkit's users may rely on.

A change of this file in a commit is a change of the public interface (docs/releases.md). The keys of the job file are in
batchkit/config/job.schema.json.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any

import click

import batchkit
from batchkit.cli import cli

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "api.txt"
PLUGINS = ROOT / "docs" / "plugins.md"
HEAD = "# The public interface of batchkit. Written by scripts/make_api_doc.py; docs/releases.md says what it promises.\n"


def document() -> str:
    """Return the text of docs/api.txt."""
    return "\n".join([HEAD, *python_names(), "".join(f"{line}\n" for line in commands())])


def python_names() -> Iterator[str]:
    """Yield a paragraph for ``batchkit`` itself, and one for each module that plug-ins may import."""
    own = {name: getattr(batchkit, name) for name in batchkit.__all__}
    yield paragraph("batchkit", own)
    for module in public_modules():
        members = vars(import_module(module)).items()
        yield paragraph(module, {name: one for name, one in members if is_of(module, name, one)})


def public_modules() -> list[str]:
    """Return the modules in the table of docs/plugins.md."""
    section = PLUGINS.read_text("utf-8").partition("## Public modules")[2]
    rows = "\n".join(line.split("|")[1] for line in section.splitlines() if line.startswith("| `"))
    return re.findall(r"`(batchkit\.[\w.]+)`", rows)


def is_of(module: str, name: str, value: Any) -> bool:
    """Return whether ``name`` is public and defined in ``module``."""
    home = getattr(value, "__module__", module)
    return not name.startswith("_") and home == module and not inspect.ismodule(value)


def paragraph(module: str, members: dict[str, Any]) -> str:
    lines = [line for name in sorted(members) for line in entry(f"{module}.{name}", members[name])]
    return "".join(f"{line}\n" for line in lines)


def entry(name: str, value: Any) -> Iterator[str]:
    """Yield the lines for one name: a class with its public members, a function, or a constant."""
    if inspect.isclass(value):
        yield f"{name}{'' if is_made_by_fields(value) else signature(value)}"
        for member in sorted({*vars(value), *vars(value).get("__annotations__", {})}):
            if not member.startswith("_") and not hasattr(value, "model_fields"):
                yield from entry_of_member(f"{name}.{member}", value, member)
    else:
        yield f"{name}{signature(value)}" if callable(value) else name


def is_made_by_fields(kind: type) -> bool:
    """Return whether the constructor's parameters are the fields, which are listed anyway, or say nothing."""
    by_fields = ("__struct_fields__", "_fields", "model_fields")
    return (
        dataclasses.is_dataclass(kind)
        or any(hasattr(kind, name) for name in by_fields)
        or issubclass(kind, enum.Enum)
        or kind.__init__ in (object.__init__, Exception.__init__)
        or getattr(kind, "_is_protocol", False)
    )


def entry_of_member(name: str, kind: type, member: str) -> Iterator[str]:
    value = vars(kind).get(member)
    if isinstance(value, classmethod | staticmethod):
        value = value.__func__
    if isinstance(value, FunctionType):
        yield f"{name}{signature(value)}"
    elif isinstance(value, property) and value.fget is not None:
        yield f"{name}: {value.fget.__annotations__.get('return')}"
    else:
        kinds = vars(kind).get("__annotations__", {})
        kind_ = kinds.get(member)
        yield f"{name}: {getattr(kind_, '__forward_arg__', kind_)}" if member in kinds else name


def signature(value: Any) -> str:
    """Return the parameters and the result. A default that prints as an object, with its address, prints as ``...``."""
    try:
        return re.sub(r"<[^<>]*>", "...", str(inspect.signature(value)).replace("'", ""))
    except ValueError:
        return ""


def commands(group: click.Group = cli) -> Iterator[str]:
    """Yield a line for each command, with its arguments and flags."""
    context = click.Context(group)
    for name in sorted(group.list_commands(context)):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from (line.replace(" ", f" {name} ", 1) for line in commands(command))
            continue
        words = [f"batchkit {name}"]
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                words += sorted([*parameter.opts, *parameter.secondary_opts])
            elif isinstance(parameter, click.Argument):
                words.append(
                    re.sub(r"[][.]", "", parameter.metavar or parameter.human_readable_name)
                )
        yield " ".join(words)


if __name__ == "__main__":
    PAGE.write_text(document(), encoding="utf-8")
    sys.exit(0)
