"""Every name that the job file allows has its code, and every such code its name."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, get_args

import pytest

from batchkit.config.tables.scoring import Extract, ScorerName
from batchkit.scoring import COMPARISONS, DEFERRED
from batchkit.scoring.extract import EXTRACTORS
from batchkit.scoring.overlap import OVERLAPS


@pytest.mark.parametrize(
    ("names", "coded"),
    [
        (Extract, EXTRACTORS),
        (ScorerName, [*OVERLAPS, *COMPARISONS, *DEFERRED, "reward"]),
    ],
    ids=["scoring.extract", "scoring.scorers"],
)
def test_each_name_of_the_job_file_has_its_code(names: Any, coded: Collection[str]) -> None:
    assert sorted(get_args(names)) == sorted(coded)
