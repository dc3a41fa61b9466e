"""An input that changes while a run reads it: the run stops, and no row of it is lost or mixed."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchkit.config.loading import load_job, make_job
from batchkit.errors import BrokenInputError, ChangedInputError
from batchkit.execution.processor import ProductionBatchProcessor
from batchkit.sources.input import Input, from_job, watched
from batchkit.types import Row
from tests.support import dry_runs
from tests.support.command_line import Ended, batchkit
from tests.support.dry_runs import LOG
from tests.support.images import BLUE, png
from tests.support.rows import read_jsonl
from tests.support.waiting import until
from tests.support.web import Page, web_server

pytestmark = [pytest.mark.usefixtures("in_an_empty_folder"), pytest.mark.slow]


N = 1500
REQUEUE = "--on-change=requeue"


def rows(word: str, n: int = N) -> list[dict[str, Any]]:
    """Larger together than what is read at once."""
    return [{"key": f"k{i}", "q": f"{word} {i:05} " + "x" * 2000} for i in range(n)]


def encoded(rows: list[dict[str, Any]], suffix: str = ".jsonl") -> bytes:
    lines = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    if suffix == ".parquet":
        buffer = io.BytesIO()
        table = pa.Table.from_pylist(rows)
        pq.write_table(table, buffer, row_group_size=100, compression="none")
        return buffer.getvalue()
    if suffix == ".json":
        return json.dumps(rows).encode()
    if suffix == ".csv":
        return b"key,q\n" + "".join(f"{row['key']},{row['q']}\n" for row in rows).encode()
    return gzip.compress(lines, 1) if suffix == ".gz" else lines


def write_job(path: str = "in.jsonl", latency_s: float = 0.01, **keys: Any) -> None:
    dry_runs.write_job(
        input={"path": path, **keys},
        output={"keep": ["q"]},
        run={"order": "input", "render_threads": 1, "max_in_flight": 64},
        engine={"options": {"latency_s": latency_s}},
    )


def run(*args: str, meanwhile: Callable[[], object] = lambda: None) -> Ended:
    """Run the job; ``meanwhile`` is done once the first rows are answered."""
    before = LOG.stat().st_size if LOG.exists() else 0
    has_ended = threading.Event()

    def change() -> None:
        while not (LOG.exists() and LOG.stat().st_size > before):
            if has_ended.wait(0.002):
                return
        meanwhile()

    thread = threading.Thread(target=change)
    thread.start()
    ended = batchkit("run", "job.toml", *args)
    has_ended.set()
    thread.join()
    return ended


def answered() -> dict[str, str]:
    """What was asked, by id; fails where an id has two records."""
    records = read_jsonl(LOG)
    assert len({record["index"] for record in records}) == len(records)
    return {record["id"]: record["fields"]["q"] for record in records}


def overwrite(path: Path, content: bytes, offset: int = 0) -> None:
    """In place: a process that has the file open sees it."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def append(path: Path) -> None:
    overwrite(path, encoded(rows("more", 50)), path.stat().st_size)


CHANGES: dict[str, Callable[[Path], object]] = {
    "shrunk": lambda path: os.truncate(path, len(encoded(rows("old")[:1000]))),
    "cut inside a line": lambda path: os.truncate(path, len(encoded(rows("old")[:1000])) - 700),
    "rewritten": lambda path: overwrite(path, encoded(rows("new"))),
    "rewritten, longer": lambda path: overwrite(path, encoded(rows("longer"))),
    "appended to": append,
    "touched": os.utime,
    "replaced": lambda path: path.with_name("x").rename(path),
    "deleted": lambda path: path.unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_input_stops_the_run_and_a_requeue_sorts_it_out(change: str) -> None:
    path, old = Path("in.jsonl"), encoded(rows("old"))
    path.write_bytes(old)
    Path("x").write_bytes(encoded(rows("new")))
    write_job(id="key")
    ended = run(meanwhile=lambda: CHANGES[change](path))
    assert ended.exit_code == 1
    assert "in.jsonl: changed while the run read it" in ended.stderr
    assert REQUEUE.replace("=", " ") in ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1])["exit"] == 1

    path.write_bytes(old)  # even then some answers may be to the rows of the other
    again = run()
    assert again.exit_code == 2
    assert "in.jsonl" in again.stderr
    assert run(REQUEUE).exit_code == 0
    assert answered() == {row["key"]: row["q"] for row in rows("old")}
    assert run().exit_code == 0


