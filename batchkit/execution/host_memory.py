"""The memory of an engine's process: the limit ``run.max_host_gb``, and the detection of kills by the kernel when memory
runs out."""

from __future__ import annotations

from collections.abc import Callable

from batchkit.engines.faults import Fault

KILLED = "SIGKILL"
UNRELATED = 1000  # after this many answers, two events count as unrelated


class HostMemory:
    """The memory of the newest engine, compared with the limit.

    - ``limit_gb``: None for no limit.
    - ``say``: called if a restart would not help.
    """

    def __init__(self, limit_gb: float | None, say: Callable[[str], None]) -> None:
        self._limit_gb, self._say = limit_gb, say
        self._at_start_gb: float | None = None
        # Answers since the last restart because of memory, and since the last unexplained kill.
        self._n_answers = self._since_kill = UNRELATED

    def begin(self) -> None:
        """Note that a new engine was opened."""
        self._at_start_gb = None

    def note_answers(self, n_answers: int) -> None:
        self._n_answers += n_answers
        self._since_kill += n_answers

    def judged(self, fault: Fault) -> Fault:
        """Return ``fault``. The second unexplained kill in a row is returned as out of memory.

        The reason is that a person seldom kills an engine twice, and that not every host reports kills by its kernel.
        Two kills are in a row if there were no other death and fewer than ``UNRELATED`` answers in between.
        """
        comes_again = self._since_kill < UNRELATED
        self._since_kill = 0 if fault.type == KILLED else UNRELATED
        if not (fault.is_unexplained_kill and comes_again):
            return fault
        return Fault("oom", fault.type, "killed by another process again; treated as out of memory")

    def excess(self, gb: float) -> str:
        """Return why the engine must be restarted; "" if it need not be. ``gb``: GiB in use, 0 if unknown."""
        limit = self._limit_gb
        if limit is None or not gb:
            return ""
        held = f"{gb:.1f} GiB (run.max_host_gb = {limit:g})"
        if self._at_start_gb is None:
            self._at_start_gb = gb
            if gb > limit:
                self._say(
                    f"a new engine already uses {held}: a restart would not help; raise run.max_host_gb"
                )
        return f"the engine's process uses {held}" if self._at_start_gb <= limit < gb else ""

    def note_restart(self) -> bool:
        """Note a restart because of ``excess``. Return whether the last one was so recent that the batch must be too
        large."""
        is_recent = self._n_answers < UNRELATED
        self._n_answers = 0
        return is_recent
