"""The JSON Schema of the job file. Editors use it to complete and check keys.

The file ``job.schema.json`` beside this module holds the schema without plug-ins of other packages.
``scripts/make_job_file_doc.py`` writes this file, and job files written by ``batchkit init`` refer to it.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from batchkit.config.loading import VARIANT
from batchkit.config.tables import JobConfig, Table

SCHEMA = Path(__file__).with_name("job.schema.json")
_NULL = {"type": "null"}  # TOML has no null: a key is left out instead


def job_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of the job file. It includes the names of installed plug-ins."""
    schema = JobConfig.model_json_schema()
    described = {table.__name__: descriptions(table) for table in _tables(Table)}
    of_tables = {"JobConfig": schema, **schema["$defs"]}
    for name, table in of_tables.items():
        table.pop("title", None)
        for key, value in table.get("properties", {}).items():
            _tidy(value)
            if key in described[name]:
                value["description"] = described[name][key]
    schema["title"], schema["description"] = "batchkit job file", "See docs/job-file.md."
    own = {"name": {"type": "string", "description": "Name of the variant and of its run folder."}}
    schema["properties"][VARIANT] = {
        "description": "Variants of the job: a name, and the keys that each variant changes.",
        "type": "array",
        "items": {
            "type": "object",
            "properties": schema["properties"] | own,
            "required": ["name"],
            "additionalProperties": False,
        },
    }
    return schema


def descriptions(table: type[Table]) -> dict[str, str]:
    """Return the description of each key: the string below the key in the source of ``table`` and of its base
    classes."""
    found: dict[str, str] = {}
    for base in (base for base in table.__mro__ if issubclass(base, Table)):
        (definition,) = ast.parse(inspect.getsource(base)).body
        assert isinstance(definition, ast.ClassDef)
        for pair in pairwise(definition.body):
            match pair:
                case (ast.AnnAssign(ast.Name(key)), ast.Expr(ast.Constant(str(text)))):
                    found[key] = " ".join(text.split())
    return found


def _tables(base: type[Table]) -> Iterator[type[Table]]:
    yield base
    for table in base.__subclasses__():
        yield from _tables(table)


def _tidy(value: dict[str, Any]) -> None:
    """Remove from the schema of one key the parts that an editor should not show: titles, null as a value, and defaults
    that are null or tables."""
    value.pop("title", None)
    if value.get("default") is None or isinstance(value["default"], dict):
        value.pop("default", None)
    choices = [choice for choice in value.get("anyOf", ()) if choice != _NULL]
    if len(choices) == 1:
        del value["anyOf"]
        value.update(choices[0])
    elif choices:
        value["anyOf"] = choices
