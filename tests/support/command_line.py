"""The command line in this process."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from batchkit.cli import cli


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> dict[str, Any]:
        """Its one line on stdout."""
        (line,) = self.stdout.splitlines()
        found: dict[str, Any] = json.loads(line)
        return found

    def ok(self) -> Ended:
        """Itself, once its exit code is 0."""
        assert self.exit_code == 0, self.stderr
        return self

    def refused(self, exit_code: int = 2) -> str:
        """What it says on stderr, once it has this exit code."""
        assert self.exit_code == exit_code, self.stderr
        return self.stderr


def batchkit(*args: str | Path) -> Ended:
    result = CliRunner().invoke(
        cli, list(map(str, args)), catch_exceptions=False, prog_name="batchkit"
    )
    return Ended(result.exit_code, result.stdout, result.stderr)
