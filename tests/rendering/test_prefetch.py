"""Rows are rendered ahead of the engine, out of order, and never more of them than fit."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from batchkit.errors import InputError, TemplateError
from batchkit.rendering.held_media import HeldMedia, Holders
from batchkit.rendering.prefetch import Prefetch
from batchkit.types import Completion, Request, Row

LONG_S = 60.0  # nothing here takes long: this only ends a test that would hang
SHORT_S = 0.2  # how long to look for what must not happen
MIB = 2**20


def rendered(row: Row, media_bytes: int = 0) -> Request:
    return Request(row, None, row.id, {}, "", 1, media_bytes)


def some_rows(count: int) -> Iterator[Row]:
    return (Row(index, str(index), {}) for index in range(count))


def prefetch(
    rows: Iterator[Row], render: Callable[[Row], Request | Completion] = rendered, **limits: Any
) -> closing[Prefetch]:
    held = HeldMedia(limits.pop("max_bytes", 2**30), limits.pop("holders", None))
    defaults = {"threads": 2, "ahead": 8, "at_once": 1}
    return closing(Prefetch(rows, render, held=held, **{**defaults, **limits}))


def take(queue: Prefetch) -> Request:
    found = queue.get(LONG_S)
    assert isinstance(found, Request)
    return found


class Counted:
    """Rows that count how many of them were read, and can be waited for."""

    def __init__(self, count: int) -> None:
        self._rows = some_rows(count)
        self._changed = threading.Condition()
        self.read = 0

    def __iter__(self) -> Iterator[Row]:
        return self

    def __next__(self) -> Row:
        row = next(self._rows)
        with self._changed:
            self.read += 1
            self._changed.notify_all()
        return row

    def reach(self, count: int, timeout_s: float = LONG_S) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.read >= count, timeout_s)


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_every_row_comes_exactly_once(threads: int) -> None:
    with prefetch(some_rows(500), threads=threads) as queue:
        assert sorted(take(queue).row.index for _ in range(500)) == list(range(500))
        assert queue.get(LONG_S) is None
        assert queue.exhausted


@pytest.mark.parametrize(("threads", "ahead"), [(1, 1), (1, 5), (4, 5)])
def test_no_more_rows_are_read_ahead_than_asked_for(threads: int, ahead: int) -> None:
    rows = Counted(1000)
    with prefetch(rows, threads=threads, ahead=ahead) as queue:
        for taken in range(5):
            assert rows.reach(taken + ahead)
            assert not rows.reach(taken + ahead + threads, SHORT_S / 2)
            take(queue)


def test_no_row_is_begun_while_the_held_pixels_reach_the_bound() -> None:
    rows = Counted(1000)
    with prefetch(rows, lambda row: rendered(row, 40), threads=1, max_bytes=100) as queue:
        held = [take(queue) for _ in range(3)]  # 40, 80, 120: the third one passed the bound
        assert queue.get(SHORT_S) is None, "handed out is still held"
        assert rows.read == 3
        assert not queue.exhausted
        queue.release(held.pop())
        held.append(take(queue))
        assert queue.get(SHORT_S) is None
        assert rows.read == 4


def test_each_thread_passes_the_bound_by_one_row_at_most() -> None:
    threads, rows = 4, Counted(1000)
    together = threading.Barrier(threads)

    def render(row: Row) -> Request:
        if row.index < threads:
            together.wait(LONG_S)  # all have begun before one counts
        return rendered(row, 100)

    with prefetch(rows, render, threads=threads, max_bytes=100) as queue:
        held = [take(queue) for _ in range(threads)]
        assert not rows.reach(threads + 1, SHORT_S)
        for request in held[1:]:
            queue.release(request)
        assert queue.get(SHORT_S) is None, "the one that is left reaches the bound alone"
        queue.release(held[0])
        assert take(queue).row.index == threads


def test_all_threads_find_the_end_of_rows_with_pixels() -> None:
    """Those that found it first begin no row, whose pixels the others would wait for."""
    with prefetch(some_rows(9), lambda row: rendered(row, 60), threads=4, max_bytes=100) as queue:
        for _ in range(9):
            queue.release(take(queue))
        assert queue.get(5) is None
        assert queue.exhausted


def test_runs_of_one_process_share_the_bound() -> None:
    """As the batches of ``batchkit serve`` do. A run that has no images, or is over, takes no part of it."""
    holders, rows = Holders(), [Counted(1000), Counted(1000)]

    def queue_of(rows: Counted) -> closing[Prefetch]:
        # With two threads, both may begin a row when one more is allowed.
        limits = {"threads": 1, "max_bytes": 100, "holders": holders}
        return prefetch(rows, lambda row: rendered(row, 10), **limits)

    def reads(number: int, count: int) -> bool:
        return rows[number].reach(count) and not rows[number].reach(count + 1, SHORT_S)

    with prefetch(some_rows(9), holders=holders) as of_texts:
        take(of_texts)
        with queue_of(rows[0]) as first:
            assert take(first)
            assert reads(0, 9), "one is taken, and eight wait"
            with queue_of(rows[1]) as second:
                assert reads(1, 5), "half of the bound, although the first holds 90"
                first.release(take(first))
                assert not rows[0].reach(10, SHORT_S)
                assert take(second)
            for _ in range(4):
                first.release(take(first))
            assert reads(0, 14)


def test_what_was_handed_out_is_let_go_of() -> None:
    """A thread that waits for room would else keep its last row's pixels beyond the bound."""
    gone = [threading.Event(), threading.Event()]

    def picture(index: int, event: threading.Event) -> Image.Image:
        image = Image.new("RGB", (1, 1))
        if index == 0:
            weakref.finalize(image, event.set)
        return image

    def render(row: Row) -> Request:
        part = {"type": "image_pil", "image_pil": picture(row.index, gone[0])}
        return Request(row, [{"role": "user", "content": [part]}], None, {}, "", 1, 100)

    rows = (Row(index, str(index), {"photo": picture(index, gone[1])}) for index in range(5))
    with prefetch(rows, render, threads=1, max_bytes=100) as queue:
        request = take(queue)
        assert len(request.images) == 1
        del request
        assert all(event.wait(5) for event in gone)