def test_image_that_was_another_for_a_while_is_asked_about_again() -> None:
    """Also if all rows have been read before it changes: they are opened later. Its row has the hash
    of what it was at the beginning, and is now."""
    Path("photos").mkdir()
    paths = [Path(f"photos/{number}.png") for number in range(60)]
    for path in paths:
        path.write_bytes(png())
    dry_runs.write_job(
        input={"path": "photos"},
        prompt={"images": ["{{ path }}"], "user": "Which colour is it?"},
        run={"order": "input", "render_threads": 1, "max_in_flight": 16},
        engine={"options": {"latency_s": 0.1}},
    )
    ended = run(meanwhile=lambda: overwrite(paths[0], png(BLUE)))
    assert ended.exit_code == 1
    assert "photos/0.png: changed while the run read it" in ended.stderr
    answered = len(read_jsonl(LOG))
    paths[0].write_bytes(png())
    again = run(REQUEUE)
    assert again.exit_code == 0
    assert f"{answered - 1:,} records kept, 1 rows to run again" in again.stderr


def keep_times(path: Path) -> None:
    times = path.stat().st_mtime_ns
    overwrite(path, encoded(rows("new")))
    os.utime(path, ns=(times, times))


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def rewrite(path: Path) -> None:
    overwrite(path, encoded(rows("new"), path.suffix))


SOME = {"key": [f"k{i}" for i in range(N)]}
OF_FILES: list[tuple[str, Callable[[Path], None], dict[str, Any], str]] = [
    *((f"in{suffix}", halve, {}, "bytes →") for suffix in (".csv", ".jsonl.gz", ".json")),
    ("in.parquet", rewrite, {}, "changed"),
    ("in.jsonl", keep_times, {}, "its content"),
    *(("in.jsonl", rewrite, keys, "it was") for keys in ({"limit": 1400}, {"where": SOME})),
    ("in.jsonl", rewrite, {"shard": "0/2"}, "it was written to, its size is the same"),
]


@pytest.mark.parametrize(("name", "change", "keys", "how"), OF_FILES)
def test_change_is_noticed_in_any_format_and_whichever_rows_are_read(
    name: str, change: Callable[[Path], None], keys: dict[str, Any], how: str
) -> None:
    path = Path(name)
    path.write_bytes(encoded(rows("old"), path.suffix))
    write_job(name, **keys)
    ended = run(meanwhile=lambda: change(path))
    assert ended.exit_code == 1
    assert f"{name}: changed while the run read it" in ended.stderr
    assert how in ended.stderr


def test_touched_links_and_modes_are_no_change() -> None:
    path = Path("in.jsonl")
    path.write_bytes(encoded(rows("old")))
    write_job(latency_s=0)
    assert run(meanwhile=lambda: path.chmod(0o640)).exit_code == 0


def test_changed_second_file_is_named_and_the_first_is_not() -> None:
    for name in ("part-0.jsonl", "part-1.jsonl"):
        Path(name).write_bytes(encoded(rows(name)))
    write_job("part-*.jsonl")
    ended = run(meanwhile=lambda: os.utime("part-1.jsonl"))
    assert ended.exit_code == 1
    assert "part-1.jsonl: changed while the run read it" in ended.stderr
    assert "part-0.jsonl" not in ended.stderr


def test_empty_file_among_others_is_refused_before_anything_is_answered() -> None:
    """Its removal would be a change of the input, once rows are answered."""
    Path("part-0.csv").write_bytes(encoded(rows("old", 3), ".csv"))
    Path("part-1.csv").touch()
    write_job("part-*", id="key")
    ended = run()
    assert (ended.exit_code, LOG.exists()) == (2, False)
    assert "part-1.csv: the file is empty; write at least one row into it" in ended.stderr
    Path("part-1.csv").unlink()
    assert run().exit_code == 0


RENAMED = {  # its bytes stay the same; rows of another format are others
    "in.txt": ("in.jsonl", ['{"q": "one"}', '{"q": "two"}'], "prompts"),
    "in.tsv": ("in.csv", ["q", "one\tand", "two"], "tsv"),
    "moved.ndjson": ("in.jsonl", ['{"q": "one"}', '{"q": "two"}'], None),
}


@pytest.mark.parametrize("after", RENAMED)
def test_file_renamed_to_another_format_is_another_input(after: str) -> None:
    before, lines, read_as = RENAMED[after]
    Path(before).write_text("\n".join(lines) + "\n")
    write_job(before)
    assert run("--set", "input.limit=1").exit_code == 0
    Path(before).rename(after)
    write_job(after)
    ended = run()
    assert (ended.exit_code, len(answered())) == ((0, 2) if read_as is None else (2, 1))
    if read_as is not None:
        assert f"{after}: none → " in ended.stderr
        assert f"read as {read_as}" in ended.stderr


