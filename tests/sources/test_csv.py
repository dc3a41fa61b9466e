"""CSV as programs write it: cells without the quotes that they need."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from batchkit.errors import InputError
from tests.support.sources import rows_of


def test_row_with_a_return_that_goes_on_in_the_next_line_stops_the_reading(tmp_path: Path) -> None:
    """The rest of its last cell was a row of its own: pandas does not quote a return."""
    frame = pd.DataFrame({"title": ["a", "b\rc", "d"], "review": ["x", "one\ntwo, three", "y"]})
    frame.to_csv(tmp_path / "x.csv", index=False)
    with pytest.raises(InputError, match=r"line 3: a carriage return .* goes on in the next line"):
        rows_of(tmp_path / "x.csv")


def test_row_with_a_return_whose_quotes_are_closed_fails_alone(tmp_path: Path) -> None:
    frame = pd.DataFrame({"title": ["a", 'one\n"two"', "d"], "review": ["x", "b\rc", "y"]})
    frame.loc[3] = ["b\rc", 'with, ""quotes"" in it']
    frame.to_csv(tmp_path / "x.csv", index=False)
    rows = rows_of(tmp_path / "x.csv")
    assert [row.fields.get("title") for row in rows] == ["a", None, "d", None]
    assert all("carriage return" in str(rows[n].error) for n in (1, 3))
