"""``python -m batchkit``."""

from batchkit.cli import cli

cli(prog_name="batchkit")
