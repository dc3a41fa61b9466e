"""``forecast.json`` in the run folder: the forecast of ``plan``, and the lengths of a run's answers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import orjson

from batchkit.config.regular_file import read_bytes
from batchkit.storage.files import disk_errors, write_atomically

FORECAST, LENGTHS = "forecast.json", "answer_lengths"


def forecast_in(folder: Path) -> dict[str, Any]:
    """Return the content of the file; {} if it can't be read."""
    try:
        found = orjson.loads(read_bytes(folder / FORECAST))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def lengths_in(folder: Path) -> dict[str, tuple[float, float]]:
    """Return the lengths of answers by kind of row (``rendering/answer_lengths.py``); {} if they are unknown."""
    try:
        return msgspec.convert(
            forecast_in(folder).get(LENGTHS, {}), dict[str, tuple[float, float]], strict=True
        )
    except msgspec.ValidationError:
        return {}


def update_forecast(folder: Path, keys: Mapping[str, Any]) -> None:
    """Write ``keys`` to the file, and keep its other keys. Raises StoreError if writing fails."""
    content = orjson.dumps({**forecast_in(folder), **keys}, option=orjson.OPT_INDENT_2)
    with disk_errors(folder / FORECAST):
        write_atomically(folder / FORECAST, content)
