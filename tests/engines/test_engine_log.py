"""engine.log is kept from growing while others print to it."""

from __future__ import annotations

from pathlib import Path

from batchkit.engines.process.launcher import KEPT_BYTES, MOST_BYTES, EngineLog

LINE = "x" * 1023 + "\n"


def test_a_log_that_has_grown_too_large_keeps_its_end(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    path.write_text("of an earlier engine\n")
    log = EngineLog(path)
    with path.open("a") as printing:  # as an engine has it: open all the time, for appending
        printing.write(LINE * (MOST_BYTES // len(LINE)) + "ValueError: before the cut\n")
        printing.flush()
        log.trim()
        assert KEPT_BYTES - 2 * len(LINE) < path.stat().st_size < KEPT_BYTES + 200
        assert log.printed().endswith("ValueError: before the cut\n")
        printing.write("MemoryError: after the cut\n")
        printing.flush()
    assert log.printed().endswith("before the cut\nMemoryError: after the cut\n")
    lines = path.read_text().splitlines()
    assert lines[0] == "[batchkit: engine.log was cut here, to its last 4 MiB]"
    assert set(lines[1:-2]) == {LINE.rstrip()}, "whole lines"


def test_what_an_earlier_engine_printed_is_not_this_ones_after_a_cut(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    path.write_text(LINE * (MOST_BYTES // len(LINE)) + "MemoryError: of an earlier engine\n")
    log = EngineLog(path)
    with path.open("a") as printing:
        printing.write("ValueError: its own\n")
    log.trim()
    assert log.printed() == "ValueError: its own\n"


def test_a_log_of_usual_size_is_left_alone_and_one_that_is_not_there_is_empty(
    tmp_path: Path,
) -> None:
    path = tmp_path / "engine.log"
    log = EngineLog(path)
    log.trim()
    assert (log.size(), log.printed()) == (0, "")
    path.write_text(LINE * 100)
    log.trim()
    assert path.read_text() == LINE * 100
