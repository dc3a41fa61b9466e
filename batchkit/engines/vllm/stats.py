"""The scheduler's load, from the statistics of vLLM's engine."""

from __future__ import annotations

from typing import Any

from batchkit.engines.base import EngineLoad


def follow_stats(engine: Any) -> Stats:
    """Replace vLLM's own stat loggers, whose Prometheus counters have no reader, by ours."""
    stats = Stats()
    engine.logger_manager.stat_loggers = [stats]
    return stats


class Stats:
    """A stat logger of vLLM's engine that keeps the last step's statistics."""

    def __init__(self) -> None:
        self.load = EngineLoad(0, 0, 0.0, 0)

    def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
        if scheduler_stats is not None:
            self.load = EngineLoad(
                scheduler_stats.num_running_reqs,
                scheduler_stats.num_waiting_reqs,
                scheduler_stats.kv_cache_usage,
                0,
            )

    def log(self) -> None: ...

    def log_engine_initialized(self) -> None: ...

    def record_sleep_state(self, *_: Any) -> None: ...
