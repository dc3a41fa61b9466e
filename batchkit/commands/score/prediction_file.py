"""Predictions that were made elsewhere: a JSONL file, or the results file of RealHiTBench's harness."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from batchkit.errors import JobError
from batchkit.storage.plain_json import parsed, valid
from batchkit.types import BROKEN_OFF

_IDS = ("id", "Id", "custom_id", "query_id")
_PREDICTIONS = ("prediction", "Prediction", "Model_Answer", "answer")
_TEXTS = ("text", "response", "Response", "output")
_NO_ANSWER = "[ERROR]"  # what that harness stores if the model gave no answer


class Prediction(NamedTuple):
    """What was predicted for a row: the ``prediction`` itself, or the whole ``text`` of an answer."""

    prediction: str | None
    text: str | None
    failed: bool = False


def read_predictions(path: Path) -> dict[str, Prediction]:
    """Predictions by row id; if several have one id, the last counts.

    A line, or a member of ``results`` (or of a list) in a ``.json`` file, has an ``id`` and a
    ``prediction`` or a ``text``, or is a line of OpenAI's batch output. An entry that says it failed
    is a failure, and so are null, a blank text and the harness's ``[ERROR] …``: none of them is an
    answer. A blank prediction is one if the text is not known: the harness's metrics score it 0.

    Raises:
        JobError: missing, not JSON, or a line without an id or without either of the two.
    """
    found: dict[str, Prediction] = {}
    for where, given in _entries(path):
        entry = _of_batch(given) if _is_batch(given) else given
        row_id = _first(entry, _IDS)
        if row_id is None:
            raise JobError(f"{where}: no id; one of {', '.join(_IDS)} must name the row")
        found[str(row_id)] = _prediction(entry, where)
    if not found:
        raise JobError(f"{path}: holds no prediction")
    return found


def _is_batch(entry: Mapping[str, Any]) -> bool:
    """Whether it is a line of OpenAI's batch output or error file."""
    response = entry.get("response")
    return "custom_id" in entry and (
        isinstance(response, Mapping) or (response is None and "error" in entry)
    )


def _of_batch(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The first choice is the answer, as in a record; the line's own ``id`` is no row's."""
    failed = {"id": entry["custom_id"], "status": "failed"}
    response = entry.get("response") or {}
    if entry.get("error") or response.get("status_code", 200) != 200:
        return failed
    try:
        body = response["body"]
        first = min(body["choices"], key=lambda choice: choice.get("index") or 0)
        text = first["message"]["content"] if "message" in first else first["text"]
        is_whole = not body.get("error") and first.get("finish_reason") not in BROKEN_OFF
    except (KeyError, TypeError, ValueError, AttributeError):  # no answer, or not to a chat
        return failed
    return {"id": entry["custom_id"], "text": text} if is_whole else failed


def _prediction(entry: Mapping[str, Any], where: str) -> Prediction:
    if entry.get("status") == "failed":
        return Prediction(None, None, failed=True)
    known = _PREDICTIONS + _TEXTS
    if not any(name in entry for name in known):
        names = ", ".join(map(str, entry))
        raise JobError(
            f"{where}: neither a prediction nor a text; it has {names}. One of {', '.join(known)}"
            " must hold it"
        )
    prediction, text = _text(_first(entry, _PREDICTIONS)), _text(_first(entry, _TEXTS))
    answer = text if prediction is None else prediction
    is_blank = text is not None and not text.strip() and not (prediction or "").strip()
    if answer is None or is_blank or answer.lstrip().startswith(_NO_ANSWER):
        return Prediction(None, None, failed=True)
    return Prediction(prediction, text)


def _text(value: Any) -> str | None:
    if value is None:
        return None
    return valid(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _entries(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each entry, and its place for error messages."""
    try:
        data = path.read_bytes().removeprefix(BOM_UTF8)
    except FileNotFoundError:
        raise JobError(f"--predictions {path}: no such file") from None
    except OSError as error:
        raise JobError(f"--predictions {path}: can't be read: {error.strerror}") from error
    whole = _whole(path, data)
    entries = whole if isinstance(whole, list) else None
    if isinstance(whole, dict) and isinstance(whole.get("results"), list):
        entries = whole["results"]
    if isinstance(whole, dict) and entries is None and data.count(b"\n", 0, -1):
        raise JobError(
            f"{path}: a JSON object without a list of `results`; it has"
            f" {', '.join(map(str, whole))}. Give one object a line, a list, or `results`"
        )
    places = (
        ((f"{path} entry {number}", entry) for number, entry in enumerate(entries))
        if entries is not None
        else _lines(path, data)
    )
    for where, entry in places:
        if not isinstance(entry, dict):
            raise JobError(f"{where}: found {str(entry)[:60]!r}, expected an object with an id")
        yield where, entry


def _whole(path: Path, data: bytes) -> Any:
    """The file as one JSON value; None if there is one value per line."""
    try:
        return parsed(data)
    except ValueError as error:
        if path.suffix == ".json" and b"\n{" not in data.strip():
            raise JobError(f"{path}: not JSON: {error}") from None
        return None


def _lines(path: Path, data: bytes) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            try:
                entry = parsed(line)
            except ValueError as error:
                raise JobError(f"{path} line {number}: not JSON: {error}") from None
            yield f"{path} line {number}", entry


def _first(entry: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((entry[name] for name in names if entry.get(name) is not None), None)
