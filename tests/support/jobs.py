"""Job files."""

from __future__ import annotations

from typing import Any


def with_tables(job: dict[str, Any], tables: dict[str, Any]) -> dict[str, Any]:
    """``job``, each of whose tables has the keys of ``tables`` too."""
    return job | {
        name: {**job.get(name, {}), **table} if isinstance(table, dict) else table
        for name, table in tables.items()
    }
