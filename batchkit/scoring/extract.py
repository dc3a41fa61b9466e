"""Extractors: functions that read the prediction from an answer's text.

An extractor returns None if it finds nothing. CONTRIBUTING.md explains how to add one.
"""

from __future__ import annotations

import json
import marshal
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from json import JSONDecodeError, JSONDecoder
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator

from batchkit.config.seams import EXTRACTORS as SEAM
from batchkit.config.tables import ScoringTable
from batchkit.config.terminal import shortened
from batchkit.config.values import reason_of
from batchkit.isolation.client import Gone, ask
from batchkit.isolation.pattern_child import MEMORY_BYTES, TIMEOUT_S
from batchkit.scoring.values import in_digits, numbers_in, parse_reward

Extractor = Callable[..., str | None]
"""A function of an answer's text. Its keyword-only parameters are the extractor's parameters in the job file."""


class OrElse(NamedTuple):
    """An extractor ``find`` with a default. If ``find`` finds nothing, the row is asked again as ``retry.reask``
    allows. If ``find`` still finds nothing, ``default`` gives the prediction. Both functions get the same parameters.
    """

    find: Extractor
    default: Extractor


EXTRACTORS = {
    "text": "batchkit.scoring.extract:whole",
    "regex": "batchkit.scoring.extract:regex",
    "json": "batchkit.scoring.extract:json_value",
    "number": "batchkit.scoring.extract:last_number",
    "final-answer": "batchkit.contrib.realhit.final_answer:FINAL_ANSWER",
    "code": "batchkit.scoring.extract:code",
    "reward": "batchkit.scoring.extract:REWARD",
    "score": "batchkit.scoring.extract:score",
}

# The opening bracket of an object or list, if a key, a value or the closing bracket follows.
_OPENED = re.compile(r"""\{(?=[ \t\n\r]*+["}])|\[(?=[ \t\n\r]*+["{\[\]\-\dtfnNI])""")
# The number after `[Score]:` or `Score:`, bold or not. It ends at a slash: "85/100" is 85. As sign, only the ASCII
# minus is accepted: "−5" with another dash gives no score, because reading it as 5 would be wrong.
_SCORE = re.compile(
    r"Score[\]*_]*+\s*+:[^\w.+\-\u2010-\u2015\u2212]*+([+-]?(?:\d++(?:\.\d++)?|\.\d++))"
)
FENCED = re.compile(r"```[ \t]*+\w*+[ \t]*+\r?\n(.*?)```", re.DOTALL)
_ANSWERS = ("answer", "prediction")
# Maximum number of characters read without finding JSON, because a text full of brackets would take hours.
_MOST_IN_VAIN = 10_000_000
_DEAR = 10_000  # characters counted for a value nested too deeply for Python
_FAILURE = 50  # characters counted for each failed attempt, besides those read


def whole(text: str) -> str | None:
    """Return the text without surrounding white space. If the text is a JSON object, return its ``answer`` or
    ``prediction`` if it has one."""
    text = text.strip()
    if text.startswith("{") and text.endswith("}"):
        for key in _ANSWERS:
            found = json_value(text, key=key)
            if found is not None:
                return found
    return text


def last_number(text: str) -> str | None:
    """Return the last number in the text, without thousands separators."""
    found = numbers_in(text)
    return in_digits(found[-1]) if found else None


def reward(text: str, *, default: float | None = None) -> str | None:
    """Return the score from 0 to 10 in the text; None if there is no number. ``default`` is not used here, but by
    ``default_reward``."""
    found = parse_reward(text)
    return None if found is None else f"{found:g}"


def default_reward(text: str, *, default: float | None) -> str | None:
    return None if default is None else f"{default:g}"


REWARD = OrElse(reward, default_reward)


def score(text: str) -> str | None:
    """Return the number after the last ``[Score]:`` or ``Score:``."""
    found = _SCORE.findall(text)
    return found[-1] if found else None


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, MemoryError, OverflowError, ValueError) as error:
        raise ValueError(
            f"{shortened(pattern)!r} is not a valid regular expression: {reason_of(error)}"
        ) from None
    return pattern


def regex(text: str, *, pattern: Annotated[str, AfterValidator(_compiles)]) -> str | None:
    """Return the last match of ``pattern``. If the pattern has groups, return the first group of this match."""
    found = last_match(pattern, text)
    return None if found is None else found.strip()


