"""What RealHiTBench's own code answered, on machines that have it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.paths import ROOT

VECTORS = ROOT.parent / "shared/realhit/metric_vectors.json"


def vectors(*keys: str) -> list[Any]:
    """For ``pytest.mark.parametrize``."""
    if not VECTORS.exists():
        return [pytest.param(None, marks=pytest.mark.skip(f"{VECTORS} is not on this machine"))]
    found = json.loads(VECTORS.read_text())
    return [
        pytest.param(vector, id=vector.get("name", f"{key}-{number}"))
        for key in keys
        for number, vector in enumerate(found[key])
    ]
