"""Constraints on answers: ``structured_outputs`` and its JSON schema."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from batchkit.config.suggest import did_you_mean
from batchkit.config.terminal import shortened
from batchkit.config.values import from_json

_DEEPEST = 20
_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_HOW = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
# The beginnings of Python's errors for syntax that Python's `re` refuses but the engines may allow.
_OTHER_DIALECT = ("bad escape", "unknown extension")


def schema_in(sampling: Mapping[str, Any]) -> Any:
    """Return the JSON schema of ``structured_outputs`` in ``sampling``, or None if there is none or it is not valid
    JSON."""
    wanted = sampling.get("structured_outputs")
    schema = from_json(wanted.get("json")) if isinstance(wanted, Mapping) else None
    return schema if isinstance(schema, Mapping) else None


def resolved(schema: Any, root: Any) -> Mapping[str, Any]:
    """Return the definition that ``schema`` refers to with ``{"$ref": "#/$defs/NAME"}`` (Pydantic's form), or
    ``schema`` itself if it has no such reference. ``root`` is the whole schema. A missing definition gives {}."""
    if not isinstance(schema, Mapping):
        return {}
    name = str(schema.get("$ref", ""))
    if not name.startswith("#/$defs/"):
        return schema
    below = root.get("$defs", {}).get(name.removeprefix("#/$defs/"))
    return below if isinstance(below, Mapping) else {}


def example(schema: Any, text: str) -> Any:
    """Return an example answer for ``schema``, for engines without a model. The example has all properties of the
    schema, and each string is ``text``. Patterns and most limits are ignored, so the example may not match
    ``schema``."""
    return _example(schema, schema, text, depth=0)


def faults_in(wanted: Any) -> Iterator[str]:
    """Yield a message for each fault in ``wanted`` (a job's ``structured_outputs``) that makes it unusable for every
    engine. A message begins with the faulty key in ``wanted``, for example ``.regex: not a valid regular
    expression``."""
    if not isinstance(wanted, Mapping):
        return
    known = (*_CONSTRAINTS, *_HOW)
    for name in wanted:
        if name not in known:
            yield f".{name}: vLLM has no such constraint{did_you_mean(name, known) or _one_of(known)}"
    if not any(value is not None for name, value in wanted.items() if name not in _HOW):
        yield f": has no constraint{_one_of(_CONSTRAINTS)}"
    faults = {"json": _fault_in_json, "regex": _fault_in_regex, "choice": _fault_in_choice}
    for name, fault_in in faults.items():
        if wanted.get(name) is not None and (fault := fault_in(wanted[name])) is not None:
            yield f".{name}: {fault}"


def _one_of(names: tuple[str, ...]) -> str:
    return f"; expected one of {', '.join(names)}"


def _fault_in_json(schema: Any) -> str | None:
    if isinstance(schema, str):
        try:
            schema = orjson.loads(schema)
        except orjson.JSONDecodeError as error:
            return f"not valid JSON: {error}"
    fault = fault_in_schema(schema)
    return None if fault is None else f"not a valid JSON schema: {fault}"


def _fault_in_regex(pattern: Any) -> str | None:
    try:
        re.compile(pattern)
    except re.error as error:
        if not str(error).startswith(_OTHER_DIALECT):
            return f"{shortened(pattern)!r} is not a valid regular expression: {error}"
    except (TypeError, RecursionError, OverflowError) as error:
        return f"not a valid regular expression: {error}"
    return None


def _fault_in_choice(choices: Any) -> str | None:
    if isinstance(choices, list) and choices and all(isinstance(one, str) for one in choices):
        return None
    return f"found {shortened(repr(choices))}, expected a list of texts"


def fault_in_schema(schema: Any) -> str | None:
    """Return why ``schema`` is not a valid JSON schema, beginning with the path of the fault in it; None if it is
    valid."""
    from jsonschema import SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for

    try:
        validator_for(schema, default=Draft202012Validator).check_schema(schema)
    except SchemaError as error:
        return f"{error.json_path}: {shortened(error.message, 200)}"
    except (AttributeError, TypeError, ValueError) as error:
        # jsonschema resolves $schema as an address.
        return f"$.$schema: {error}"
    return None


def _example(schema: Any, root: Any, text: str, depth: int) -> Any:
    found = resolved(schema, root)
    if depth > _DEEPEST:  # the schema refers to itself
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
