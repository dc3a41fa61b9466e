"""A job file that is no TOML: the line, and what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchkit.config.loading import load_job
from batchkit.errors import JobError


def write(folder: Path, text: str) -> Path:
    path = folder / "job.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path: Path) -> str:
    with pytest.raises(JobError) as refused:
        load_job(path)
    return str(refused.value)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("model = Qwen/Qwen3", 'a text needs quotes: key = "text"'),
        ("chat = True", "write true or false"),
        ("limit = None", "leave the key out"),
        ("limit =", "a value is missing"),
        ("name = “x”", "straight quotes"),
        ('name = "x', "a quote is not closed"),
        ('path = "C:\\data"', "single quotes, or each \\ twice"),
        ("limit 5", "write key = value"),
        ("name: x", "write key = value"),
        ("[engine", "write [table]"),
        ("user = 'it's'", "needs double quotes"),
        ("top_p = 0,9", "a fraction 0.5"),
        ("name = 'b'", "this key is there twice"),
        ("[engine]", "this table is there twice"),
    ],
)
def test_line_that_is_no_toml_is_shown_with_what_to_write(
    tmp_path: Path, line: str, words: str
) -> None:
    path = write(tmp_path, f"name = 'a'\n{line}\n")
    if line == "[engine]":
        path.write_text(f"[engine]\n{line}\n")
    message = refusal(path)
    assert message.startswith(f"{path}: not valid TOML: line 2: ")
    assert words in message
    assert message.endswith(f"\n  {line}")


def test_secret_in_a_line_that_is_no_toml_is_masked(tmp_path: Path) -> None:
    path = write(tmp_path, "[engine.options]\nhf_token = hf_abcdefgh12345678\n")
    message = refusal(path)
    assert message.endswith("\n  hf_token = ***")