def json_value(text: str, *, key: str | None = None) -> str | None:
    """Return the value at the dotted ``key`` in the last JSON object or list in ``text`` that has this key. If ``key``
    is None, the value is the object or list itself. A value that is not text is returned as JSON."""
    found = None
    for value in _json_in(text):
        at_key = _at(value, key)
        found = at_key if at_key is not None else found
    if found is not None and not isinstance(found, str):
        found = _as_json(found)
    return None if found is None else found.encode("utf-8", "replace").decode()


def code(text: str) -> str | None:
    """Return the last fenced code block. If there is none, return the text from the first ``import`` line on."""
    if blocks := FENCED.findall(text):
        return str(blocks[-1]).strip()
    start = re.search(r"^(import|from) \w", text, re.MULTILINE)
    return text[start.start() :].strip() if start else None


def _json_in(text: str) -> Iterator[Any]:
    decoder, position, in_vain = JSONDecoder(), 0, 0
    # For each error, the decoder counts the lines from the start of its text, so its text begins near the position.
    rest, rest_from, window = text, 0, max(1024, len(text) // 1000)
    while (found := _OPENED.search(text, position)) is not None:
        if found.start() - rest_from > window:
            rest, rest_from = text[found.start() :], found.start()
        start = found.start() - rest_from
        try:
            value, end = decoder.raw_decode(rest, start)
            position = rest_from + end
            yield value
        except (ValueError, RecursionError) as error:  # also for a number with too many digits
            position = found.end()
            in_vain += _FAILURE + _read_in_vain(error, len(rest)) - start
            if in_vain > _MOST_IN_VAIN:
                raise Unscorable("the answer has too many brackets that begin no JSON") from None


def _read_in_vain(error: Exception, length: int) -> int:
    """Return how many characters the JSON decoder read before it failed with ``error``, in a text of ``length``
    characters."""
    if not isinstance(error, JSONDecodeError):
        return _DEAR  # too deep
    # For an unterminated string, pos is the string's beginning, although the decoder read to the end of the text. This
    # error has no type of its own.
    return length if error.msg.startswith("Unterminated string") else error.pos


def _as_json(value: Any) -> str | None:
    """Return ``value`` as JSON; None if it is nested too deeply. orjson is not used, because it can't write huge
    numbers."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        return None


def _at(value: Any, key: str | None) -> Any:
    for part in (key or "").split(".") if key else ():
        if isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        else:
            return None
    return value


def extracted(text: str, table: ScoringTable, *, may_default: bool = True) -> str | None:
    """Return the prediction that the extractor of ``table`` finds in ``text``. If it finds nothing, return its default
    (if ``may_default``), otherwise None.

    Raises:
        Unscorable: The answer is too long, or extraction takes too long.
    """
    check_length("answer", text, MOST_READ)
    extractor: Extractor | OrElse = SEAM.load(table.extractor)
    find, *default = extractor if isinstance(extractor, OrElse) else [extractor]
    parameters = table.extract[table.extractor]
    found = find(text, **parameters)
    if found is None and default and may_default:
        found = default[0](text, **parameters)
    return None if found is None else str(found)


MOST_READ = 4_000_000  # characters of an answer that an extractor reads
MOST_COMPARED = 200_000  # characters of a prediction or a reference
_HANDLER = "batchkit.isolation.pattern_child"
_WAIT_S = 120.0  # maximum wall time of a match, even if its process gets no CPU time


class Unscorable(Exception):
    """An error for an answer that can't be scored. The message is the reason; rows with the same cause have the same
    message."""


def check_length(what: str, text: str, most: int) -> None:
    """Raise Unscorable if ``text`` has more than ``most`` characters."""
    if len(text) > most:
        raise Unscorable(f"the {what} has more than {most:,} characters")


def last_match(pattern: str, text: str) -> str | None:
    """Return the last match of ``pattern`` in ``text``. If the pattern has groups, return the first group of this
    match.

    Raises:
        Unscorable: Matching takes too much time or memory.
        EngineError: No process can be started.
    """
    try:
        kind, found = ask(_HANDLER, "the pattern", marshal.dumps((pattern, text)), _WAIT_S)
    except TimeoutError:
        reason = f"did not finish within {_WAIT_S:g} s"
    except Gone as gone:
        reason = f"did not finish within {TIMEOUT_S:g} s of CPU time"
        if gone.returncode != -signal.SIGPROF:
            reason = "ended its process twice"
    else:
        if kind == "value":
            match: str | None = found
            return match
        too_much = f"needs more than {MEMORY_BYTES >> 30} GiB of memory"
        reason = too_much if kind == "memory" else f"fails: {found}"
    raise Unscorable(f"the pattern `{pattern}` {reason}")
