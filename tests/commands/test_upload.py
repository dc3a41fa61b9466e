"""Exports that are sent: ``output.upload``, ``export --upload``; against real HTTP servers."""

from __future__ import annotations

import hashlib
import re
import socket
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pyarrow.parquet as pq
import pytest

from batchkit.commands.export.upload import TRIES, send
from batchkit.errors import JobError, UploadError
from tests.support.command_line import Ended, batchkit
from tests.support.dry_runs import RUN, job, prepare, run, verify, write_job
from tests.support.web import Page, web_server

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

SECRETS = ("AKIAEXAMPLEKEY", "5ec4e7" * 8, "T0kenT0ken%2Bplus", "T0kenT0ken+plus")
QUERY = (
    "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AKIAEXAMPLEKEY%2F20261127%2Fus-east-1%2Fs3%2Faws4_request"
    f"&X-Amz-Expires=3600&X-Amz-Signature={'5ec4e7' * 8}&X-Amz-Security-Token=T0kenT0ken%2Bplus&sig=T0kenT0ken%2Bplus"
)


class Store(Page):
    """Takes files. ``answers``: what the next requests get (0: a reset after some bytes); then 200."""

    answers: list[tuple[int, bytes, dict[str, str]]] = []  # noqa: RUF012 - set by each test
    taken: list[tuple[str, dict[str, str], int, str]] = []  # noqa: RUF012
    requests: list[str] = []  # noqa: RUF012

    def do_PUT(self) -> None:
        self.requests.append(self.path)
        status, body, headers = self.answers.pop(0) if self.answers else (200, b"", {})
        length = int(self.headers["Content-Length"])
        if status == 0:
            self.rfile.read(min(length, 1000))
            linger = struct.pack("ii", 1, 0)  # a close is a reset
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.connection.shutdown(socket.SHUT_RD)
            self.close_connection = True
            return
        digest, left = hashlib.sha256(), length
        while left and (piece := self.rfile.read(min(left, 65536))):
            digest.update(piece)
            left -= len(piece)
        if status == 200:
            self.taken.append((self.path, dict(self.headers), length - left, digest.hexdigest()))
        self.reply(status, body, **headers, Content_Length=len(body))

    def do_HEAD(self) -> None:
        """As stores do it with an address that is signed for GET."""
        self.reply(403, b"")

    def do_GET(self) -> None:
        self.requests.append(self.path)
        body = Path("in.jsonl").read_bytes()
        self.reply(200, body, Content_Length=len(body), Accept_Ranges="none")


@pytest.fixture
def store() -> Iterator[str]:
    """Its address."""
    Store.answers, Store.taken, Store.requests = [], [], []
    with web_server(Store) as url:
        yield url


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def is_masked(*texts: str) -> bool:
    """No secret is in these, nor in any file below the working directory but the job file."""
    files = [file for file in Path("output").rglob("*") if file.is_file()]
    found = [*texts, *(file.read_bytes().decode("latin-1") for file in files)]
    return not any(secret in text for secret in SECRETS for text in found)


def upload(address: str, *formats: str) -> dict[str, Any]:
    return {"export": list(formats or ["parquet"]), "upload": address}


def test_a_run_sends_its_export_and_no_file_has_the_signature(store: str) -> None:
    prepare(3, output=upload(f"{store}/a/answers.parquet?{QUERY}"))
    found = run()
    assert found.exit_code == 0
    ((path, headers, size, digest),) = Store.taken
    assert path == f"/a/answers.parquet?{QUERY}"
    table = RUN / "results.parquet"
    assert (size, digest) == (table.stat().st_size, digest_of(table))
    assert "Transfer-Encoding" not in headers
    assert pq.read_table(table).num_rows == 3
    assert "batchkit: sends exports to 127.0.0.1" in found.stderr
    assert (
        f"sending {table.resolve()} ({size:,} bytes) to {store}/a/answers.parquet?…" in found.stderr
    )
    assert is_masked(found.stdout, found.stderr)
    assert f"{store}/a/answers.parquet?X-Amz-Algorithm=***&" in (RUN / "job.toml").read_text()


def test_an_address_given_on_the_command_line_is_masked_too(store: str) -> None:
    prepare(2)
    token = "Ab1" * 16
    setting = f"output.upload={store}/p/{token}/a.parquet?{QUERY}"
    Store.answers = [(403, f"no {SECRETS[3]} {token}".encode(), {})]
    found = run("--set", setting, "--set", 'output.export=["parquet"]')
    again = batchkit("export", RUN, "--csv", "--upload", f"{store}/a.csv?{QUERY}")
    assert (found.exit_code, again.exit_code) == (0, 0)
    assert [path for path, *_ in Store.taken] == [f"/a.csv?{QUERY}"]
    assert "answered 403 Forbidden: no *** ***" in found.stderr
    assert is_masked(found.stderr, again.stderr, again.stdout)
    assert token not in found.stderr + (RUN / "manifest.json").read_text()
    assert f"{store}/p/***/a.parquet?X-" in (RUN / "job.toml").read_text()