@pytest.mark.parametrize(
    "keys", [{}, {"id": "key"}, {"shard": "0/1"}, {"where": {"q": ["a", "b"]}}]
)
def test_file_that_comes_and_goes_after_the_input_was_looked_at_is_not_read(
    keys: dict[str, Any],
) -> None:
    """Else its rows would be answered, and shift the index of all rows behind them."""
    Path("part-0.jsonl").write_text('{"key": "0", "q": "a"}\n')
    Path("part-2.jsonl").write_text('{"key": "2", "q": "b"}\n')
    write_job("part-*.jsonl", **keys)
    source = from_job(load_job(Path("job.toml")))
    passing = Path("part-1.jsonl")
    passing.write_text('{"custom_id": "1", "body": {}, "q": "a"}\n')
    found, size = list(source.read(lambda index: False)), source.size()
    passing.unlink()
    assert not source.changes(True)
    assert [(row.index, row.fields["q"]) for row in found] == [(0, "a"), (1, "b")]
    assert [row.id for row in found] == (["0", "2"] if keys.get("id") else ["0", "1"])
    assert size == 2


def test_change_before_a_stop_for_another_reason_is_noticed_by_the_next_start() -> None:
    path, old = Path("in.jsonl"), encoded(rows("old"))
    path.write_bytes(old)
    write_job()
    change = lambda: overwrite(path, b"{" * 2000, 1_500_000)  # noqa: E731
    assert run("--set", "run.fail_on_error=0", meanwhile=change).exit_code == 1
    path.write_bytes(old)
    assert run().exit_code == 2
    assert run(REQUEUE).exit_code == 0
    assert answered() == {str(i): row["q"] for i, row in enumerate(rows("old"))}


@pytest.mark.parametrize("n", [60, N])
def test_changed_file_of_all_prompts_stops_the_run(n: int) -> None:
    """Also if it changes when all rows have been read, and is changed back later."""
    guide = Path("guide.txt")
    guide.write_text("one")
    Path("in.jsonl").write_bytes(encoded(rows("old", n)))
    write_job(latency_s=0.05)
    job = Path("job.toml").read_text().replace('"{{ q }}"', '"{{ guide }} {{ q }}"')
    Path("job.toml").write_text(job.replace("[prompt]", '[prompt]\ntexts = {guide = "guide.txt"}'))
    found = run(meanwhile=lambda: guide.write_text("two"))
    assert found.exit_code == 1
    assert "prompt.texts.guide: changed while the run read it" in found.stderr
    guide.write_text("one")
    found = run()
    assert found.exit_code == 2
    assert 'prompt.files: {"prompt.texts.guide":"changing"} → ' in found.stderr
    assert run(REQUEUE).json["skipped"] == 0
    assert run().json["skipped"] == n


def test_retry_of_an_input_that_changes_stops() -> None:
    path = Path("in.jsonl")
    path.write_bytes(encoded(rows("old")))
    write_job()
    assert run().exit_code == 0
    LOG.write_text(re.sub("dry-run: no model answered row [0-9]+", "", LOG.read_text()))
    LOG.with_name("checkpoint.json").unlink()
    size = LOG.stat().st_size

    def meanwhile() -> None:
        until(lambda: LOG.stat().st_size != size)
        os.utime(path)

    thread = threading.Thread(target=meanwhile)
    thread.start()
    processor = ProductionBatchProcessor(Path("job.toml"), quiet=True)
    with pytest.raises(BrokenInputError, match=r"in\.jsonl: changed while the run read it"):
        processor.retry(dict.fromkeys(range(N), 1))
    thread.join()


def test_rows_to_retry_that_are_not_in_the_input_are_missed() -> None:
    Path("in.jsonl").write_bytes(encoded(rows("old", 5)))
    write_job()
    processor = ProductionBatchProcessor(Path("job.toml"), quiet=True)
    with pytest.raises(
        BrokenInputError, match="2 of the 3 rows to retry are not in the input"
    ) as stop:
        processor.retry({3: 0, 5: 0, 6: 0})
    assert stop.value.exit_code == 1


