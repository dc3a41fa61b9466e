"""Rows that become requests, by jobs of the dry-run engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from batchkit.rendering.renderer import PromptRenderer
from batchkit.types import Request, Row
from tests.support.dry_runs import job


def renderer(**tables: Any) -> PromptRenderer:
    return PromptRenderer(job(**tables))


def render(fields: Mapping[Any, Any], attempt: int = 1, **tables: Any) -> Request:
    return renderer(**tables).render(Row(0, "0", fields), attempt)


def refusal(kind: type[Exception], fields: Mapping[Any, Any], **tables: Any) -> str:
    """What is wrong with the row, or the job."""
    with pytest.raises(kind) as refused:
        render(fields, **tables)
    assert type(refused.value) is kind
    return str(refused.value)