def test_rows_from_one_signed_address_and_answers_to_another(store: str) -> None:
    prepare(3, input={"path": f"{store}/in.jsonl?{QUERY}"}, output=upload(f"{store}/out?{QUERY}"))
    found = run()
    assert (found.exit_code, found.json["ok"]) == (0, 3)
    asked = {urlsplit(path) for path in Store.requests if path.startswith("/in.jsonl")}
    assert [parse_qs(url.query) for url in asked] == [parse_qs(QUERY)]  # aiohttp writes %2F as /
    assert [path for path, *_ in Store.taken] == [f"/out?{QUERY}"]
    assert is_masked(found.stdout, found.stderr)


FAULTS = [
    ([(503, b"slow down", {})] * 2, 3, "answered 503 Service Unavailable: slow down; next try in "),
    ([(429, b"", {"Retry_After": "1"})], 2, "answered 429 Too Many Requests; next try in "),
    ([(0, b"", {})], 2, "the connection failed ("),
]


@pytest.mark.parametrize(("answers", "requests", "said"), FAULTS, ids=["503", "429", "reset"])
def test_what_may_pass_is_tried_again(store: str, answers: Any, requests: int, said: str) -> None:
    Path("big").write_bytes(bytes(range(256)) * 20_000)
    Store.answers, lines = [*answers], list[str]()
    (sent,) = send([Path("big")], f"{store}/big?{QUERY}", lines.append)
    assert len(Store.requests) == requests
    assert [taken[2:] for taken in Store.taken] == [(5_120_000, digest_of(Path("big")))]
    assert said in "\n".join(lines)
    assert (sent.url, sent.bytes) == (f"{store}/big", 5_120_000)
    assert is_masked(*lines)


@pytest.mark.parametrize("status", [500, 0])
def test_a_server_that_stays_down_is_given_up(store: str, status: int) -> None:
    Path("a").write_bytes(b"a" * 100_000)
    Store.answers, pauses = [(status, b"", {})] * TRIES, list[float]()
    with pytest.raises(UploadError, match=rf"not sent to {store}/a: .*\({TRIES} tries\)$"):
        [*send([Path("a")], f"{store}/a", lambda _: None, sleep=pauses.append)]
    assert len(Store.requests) == TRIES == len(pauses) + 1
    assert pauses[-1] > pauses[0]


def test_a_name_that_no_host_can_have_is_one_message() -> None:
    Path("a").write_bytes(b"a")
    with pytest.raises(UploadError, match=r"a: not sent to https://.*/a: Invalid IDNA hostname"):
        [*send([Path("a")], "https://u\u0308\u0301-.example/a", lambda _: None)]


REFUSED = [
    ((403, b"<Error>\n" + b"x" * 500, {}), "answered 403 Forbidden: <Error> " + "x" * 192 + "\n"),
    (
        (307, b"", {"Location": f"http://127.0.0.1:9/b?{QUERY}"}),
        "answered 307, moved to http://127.0.0.1:9/b?…; redirects are not followed",
    ),
]


@pytest.mark.parametrize(("answer", "said"), REFUSED, ids=["403", "redirect"])
def test_a_refusal_is_said_once_and_the_run_stays_what_it_is(
    store: str, answer: Any, said: str
) -> None:
    Store.answers = [answer] * 2
    prepare(3, output=upload(f"{store}/a.parquet?{QUERY}"))
    found = run()
    log = (RUN / "results.jsonl").read_bytes()
    assert (found.exit_code, found.json["exit"]) == (0, 0)
    assert f"batchkit: error: {(RUN / 'results.parquet').resolve()}: not sent to" in found.stderr
    assert said in found.stderr
    command = f"To send them again: batchkit export {RUN.resolve()} --parquet ("
    assert command in found.stderr
    assert len(Store.requests) == 1
    again = batchkit("export", RUN, "--parquet")
    assert again.exit_code == 1
    assert said in again.stderr
    assert batchkit("export", RUN, "--parquet").exit_code == 0
    assert len(Store.taken) == 1
    assert (RUN / "results.jsonl").read_bytes() == log
    assert verify()["damage"] is None
    assert is_masked(found.stderr, again.stderr)


def test_failed_rows_decide_the_exit_code_and_once_retried_are_sent_again(store: str) -> None:
    prepare(2, output=upload(f"{store}/a"), prompt={"user": "{{ gone }}"}, run={"check_rows": 0})
    Store.answers = [(404, b"", {})]
    assert run().exit_code == 3
    assert batchkit("retry-failed", RUN).exit_code == 3
    assert len(Store.taken) == 1


def test_several_files_need_a_place_for_their_names(store: str) -> None:
    address = f"{store}/{{name}}?{QUERY}"
    prepare(2, output=upload(address, "parquet", "safe-csv"))
    found = run()
    assert found.exit_code == 0
    assert sorted(path for path, *_ in Store.taken) == [
        f"/results.csv?{QUERY}",
        f"/results.parquet?{QUERY}",
    ]
    for formats in (("parquet", "safe-csv"), ("openai",)):
        write_job(output=upload(f"{store}/a?{QUERY}", *formats))
        refused = run()
        assert refused.exit_code == 2
        assert refused.stderr.count("\n") == 2  # what it sends, and why it does not
        assert (
            f"{store}/a?…: is one address for several files ({', '.join(formats)})"
            in refused.stderr
        )
    refused = batchkit("export", RUN, "--csv", "a.csv", "--parquet", "--upload", f"{store}/a")
    assert refused.exit_code == 2
    assert not Path("a.csv").exists()
    assert len(Store.taken) == 2