def test_slow_row_holds_up_no_other() -> None:
    done = threading.Event()

    def render(row: Row) -> Request:
        if row.index == 0:
            assert done.wait(LONG_S)
        return rendered(row)

    with prefetch(some_rows(100), render) as queue:
        assert sorted(take(queue).row.index for _ in range(99)) == list(range(1, 100))
        assert queue.get(0) is None
        assert not queue.exhausted
        done.set()
        assert take(queue).row.index == 0


def test_row_that_cannot_be_rendered_comes_as_a_failed_completion() -> None:
    def render(row: Row) -> Request | Completion:
        failed = Completion(rendered(row, 10**9), error=TemplateError("no"))
        return failed if row.index % 2 else rendered(row)

    with prefetch(some_rows(10), render, max_bytes=100) as queue:
        found = [queue.get(LONG_S) for _ in range(10)]
    assert sum(isinstance(one, Completion) for one in found) == 5, "and holds no pixels"


def broken_rows(count: int) -> Iterator[Row]:
    yield from some_rows(count)
    raise InputError("rows.csv: broken from here on")


@pytest.mark.parametrize("at_once", [1, 7])
@pytest.mark.parametrize("threads", [1, 4])
def test_broken_source_is_raised_after_the_rows_before_it(threads: int, at_once: int) -> None:
    with prefetch(broken_rows(20), threads=threads, at_once=at_once) as queue:
        assert sorted(take(queue).row.index for _ in range(20)) == list(range(20))
        for _ in range(2):
            with pytest.raises(InputError, match="broken from here on"):
                queue.get(LONG_S)
        assert not queue.exhausted


def test_broken_source_waits_for_a_row_that_is_still_rendered() -> None:
    failed, go_on = threading.Event(), threading.Event()

    def rows() -> Iterator[Row]:
        yield from some_rows(1)
        failed.set()
        raise InputError("broken")

    def render(row: Row) -> Request:
        assert go_on.wait(LONG_S)
        return rendered(row)

    with prefetch(rows(), render, threads=2) as queue:
        assert failed.wait(LONG_S)
        assert queue.get(SHORT_S) is None
        go_on.set()
        assert take(queue).row.index == 0
        with pytest.raises(InputError, match="broken"):
            queue.get(LONG_S)


