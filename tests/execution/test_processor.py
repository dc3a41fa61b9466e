"""What a program is told: its own arguments, not the flags of the command line; and by ``help()``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchkit import JobConfig, ProductionBatchProcessor
from batchkit.commands.retry import retry_failed
from batchkit.errors import BatchkitError, BrokenInputError, ChangedError, FailedRowsError, JobError

DRY = {"kind": "dry-run"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def processor(**options: Any) -> ProductionBatchProcessor:
    return ProductionBatchProcessor(JobConfig(engine=DRY), quiet=True, **options)


def test_a_mistyped_key_of_a_job_is_a_job_error_in_plain_words() -> None:
    with pytest.raises(JobError) as refused:
        JobConfig(engine=DRY, promt={})  # type: ignore[call-arg]
    assert str(refused.value) == (
        "JobConfig: 1 problem\n  promt: unknown key; did you mean 'prompt'?"
    )


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: processor(on_change="nwe"), "on_change: found 'nwe', expected 'fail' or 'new'"),
        (lambda: ProductionBatchProcessor({"engine": DRY}), "from a dict: JobConfig(**job)"),  # type: ignore[arg-type]
        (lambda: ProductionBatchProcessor(3), "job: found int"),  # type: ignore[arg-type]
        (lambda: processor(skip_from="no").process(["a"]), "skip_from=no: not a run folder"),
        (lambda: processor().process(), "no rows: pass rows to process()"),
        (
            lambda: processor().process([{"role": "user", "content": "Hi"}]),
            "found a list of chat messages. If it is one conversation, pass [rows]",
        ),
        (
            lambda: processor().process([{"x": 1}] * 4),
            "if other rows are good, run.check_rows=0 runs them",
        ),
        (
            lambda: processor().process("job.toml"),
            "'job.toml' is the name of a file; to read the file, set input.path",
        ),
    ],
)
def test_wrong_argument_is_named(call: Callable[[], object], words: str) -> None:
    Path("job.toml").write_text("")
    with pytest.raises(BatchkitError) as refused:
        call()
    assert words in str(refused.value)
    assert "--" not in str(refused.value)


def test_an_argument_of_the_processor_is_refused_where_rows_are_given() -> None:
    with pytest.raises(
        TypeError, match=r"pass raise_on_failure to ProductionBatchProcessor\(job, "
    ):
        processor().process(["a"], raise_on_failure=True)  # type: ignore[arg-type]


def test_no_rows_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    ProductionBatchProcessor(JobConfig(engine=DRY)).process([])
    assert "process() was given no rows: an empty list" in capsys.readouterr().err


@pytest.mark.parametrize(
    "tables",
    [
        {"task": "classify"},
        {"rollout": {"function": "solve.py:solve"}},
        {"workers": {"count": 2}},
    ],
    ids=str,
)
def test_sampling_is_not_adjusted_where_no_function_could_do_that(tables: dict[str, Any]) -> None:
    with pytest.raises(
        JobError, match=r"adjust_sampling can.t be used with (task|a rollout|workers\.count)"
    ):
        ProductionBatchProcessor(JobConfig(engine=DRY, **tables), adjust_sampling=dict)


def test_changed_job_names_the_arguments_that_decide() -> None:
    processor().process(["a"])
    with pytest.raises(ChangedError) as refused:
        processor().process(["b"])
    assert "--" not in str(refused.value)
    assert 'fresh=True or on_change="new"' in str(refused.value)
    assert processor(on_change="requeue").process(["b"]).ok == 1


def test_a_changed_set_of_columns_is_named() -> None:
    processor().process([{"prompt": "a", "stars": 1}])
    with pytest.raises(ChangedError, match="column 'label' added, column 'stars' removed"):
        processor().process([{"prompt": "a", "label": 1}])


def test_failed_rows_are_printed_and_raised_if_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [{"prompt": "a"}, {"text": "b"}]
    loud = ProductionBatchProcessor(JobConfig(engine=DRY), raise_on_failure=True)
    with pytest.raises(FailedRowsError) as raised:
        loud.process(rows)
    for said in (str(raised.value), capsys.readouterr().err):
        assert "failed by template: 1, for example row 1 (id 1): nothing to send" in said
    assert str(raised.value).startswith("1 of 2 rows failed")
    assert processor().process(rows).exit == 3


def test_rows_from_python_are_retried_by_the_program() -> None:
    rows = [{"prompt": "a"}, {"other": "b"}]
    summary = processor().process(rows)
    assert summary.failed == 1
    with pytest.raises(
        JobError, match=r"came from Python.*processor\.retry\(\{index: attempt\}, rows"
    ):
        retry_failed(Path(summary.folder))
    again = processor().retry({1: 1}, rows=rows)
    assert (again.skipped, again.ok, again.failed) == (1, 1, 1)
    assert [record["attempt"] for record in again.records()] == [1, 2]
    with pytest.raises(BrokenInputError, match="1 of the 1 rows to retry are not in the input"):
        processor().retry({7: 1}, rows=rows)


def test_the_signature_is_what_the_docstring_describes() -> None:
    names = [*inspect.signature(ProductionBatchProcessor).parameters]
    described = inspect.getdoc(ProductionBatchProcessor) or ""
    options = ("fresh", "on_change", "skip_from", "raise_on_failure", "quiet")
    options += ("adjust_sampling", "rollout")
    assert names == ["job", *options]
    assert all(f"\n    {name}: " in described for name in names)