def test_a_large_file_is_sent_in_flat_memory(store: str) -> None:
    piece = b"0123456789abcdef" * 65536
    with Path("large").open("wb") as file:
        file.writelines(piece for _ in range(50))
    tracemalloc.start()
    try:
        [*send([Path("large")], f"{store}/large", lambda _: None)]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    ((_, _, size, digest),) = Store.taken
    assert (size, digest) == (50 * 2**20, digest_of(Path("large")))
    assert peak < 8 * 2**20


def test_variables_are_filled_in_and_stay_out_of_the_run_folder(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(2, output=upload("${STORE}/a.parquet?sv=1&sig=${SAS}"))
    assert "the environment variable STORE is not set" in run().stderr
    monkeypatch.setenv("STORE", store)
    monkeypatch.setenv("SAS", SECRETS[2])
    found = run()
    assert found.exit_code == 0
    assert "batchkit: sends $STORE, $SAS, exports to 127.0.0.1" in found.stderr
    ((path, headers, *_),) = Store.taken
    assert path == f"/a.parquet?sv=1&sig={SECRETS[2]}"
    assert headers["x-ms-blob-type"] == "BlockBlob"
    assert is_masked(found.stderr)
    assert "${STORE}/a.parquet?sv=***&sig=${SAS}" in (RUN / "job.toml").read_text()
    assert batchkit("export", RUN, "--parquet").exit_code == 0


def test_an_export_sends_only_what_the_job_asks_for(store: str) -> None:
    prepare(2, output=upload(f"{store}/a.parquet"))
    run()
    found = batchkit("export", RUN, "--csv")
    assert found.exit_code == 0
    assert (
        "csv: not sent, because output.export has only parquet; --upload ADDRESS sends any"
        in found.stderr
    )
    assert len(Store.taken) == 1


def test_a_trial_without_the_model_sends_nothing(store: str) -> None:
    prepare(2, output=upload(f"{store}/a"), engine={"kind": "vllm", "model": "no-model"})
    found = run("--set", "engine.kind=dry-run")
    assert found.exit_code == 0
    assert "sends" not in found.stderr
    assert batchkit("export", "output/a.dry-run", "--parquet").exit_code == 0
    assert not Store.requests


def _foreign(old: str, new: str) -> Ended:
    path = RUN / "job.toml"
    path.write_text(path.read_text().replace(old, new))
    return batchkit("export", RUN, "--parquet")


def test_an_address_is_taken_from_the_users_job_file_only(store: str) -> None:
    prepare(2, output=upload(f"{store}/a?{QUERY}"))
    run()
    write_job(output=upload(f"{store}/b?{QUERY}"))  # signed anew
    assert batchkit("export", RUN, "--parquet").exit_code == 0
    assert [path[:3] for path, *_ in Store.taken] == ["/a?", "/b?"]
    there = "http://localhost" + store.removeprefix("http://127.0.0.1")
    found = _foreign(store, there)
    assert found.exit_code == 0
    assert "output.upload is ignored, because " in found.stderr
    assert "job.toml sets it differently (--trust sends it): sends exports to" in found.stderr
    Path("job.toml").unlink()
    assert "output.upload is ignored, because only " in _foreign("", "").stderr
    trusted = batchkit("export", RUN, "--parquet", "--trust")
    assert trusted.exit_code == 2
    assert "the secret parts of this address are missing" in trusted.stderr
    assert len(Store.taken) == 2


BAD = [
    ("s3://bucket/a", "output.upload: found s3://, expected https://"),
    ("http://example.org/a?sig=5ec4e75ec4e7", "output.upload: found http://example.org, expected"),
    ("https://me:5ec4e75ec4e7@example.org/a", "https://example.org/a has a user name or a"),
    ("https:///a", "output.upload: contains no host"),
    ("https://{name}/a", "output.upload: contains no host"),
    ("https://example.org/a b", "output.upload: expected an address without spaces"),
    ("https://example.org/a#b", "write %23"),
    ("https://example.org:99999/a", "Port out of range"),
    ("https://[::1/a?sig=5ec4e75ec4e7", "Invalid IPv6 URL"),
]


@pytest.mark.parametrize(("address", "problem"), BAD)
def test_an_address_that_nothing_is_sent_to(address: str, problem: str) -> None:
    with pytest.raises(JobError, match=re.escape(problem)) as caught:
        job(output={"upload": address})
    assert "5ec4e7" not in str(caught.value)
    prepare(1)
    run()
    found = batchkit("export", RUN, "--csv", "--upload", address)
    assert found.exit_code == 2
    assert problem.removeprefix("output.upload: ") in found.stderr
    assert "5ec4e7" not in found.stderr
