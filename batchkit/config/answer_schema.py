"""The JSON schema that answers have to fit: ``json`` of ``structured_outputs``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from batchkit.config.terminal import shortened

_DEEPEST = 20


def schema_in(sampling: Mapping[str, Any]) -> Any:
    """The schema in sampling parameters; None if they have none that can be read."""
    wanted = sampling.get("structured_outputs")
    schema = wanted.get("json") if isinstance(wanted, Mapping) else None
    if isinstance(schema, str):
        try:
            return orjson.loads(schema)
        except orjson.JSONDecodeError:
            return None
    return schema if isinstance(schema, Mapping) else None


def resolved(schema: Any, root: Any) -> Mapping[str, Any]:
    """``schema``, or what it refers to below the ``$defs`` of ``root``, as Pydantic writes it."""
    if not isinstance(schema, Mapping):
        return {}
    name = str(schema.get("$ref", ""))
    if not name.startswith("#/$defs/"):
        return schema
    below = root.get("$defs", {}).get(name.removeprefix("#/$defs/"))
    return below if isinstance(below, Mapping) else {}


def example(schema: Any, text: str) -> Any:
    """A value that fits most schemas: whatever they require, with ``text`` for a free text."""
    return _example(schema, schema, text, depth=0)


def fault_in_schema(schema: Any) -> str | None:
    """Why ``schema`` is not a JSON schema, and where; None if it is one."""
    from jsonschema import SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for

    try:
        validator_for(schema, default=Draft202012Validator).check_schema(schema)
    except SchemaError as error:
        return f"{error.json_path}: {shortened(error.message, 200)}"
    except (AttributeError, TypeError, ValueError) as error:  # it is looked up as an address
        return f"$.$schema: {error}"
    return None


def _example(schema: Any, root: Any, text: str, depth: int) -> Any:
    found = resolved(schema, root)
    if depth > _DEEPEST:  # it refers to itself
        return None
    if options := found.get("anyOf") or found.get("oneOf"):
        return _example(options[0], root, text, depth + 1)
    if "const" in found or found.get("enum"):
        return found.get("const", next(iter(found.get("enum") or ()), None))
    kinds = found.get("type", "object" if "properties" in found else "string")
    match kinds if isinstance(kinds, str) else next(iter(kinds), None):
        case "object":
            parts = found.get("properties") or {}
            return {key: _example(part, root, text, depth + 1) for key, part in parts.items()}
        case "array":
            item = _example(found.get("items"), root, text, depth + 1)
            return [item] * found.get("minItems", 0)
        case "integer" | "number":
            return found.get("minimum", 0)
        case "boolean":
            return False
        case "string":
            return text[: found.get("maxLength")]
    return None
