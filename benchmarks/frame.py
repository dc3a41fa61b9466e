"""Parts that the scripts share: their options, measured commands, figures, and the JSON line at the
end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
ENDED = os.WEXITED | os.WNOHANG | os.WNOWAIT
# A job whose model costs nothing, for the rows of ``write_rows``.
JOB = """
name = "counting"
[input]
path = "rows.jsonl"
id = "id"
[prompt]
user = "Answer in one sentence: {{ question }}"
[engine]
kind = "dry-run"
"""


def arguments(
    doc: str, quick: str, more: Mapping[str, Mapping[str, Any]] | None = None, **numbers: Any
) -> Namespace:
    """Return the script's options. ``numbers``: by name, the default of an option and its value
    with ``--quick``. ``quick``: the help text of ``--quick``. ``more``: by name, further options,
    as for ``add_argument``."""
    parser = ArgumentParser(description=doc.splitlines()[0])
    for name, (usual, _) in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(usual), default=usual)
    for name, keys in (more or {}).items():
        parser.add_argument(f"--{name}", **keys)
    parser.add_argument("--quick", action="store_true", help=quick)
    found = parser.parse_args()
    if found.quick:
        vars(found).update({name: small for name, (_, small) in numbers.items()})
    return found


def report(benchmark: str, figures: Sequence[Figure], **found: Any) -> None:
    """Print the line that ``all.py`` reads."""
    in_json = [figure.to_json() for figure in figures]
    print(json.dumps({"benchmark": benchmark, **found, "figures": in_json}))


class Figure(NamedTuple):
    """A figure with its target. ``wanted``: the minimum of ``found`` (the maximum with
    ``at_most``); None for no target."""

    what: str
    found: float
    unit: str = "×"
    wanted: float | None = None
    at_most: bool = False

    @property
    def outcome(self) -> str:
        if self.wanted is None:
            return ""
        holds = self.found <= self.wanted if self.at_most else self.found >= self.wanted
        return "holds" if holds else "MISSED"

    def to_json(self) -> dict[str, Any]:
        return self._asdict() | {"verdict": self.outcome or None}


def figures_of(line: Mapping[str, Any]) -> Iterator[Figure]:
    """Yield the ``figures`` of a JSON line. If it has none, yield the ratios of the other sides in
    ``results``."""
    for figure in line.get("figures", ()):
        yield Figure(**{name: figure[name] for name in Figure._fields})
    if "figures" in line:
        return
    for found in line.get("results", ()):
        other = found.get("side") or found.get("tool")
        if other not in (None, "batchkit"):
            what = f"{found['setting']}, against {other}"
            yield Figure(what, found["ratio"], wanted=found["wanted"])


class Ended(NamedTuple):
    """The result of a command. CPU seconds and memory are those of its process, with all
    threads."""

    seconds: float
    cpu_s: float
    peak_mib: float
    stdout: str

    @property
    def summary(self) -> dict[str, Any]:
        """The JSON of the last line of stdout."""
        found: dict[str, Any] = json.loads(self.stdout.splitlines()[-1])
        return found


def batchkit(folder: Path, *words: object, **more: Any) -> Ended:
    return python(folder, "-m", "batchkit", *words, **more)


def python(
    folder: Path,
    *words: object,
    meanwhile: Callable[[], bool] = lambda: False,
    every_s: float = 0.002,
    environment: Mapping[str, str] = os.environ,
) -> Ended:
    """Run Python in ``folder``. ``meanwhile`` is called every ``every_s`` seconds as long as it
    returns True. Exit if the command fails.

    The peak memory is correct only if it is above that of this process, because Linux counts the
    memory that the child shared with this process before its exec. Therefore a script that needs
    the peak imports no large package.
    """
    command = [sys.executable, *map(str, words)]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        began = time.perf_counter()
        process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=errors, env=environment)
        while not os.waitid(os.P_PID, process.pid, ENDED) and meanwhile():
            time.sleep(every_s)
        _, status, usage = os.wait4(process.pid, 0)
        seconds, process.returncode = time.perf_counter() - began, os.waitstatus_to_exitcode(status)
        for file in (out, errors):
            file.seek(0)
        if process.returncode:
            what = " ".join(command[:6])
            raise SystemExit(f"{what}: exit code {process.returncode}\n{errors.read()[-2000:]}")
        cpu_s = usage.ru_utime + usage.ru_stime
        return Ended(seconds, cpu_s, usage.ru_maxrss / 1024, out.read())


def write_rows(path: Path, n: int) -> None:
    with path.open("w") as file:
        for index in range(n):
            row = {"id": f"q{index}", "question": f"what is the capital of country {index}?"}
            file.write(json.dumps(row) + "\n")


def spread(found: Sequence[float], digits: int = 2) -> str:
    return f"{min(found):,.{digits}f}–{max(found):,.{digits}f}"
