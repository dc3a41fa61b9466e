"""Parsing of answers as JSON, and validation against a schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import islice
from typing import Any

import orjson

from batchkit.config.answer_schema import fault_in_schema, schema_in
from batchkit.config.terminal import shortened
from batchkit.errors import InvalidOutputError, TruncatedOutputError
from batchkit.scoring.extract import FENCED, Unscorable, last_match
from batchkit.types import Choice

_MOST_MISFITS = 100  # schema violations examined to find the most relevant one
_SHOWN = 200  # characters of an answer or a reason in a message
_LONG_INT = re.compile(r"\d{19}")


class NotJson(Exception):
    """An error for a text that is not JSON. The message is the reason."""


def value_of(choice: Choice, sampling: Mapping[str, Any]) -> Any:
    """Return the JSON value of an answer; None for a tool call, which has no text to parse.

    Raises:
        InvalidOutputError: The answer is not JSON, or does not match the schema in ``sampling``. If the answer was cut
            off before its JSON ended, the error is a TruncatedOutputError, unless the answer is mostly white space.
    """
    if choice.tool_calls and not choice.text.strip():
        return None
    try:
        if choice.finish_reason == "length" and choice.text[-1:].isdigit():
            raise NotJson(f"the number {choice.text[-20:]!r} may have had more digits")
        return parsed(choice.text, schema_in(sampling))
    except NotJson as reason:
        is_cut = choice.finish_reason == "length"
        if is_cut and (white := sum(map(str.isspace, choice.text))) > 0.9 * len(choice.text):
            raise InvalidOutputError(
                f"sampling.max_tokens ended the answer before its JSON was complete: {white} of"
                f" {len(choice.text)} characters are white space; with vLLM, forbid white space:"
                ' engine.options.structured_outputs_config = { backend = "xgrammar", disable_any_whitespace = true }'
            ) from None
        if is_cut:
            raise TruncatedOutputError(
                f"the answer was cut off (finish_reason length) before its JSON ended: {reason};"
                " raise sampling.max_tokens"
            ) from None
        raise InvalidOutputError(f"the answer is not JSON: {reason}") from None


def parsed(text: str, schema: Any = None) -> Any:
    """Return the value of ``text``, which is JSON or contains one fenced JSON block.

    Raises:
        NotJson: The text is not JSON, and does not contain exactly one fenced JSON block.
        InvalidOutputError: The value does not match ``schema``, or can't be checked against it.
    """
    value = _value(text)
    if schema is not None:
        _check(value, schema)
    return value


def _value(text: str) -> Any:
    try:
        return _loads(text)
    except ValueError as error:
        reason = error
    blocks = FENCED.findall(text)
    if len(blocks) == 1:
        try:
            return _loads(blocks[0])
        except ValueError as error:
            reason = error
    raise NotJson(f"{reason}; the answer begins {shortened(text.strip(), _SHOWN)!r}") from None


def _loads(text: str) -> Any:
    """Return the value of the JSON ``text``. Integers beyond 64 bits are kept exactly. Raises ValueError if the JSON is
    invalid."""
    value = orjson.loads(text)
    if _LONG_INT.search(text) is None:
        return value
    try:
        return json.loads(text)  # orjson converts an integer beyond 64 bits to a float
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _check(value: Any, schema: Any) -> None:
    from jsonschema.exceptions import best_match

    try:
        misfits = _validator(orjson.dumps(schema)).iter_errors(value)
        worst = best_match(islice(misfits, _MOST_MISFITS))
    except RecursionError:
        raise InvalidOutputError(
            "the answer can't be checked against its schema: nested too deeply"
        ) from None
    except Exception as error:  # a row may contain any schema
        raise InvalidOutputError(
            f"the answer can't be checked against its schema: {error}"
        ) from error
    if worst is not None:
        raise InvalidOutputError(
            f"the answer does not match its JSON schema at {worst.json_path}:"
            f" {shortened(worst.message, _SHOWN)}"
        )


@lru_cache(maxsize=64)
def _validator(schema: bytes) -> Any:
    """Return a validator with an empty registry, so that a schema cannot load other schemas."""
    from jsonschema.validators import Draft202012Validator, extend, validator_for
    from referencing import Registry

    found = orjson.loads(schema)
    if (fault := fault_in_schema(found)) is not None:
        raise Unscorable(f"not a valid JSON schema: {fault}")
    kind = validator_for(found, default=Draft202012Validator)
    return extend(kind, {"pattern": _pattern})(found, registry=Registry())


def _pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[Any]:
    """Check the schema key ``pattern`` as jsonschema does, but with the time limit for regular expressions."""
    from jsonschema import ValidationError

    if isinstance(value, str) and last_match(f"({pattern})", value) is None:
        yield ValidationError(f"{value!r} does not match {pattern!r}")