def test_input_is_looked_at_while_it_is_read() -> None:
    looks: list[bool] = []
    clock = iter(range(0, 1000, 2))

    def changes(thorough: bool) -> dict[str, str]:
        looks.append(thorough)
        return {"in.jsonl": "10 bytes → 9 bytes"} if len(looks) == 3 else {}

    found = (Row(index, str(index), {}) for index in range(100))
    source = Input([], lambda skip: found, lambda skip: found, lambda: 100, False, changes)
    read = watched(found, source, now=lambda: float(next(clock)))
    with pytest.raises(ChangedInputError, match="10 bytes → 9 bytes"):
        assert not [row for row in read if row.index > 20]
    assert looks == [False, False, False]


def test_changed_object_of_a_remote_store_stops_the_run() -> None:
    store, url = fsspec.filesystem("memory"), "memory://changed/in.jsonl"
    store.pipe(url, encoded(rows("old")))
    write_job(url)
    ended = run(meanwhile=lambda: store.pipe(url, encoded(rows("new"))))
    store.rm(url)
    assert ended.exit_code == 1
    assert f"{url}: changed while the run read it" in ended.stderr


class Export(Page):
    """A page of rows that is made when it is asked for: it has no ETag and no time, and may have no length."""

    content, has_length = b"", True

    def do_GET(self) -> None:
        length = {"Content_Length": len(self.content)} if self.has_length else {}
        self.reply(200, self.content, **length)

    do_HEAD = do_GET


def test_file_at_a_url_that_ends_before_its_length_stops_the_run() -> None:
    """A range of bytes may be answered with fewer of them; fsspec takes none for the end of the file."""
    content = encoded(rows("old", 20))

    class Short(Page):
        def do_GET(self) -> None:
            first = int((self.headers.get("Range") or "bytes=0-")[6:].partition("-")[0])
            part = content[first : len(content) // 2]
            is_whole = self.command == "HEAD" or "Range" not in self.headers
            self.reply(
                206 if "Range" in self.headers else 200,
                part,
                Content_Range=f"bytes {first}-{len(content) - 1}/{len(content)}",
                Accept_Ranges="bytes",
                ETag="one",
                Content_Length=len(content if is_whole else part),
            )

        do_HEAD = do_GET

    with web_server(Short) as url:
        write_job(f"{url}/in.jsonl")
        ended = run()
    place = f"at byte {len(content) // 2:,} of {len(content):,}"
    assert ended.exit_code == 1
    assert f"can't be read: the file ended {place}" in ended.stderr


@pytest.mark.parametrize("has_length", [True, False])
def test_changed_page_of_which_the_server_says_nothing_is_another_input(has_length: bool) -> None:
    page: Any = type("Page", (Export,), {"has_length": has_length})
    with web_server(page) as address:
        url = f"{address}/in.jsonl"
        page.content = encoded(rows("old", 20))
        write_job(url)
        assert run("--set", "input.limit=5").exit_code == 0
        page.content = encoded(rows("new", 20))
        ended = run()
        assert (ended.exit_code, len(answered())) == (2, 5)
        assert f"input {url}: " in ended.stderr
        page.content = encoded(rows("old", 20))
        assert run().exit_code == 0
    assert [*answered().values()] == [row["q"] for row in rows("old", 20)]


def test_member_of_a_zip_archive_is_compared_by_its_content() -> None:
    def write(word: str, also: str) -> None:
        with zipfile.ZipFile("c.zip", "w") as archive:
            archive.writestr("in.jsonl", encoded(rows(word, 20)))
            archive.writestr("other.txt", also)

    write("old", "one")
    write_job(f"zip://*.jsonl::{Path('c.zip').absolute()}")
    assert run("--set", "input.limit=5").exit_code == 0
    write("new", "one")
    ended = run()
    assert (ended.exit_code, len(answered())) == (2, 5)
    assert "input zip://in.jsonl::" in ended.stderr
    write("old", "two")
    assert run().exit_code == 0
    assert len(answered()) == 20


@pytest.mark.parametrize("how", ["another before", "another meanwhile", "shorter"])
def test_list_that_changes_while_it_is_run_stops_the_run(how: str) -> None:
    job = make_job({"name": "a", "engine": {"kind": "dry-run"}}, "test")

    class Rows(list[dict[str, str]]):
        n_passes = 0

        def __iter__(self) -> Any:
            """Pass 3 is the one that the run reads."""
            self.n_passes += 1
            if how == "shorter" and self.n_passes == 3:
                del self[2:]
            is_other = self.n_passes == {"another before": 2, "another meanwhile": 3}.get(how)
            for row in super().__iter__():
                yield {"prompt": "other"} if is_other else row

    with pytest.raises(BrokenInputError, match=r"rows from Python.*changed while the run read"):
        ProductionBatchProcessor(job, quiet=True).process(Rows([{"prompt": "hi"}] * 3))
