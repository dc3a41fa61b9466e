"""``batchkit.generate`` in a plain program. ``tests/how_to/test_notebook.py`` runs it in a notebook."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import batchkit
from batchkit.errors import BatchkitError, ChangedError, JobError
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

DRY = {"kind": "dry-run"}


def frame() -> pd.DataFrame:
    return pd.DataFrame({"q": ["a", "b", "c"], "note": [1, 2, 3]}, index=[7, 5, 9])


def answers(rows: Any, **options: Any) -> Any:
    options = {"prompt": "Say {{ q }}", "engine": DRY, "quiet": True} | options
    return batchkit.generate(rows, **options)


def folders() -> list[str]:
    return sorted(path.name for path in Path("output").iterdir())


def test_a_frame_gets_a_series_with_its_index_and_a_list_a_list() -> None:
    df = frame()
    found = answers(df)
    assert list(found.index) == [7, 5, 9]
    assert found.notna().all()
    assert list(df.assign(a=found)["a"]) == list(found)
    assert answers(df.to_dict("records")) == list(found)
    assert len(answers(["x", "y"], prompt=None)) == 2


def test_the_same_call_is_the_same_run_and_another_one_keeps_it() -> None:
    df = frame()
    df["a"] = answers(df)
    (first,) = folders()
    assert first.startswith("generate-")
    log = Path("output", first, "results.jsonl")
    written = log.read_bytes()
    answers(df)  # has one more column, which no template uses
    assert folders() == [first]
    assert log.read_bytes() == written
    for change in (
        {"prompt": "Tell {{ q }}"},
        {"temperature": 0.5},
        {"max_tokens": 7},
        {"model": "other"},
        {"system": "Be {{ note }}"},
        {"prompt": '{{ row["q"] }}'},
    ):
        before = folders()
        answers(df, **change)
        assert len(folders()) == len(before) + 1
    assert log.read_bytes() == written
    before = folders()
    answers(df.head(2))
    assert len(folders()) == len(before) + 1


def test_columns_are_kept_if_a_template_or_a_key_names_them() -> None:
    answers(frame(), name="mine", input={"id": "note"})
    records = [*batchkit.Run("output/mine").rows()]
    assert [record["id"] for record in records] == ["1", "2", "3"]
    prompt = "{{ 'word ' * (row | length) }}"
    answers(frame(), name="all", prompt=prompt, run={"deduplicate": False})
    answers([{"q": "a"}], name="one", prompt=prompt)
    of_all, of_one = (batchkit.Run(f"output/{name}").record(0)["usage"] for name in ("all", "one"))
    assert of_all["prompt_tokens"] > of_one["prompt_tokens"]


def test_failed_rows_are_none_and_named_in_a_warning() -> None:
    rows = [{"q": "a"}, {"other": "b"}, {"q": "c"}]
    with pytest.warns(UserWarning, match=r"1 of 3 rows have no answer.*Run\('.*output/mine'\)"):
        found = answers(rows, name="mine")
    assert [text is None for text in found] == [False, True, False]


def test_a_name_is_one_run() -> None:
    answers(frame(), name="mine")
    with pytest.raises(ChangedError, match=r"prompt\.user"):
        answers(frame(), name="mine", prompt="Other {{ q }}")
    answers(frame(), name="mine", prompt="Other {{ q }}", on_change="new")
    answers(frame(), name="mine", prompt="Other {{ q }}", fresh=True)
    assert folders() == ["mine", "mine.1", "mine.2"]


@pytest.mark.parametrize(
    ("rows", "options", "words"),
    [
        (iter([{"q": "a"}]), {}, "list_iterator, which can be read only once"),
        ([{"q": "a"}], {"task": "embed"}, 'task = "embed" gives none'),
        ([{"q": "a"}], {"max_token": 5}, "max_token"),
        ([{"q": "a"}], {"engine": {"kind": "dry"}}, "engine.kind"),
    ],
)
def test_a_wrong_argument_is_named(rows: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError, match=words):
        answers(rows, **options)


def test_an_unfinished_run_is_no_column() -> None:
    rows = [{"q": number} for number in range(1000)]
    stopped = {"run": {"max_in_flight": 1}, "budget": {"max_completion_tokens": 60}}  # 6 for each
    with pytest.raises(BatchkitError, match="max_completion_tokens = 60 after 10 of 1,000 rows"):
        answers(rows, **stopped)


def test_an_interrupted_run_raises_keyboard_interrupt() -> None:
    program = (
        "import batchkit\n"
        "slow = {'kind': 'dry-run', 'options': {'latency_s': 0.1}}\n"
        "batchkit.generate([{'q': n} for n in range(1000)], prompt='{{ q }}', engine=slow,"
        " run={'max_in_flight': 1})\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE) as process:
        until(lambda: any(log.stat().st_size for log in Path("output").glob("*/results.jsonl")))
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate()
    assert stderr.endswith(b"KeyboardInterrupt\n")


def test_rows_that_input_cross_multiplies_are_refused() -> None:
    with pytest.raises(JobError, match=r"input\.cross"):
        answers(frame(), input={"cross": {"t": [0, 1]}})