@pytest.mark.parametrize(("media_bytes", "begun"), [(0, 1 + 8), (1, 1 + 1)])
def test_a_thread_takes_several_rows_only_where_they_have_no_images(
    media_bytes: int, begun: int
) -> None:
    """Else the others would wait until one thread has decoded them all."""
    rows, go_on = Counted(100), threading.Event()

    def render(row: Row) -> Request:
        assert row.index == 0 or go_on.wait(LONG_S)
        return rendered(row, media_bytes)

    with prefetch(iter(rows), render, threads=1, ahead=100, at_once=8) as queue:
        assert take(queue).row.index == 0
        assert rows.reach(begun)
        assert not rows.reach(begun + 1, SHORT_S)
        go_on.set()


def test_bug_in_rendering_is_not_swallowed() -> None:
    def render(row: Row) -> Request:
        raise ZeroDivisionError("a bug")

    with prefetch(some_rows(5), render) as queue, pytest.raises(ZeroDivisionError, match="a bug"):
        queue.get(LONG_S)


def render_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("render-")}


def test_close_stops_threads_that_wait_for_room() -> None:
    before, rows = render_threads(), Counted(1000)
    with prefetch(rows, threads=4, ahead=1):
        assert rows.reach(1)
        assert len(render_threads() - before) == 4
    assert render_threads() <= before
    read = rows.read
    assert read < 1000


# Memory, measured: images of 4 megapixels, in a process of its own

THREADS = 4
DECODED_BYTES = 4 * 4_000_000  # one of them in full size
DECODING_BYTES = 2 * DECODED_BYTES  # the one being made, and what it is made from
MARGIN_BYTES = 24 * MIB  # malloc keeps some of what was freed

PROCESS = """
import json, sys
from pathlib import Path
from batchkit import JobConfig, ProductionBatchProcessor
from batchkit.rendering.renderer import PromptRenderer
from batchkit.types import Row

peaks = []  # before the run, at its row 200, after it

def peak():
    # Not ru_maxrss: a process starts with that of its parent, here all of pytest's.
    status = Path("/proc/self/status").read_text()
    peaks.append(int(status.partition("VmHWM:")[2].split()[0]) * 1024)

def rows():
    for number in range(2000):
        if number == 200:
            peak()
        yield {"file": f"{number % 20}"}

job = JobConfig(**json.loads(sys.argv[1]))
first = Row(0, "0", {"file": "0"})
PromptRenderer(job).render(first)  # what is imported on use is imported now
peak()
summary = ProductionBatchProcessor(job, quiet=True).process(rows())
peak()
print(json.dumps({"peaks": peaks, "ok": summary.ok}))
"""


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty images of 4 megapixels: JPEG, two of them PNG."""
    folder = tmp_path_factory.mktemp("photos")
    for number in range(20):
        image = Image.new("L", (2000, 2000), 10 * number)
        image.paste(255, (100, 100, 900, 900))
        image.save(folder / str(number), "PNG" if number % 10 == 9 else "JPEG", quality=60)
    return folder


@pytest.mark.release
def test_memory_stays_flat_over_thousands_of_large_images(photos: Path, tmp_path: Path) -> None:
    """Were the pixels kept, the last 1,800 rows would add 430 MiB."""
    held = 16 * MIB
    job: dict[str, Any] = {
        "prompt": {"user": "What is it?", "images": ["{{ file }}"]},
        "media": {"root": str(photos), "max_pixels": 62_500, "max_memory_bytes": held},
        "engine": {"kind": "dry-run", "options": {"latency_s": 0.01}},
        "run": {"render_threads": THREADS},
        "output": {"dir": str(tmp_path)},
    }
    command = [sys.executable, "-c", PROCESS, json.dumps(job)]
    found = json.loads(subprocess.check_output(command, text=True, timeout=240).splitlines()[-1])
    before, early, late = found["peaks"]
    print([f"{peak / MIB:.0f} MiB" for peak in found["peaks"]])
    assert found["ok"] == 2000
    assert late - early < MARGIN_BYTES
    assert late - before < held + THREADS * DECODING_BYTES + MARGIN_BYTES
