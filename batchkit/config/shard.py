"""Shards: fixed fractions of the input's rows, for jobs that run in parallel without coordination."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import NamedTuple

from batchkit.errors import JobError

_FORM = re.compile(r"(\d{1,9})/(\d{1,9})", re.ASCII)
_SLURM = {  # variable name -> value if it is not set; None means required
    "SLURM_ARRAY_TASK_ID": None,
    "SLURM_ARRAY_TASK_COUNT": None,
    "SLURM_ARRAY_TASK_MIN": "0",
    "SLURM_ARRAY_TASK_STEP": "1",
}


class Shard(NamedTuple):
    """Shard ``number`` (from 0) of ``of`` shards, written ``number/of``. It holds about one row in ``of``.

    A hash of the row's id decides its shard. (The id is ``Row.id``, which is the row's index if the job sets no
    ``input.id``.) A row with an id of its own is therefore in the same shard in every run, at any position in the
    input.
    """

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def holds(self, row_id: str) -> bool:
        digest = hashlib.blake2b(row_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return int.from_bytes(digest, "big") % self.of == self.number


def parse_shard(text: str) -> Shard:
    """Parse a shard, for example ``0/4``.

    Raises:
        ValueError: ``text`` is not a shard.
    """
    found = _FORM.fullmatch(text.strip())
    if found is None:
        raise ValueError(
            f"{text!r} is not a shard; write I/N, for example 0/4 to 3/4 for four shards"
        )
    number, count = map(int, found.groups())
    if not count:
        raise ValueError(f"{text!r} is not a shard: the number of shards must be at least 1")
    if number >= count:
        raise ValueError(
            f"{text!r} is not a shard: the first of {count} is 0/{count}, the last"
            f" {count - 1}/{count}"
        )
    return Shard(number, count)


def asked_for(text: str, environ: Mapping[str, str]) -> Shard:
    """Return the shard that ``--shard`` selects: ``I/N``, or ``auto`` for this task of a SLURM job array.

    Raises:
        JobError: ``text`` is not a shard; or it is ``auto``, and SLURM's variables are missing in ``environ``, or
            describe no regular job array.
    """
    if text == "auto":
        return _of_slurm(environ)
    try:
        return parse_shard(text)
    except ValueError as error:
        raise JobError(f"--shard: {error}; or write auto in a SLURM job array") from None


def _of_slurm(environ: Mapping[str, str]) -> Shard:
    """Return the shard of this SLURM task: its position in the job array (https://slurm.schedmd.com/job_array.html)."""
    found = {name: environ.get(name) or default for name, default in _SLURM.items()}
    if missing := [name for name, value in found.items() if value is None]:
        raise JobError(
            f"--shard auto: {' and '.join(missing)} not set, so this is not a task of a SLURM job"
            " array; start it with sbatch --array=0-N, or write --shard I/N"
        )
    try:
        task, count, first, step = (int(value or "") for value in found.values())
        number, rest = divmod(task - first, step)
    except (ValueError, ZeroDivisionError):
        number, rest, count = 0, 1, 0
    if rest or not 0 <= number < count:
        raise JobError(
            f"--shard auto: {', '.join(f'{name}={value}' for name, value in found.items())} is not a task of"
            " an array with evenly spaced task numbers; start the job with sbatch --array=FIRST-LAST, or write"
            " --shard I/N"
        )
    return Shard(number, count)
