"""A mistake that people make on the command line, and what they are told.

Each is made in a folder with ``reviews.csv`` (id, review, label, stars; three rows) and ``job.toml``, a job for it with
the engine "dry-run".
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support import own_process
from tests.support.command_line import Ended, batchkit
from tests.support.forks import Fork

REVIEWS = "id,review,label,stars\nr1,Good soup,positive,5\nr2,Late and cracked,negative,1\nr3,As usual,neutral,3\n"
JOB = """\
name = "mood"
[input]
path = "reviews.csv"
id = "id"
[prompt]
user = "Mood? {{ review }}"
[engine]
kind = "dry-run"
[output]
keep = ["label"]
"""
NO_PROMPT = JOB.replace('[prompt]\nuser = "Mood? {{ review }}"\n', "")
DRY = "--set engine.kind=dry-run --set 'engine.options={}'"
ONE_LINE = f"run --model batchkit-demo --input reviews.csv {DRY}"


@dataclass(frozen=True)
class Mistake:
    """``commands``: a command each, the last of which is judged. ``says``: what it prints, stdout or stderr, in any
    order; ``…`` in it is for what varies. ``never``: what it must not print. ``files``: by name, written before;
    ``gone``: removed before the last. ``is_slow``: the last imports an engine, and is a process of its own."""

    commands: str
    says: str | tuple[str, ...]
    exit_code: int = 2
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    never: str | tuple[str, ...] = ()
    gone: str | tuple[str, ...] = ()
    is_slow: bool = False


def params(tables: Mapping[str, Sequence[Mistake]]) -> list[Any]:
    """For ``pytest.mark.parametrize``."""
    return [
        pytest.param(mistake, id=f"{table}-{number}", marks=[pytest.mark.slow] * mistake.is_slow)
        for table, mistakes in tables.items()
        for number, mistake in enumerate(mistakes)
    ]


def check(mistake: Mistake) -> None:
    """Make it in the working directory."""
    folder = Path.cwd()
    write_example(folder)
    for name, text in mistake.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    *before, last = mistake.commands.splitlines()
    for command in before:
        batchkit(*shlex.split(command))
    for name in each(mistake.gone):
        Path(name).unlink()
    if mistake.is_slow:
        process = own_process.batchkit(*shlex.split(last), cwd=folder, start=Fork)
        ended = Ended(process.returncode, process.stdout, process.stderr)
    else:
        ended = batchkit(*shlex.split(last))
    printed = " ".join((ended.stdout + ended.stderr).split())
    assert [said for said in each(mistake.says) if not matches(said, printed)] == [], printed
    assert [said for said in each(mistake.never) if said in printed] == [], printed
    assert ended.exit_code == mistake.exit_code, printed


def job_of_steps(**prompts: str) -> str:
    """The job with a step for each prompt, by the step's name."""
    steps = (f'[[steps]]\nname = "{name}"\nprompt.user = "{of}"\n' for name, of in prompts.items())
    return NO_PROMPT + "".join(steps)


def each(texts: str | tuple[str, ...]) -> tuple[str, ...]:
    return (texts,) if isinstance(texts, str) else texts


def write_example(folder: Path) -> None:
    (folder / "reviews.csv").write_text(REVIEWS, encoding="utf-8")
    (folder / "job.toml").write_text(JOB, encoding="utf-8")


def matches(message: str, printed: str) -> bool:
    return bool(re.search(".*".join(map(re.escape, message.split("…"))), printed))
