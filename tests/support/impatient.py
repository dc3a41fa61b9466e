"""The command line, where a stretch of success is ten rows, however long the engine took to start."""

from batchkit.engines import memory_ladder
from batchkit.execution import supervisor


def main() -> None:
    from batchkit.cli import cli

    memory_ladder.STRETCH, supervisor.GROWTH_SHARE = 10, 1e9
    cli()
