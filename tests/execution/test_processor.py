"""What ``help()`` shows of the public classes."""

from __future__ import annotations

import inspect

from batchkit import JobConfig, ProductionBatchProcessor


def test_the_signature_is_what_the_docstring_describes() -> None:
    names = [*inspect.signature(ProductionBatchProcessor).parameters]
    described = inspect.getdoc(ProductionBatchProcessor) or ""
    assert names == [
        "job",
        "fresh",
        "on_change",
        "skip_from",
        "quiet",
        "adjust_sampling",
        "rollout",
    ]
    assert all(f"\n    {name}: " in described for name in names)


def test_every_table_of_a_job_is_described() -> None:
    described = inspect.getdoc(JobConfig) or ""
    missing = [name for name in JobConfig.model_fields if f"\n    {name}: " not in described]
    assert not missing
