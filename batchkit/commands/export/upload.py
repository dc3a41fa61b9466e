"""``output.upload`` and ``export --upload``: send each exported file with one PUT request."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from batchkit.commands import Say
from batchkit.commands.export.outputs import export_of
from batchkit.commands.trust import vouched
from batchkit.config.loading import load_job
from batchkit.config.masking import UPLOAD, masked_text
from batchkit.config.terminal import plain
from batchkit.config.upload import PLACE, address_of, check_address, is_local, shown, url_for
from batchkit.errors import JobError, UploadError
from batchkit.storage.job_toml import job_of_run
from batchkit.storage.runfolder import is_of_run

if TYPE_CHECKING:
    import httpx

TRIES = 6
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_CONNECT_S, _ANSWER_S = 60.0, 300.0  # a store answers after it has saved the whole file
_LONGEST_REASON = 200
_AZURE = {"x-ms-blob-type": "BlockBlob"}  # Azure's store rejects a PUT without it


class Sent(NamedTuple):
    """A file that a server has accepted. ``url`` is its address without the query, which may be secret."""

    file: Path
    url: str
    bytes: int

    def to_json(self) -> dict[str, Any]:
        return {"file": str(self.file), "url": self.url, "bytes": self.bytes}

    def to_text(self) -> str:
        return f"{self.url}: has {self.file.name}, {self.bytes:,} bytes"


class ToSend(NamedTuple):
    """The formats to send, and their address; the address is None if nothing is sent."""

    address: str | None
    formats: Sequence[str]


def address_for(text: str, formats: Sequence[str]) -> str:
    """Check and return the address in ``text``, with environment variables replaced. Call it before any file is
    written.

    Raises:
        JobError: The address is invalid, or has no ``{name}`` although ``formats`` give several files.
    """
    address = address_of(text)
    if PLACE not in address and (
        len(formats) > 1 or any(export_of(name).is_several for name in formats)
    ):
        raise _needs_place(address, ", ".join(formats))
    return address


def to_send(
    folder: Path,
    job_file: Path | None,
    formats: Sequence[str],
    given: str | None,
    *,
    trust: bool,
    say: Say,
) -> ToSend:
    """Return which of the exported ``formats`` are sent, and to which address.

    With ``given`` (``--upload``), all are sent there. Otherwise, the formats in ``output.export`` are sent to the
    job's ``output.upload``, if ``vouched`` trusts it.

    Raises:
        JobError: The files can't be sent to this address.
    """
    if given is not None:
        return ToSend(address_for(_checked(given), formats), formats)
    is_own = job_file is not None and not is_of_run(job_file)
    job = load_job(job_file) if job_file is not None and is_own else job_of_run(folder)
    if job.output.upload is None or job.is_trial:
        return ToSend(None, ())
    job = vouched(job, say, of=(UPLOAD,), trust=trust, named=job_file)
    due = [name for name in formats if name in (job.output.export or formats)]
    if others := [name for name in formats if name not in due]:
        say(
            f"{', '.join(others)}: not sent, because output.export has only {', '.join(job.output.export)}; --upload"
            " ADDRESS sends any format"
        )
    if job.output.upload is None or not due:
        return ToSend(None, ())
    return ToSend(address_for(job.output.upload, due), due)


def _checked(address: str) -> str:
    try:
        return check_address(address)
    except ValueError as error:
        raise JobError(f"--upload: {error}") from None


def send(
    files: Sequence[Path], address: str, say: Say, *, sleep: Callable[[float], None] = time.sleep
) -> Iterator[Sent]:
    """Send each of ``files`` with a PUT request. ``say`` receives a line before each file and before each retry.

    Raises:
        JobError: ``address`` has no ``{name}``, but there are several files.
        UploadError: A server rejects a file or can't be reached. Earlier files were sent.
    """
    names = [file.name for file in files]
    if PLACE not in address and len(names) > 1:
        raise _needs_place(address, ", ".join(names))
    if len({*names}) < len(names):
        raise JobError(
            f"{UPLOAD}: two of the files {', '.join(names)} have the same name and would be sent to the same address;"
            " give them different names"
        )
    for file in files:
        yield _sent(file, url_for(address, file.name), say, sleep)


def _needs_place(address: str, what: str) -> JobError:
    return JobError(
        f"{UPLOAD}: {shown(address)}: is one address for several files ({what}); write {PLACE} in the address, which"
        " becomes the name of each file"
    )


def _sent(file: Path, url: str, say: Say, sleep: Callable[[float], None]) -> Sent:
    where = shown(url)
    try:
        size = file.stat().st_size
        say(f"sending {file} ({size:,} bytes) to {where}")
        for tried in range(1, TRIES + 1):
            answer = _put(file, url)
            if answer.status in range(200, 300):
                return Sent(file, where.removesuffix("?…"), size)
            if tried == TRIES or not answer.may_pass:
                break
            pause = _pause_s(tried, answer.retry_after_s)
            say(f"{file.name}: {answer.reason}; next try in {pause:.1f} s")
            sleep(pause)
    except OSError as error:
        raise UploadError(f"{file}: not sent to {where}: {error.strerror or error}") from error
    times = f" ({tried} tries)" * (tried > 1)
    raise UploadError(f"{file}: not sent to {where}: {answer.reason}{times}")


def _pause_s(tried: int, asked_for_s: float) -> float:
    """Return the seconds to wait after ``tried`` failed attempts. The pause doubles each time, with jitter so that runs
    that failed together don't retry together. A longer pause requested by the server (``asked_for_s``) is used, up to a
    limit."""
    return min(
        max(_FIRST_PAUSE_S * 2.0 ** (tried - 1) * random.uniform(0.5, 1.0), asked_for_s),
        _LONGEST_PAUSE_S,
    )


class _UploadAnswer(NamedTuple):
    """The result of one attempt to send a file. ``status``: HTTP status, or 0 without a response; ``reason``: text for
    the user."""

    status: int
    reason: str
    retry_after_s: float = 0

    @property
    def may_pass(self) -> bool:
        """True if another attempt may succeed."""
        return self.status == 0 or self.status == 429 or self.status >= 500


def _put(file: Path, url: str) -> _UploadAnswer:
    """Send the file with one PUT request, as a stream. httpx reads the length from the open file."""
    import httpx

    headers = {"User-Agent": "batchkit", "Accept-Encoding": "identity"}
    try:
        if {"sv", "sig"} <= {*httpx.URL(url).params}:
            headers |= _AZURE
    except httpx.InvalidURL as error:
        raise UploadError(f"{file}: not sent to {shown(url)}: {masked_text(str(error))}") from error
    timeout = httpx.Timeout(_CONNECT_S, read=_ANSWER_S)
    trusts = not is_local(url)  # a proxy of the environment can't reach a server on this machine
    try:
        with file.open("rb") as content:
            return _read(
                httpx.put(url, content=content, headers=headers, timeout=timeout, trust_env=trusts)
            )
    except (ValueError, ImportError) as error:
        raise UploadError(
            f"{file}: not sent: the proxy set in the environment can't be used: {masked_text(str(error))}"
        ) from error
    except httpx.HTTPError as error:
        kind = type(error).__name__
        return _UploadAnswer(
            0, f"the connection failed ({kind}: {masked_text(str(error)) or 'no reason given'})"
        )


def _read(response: httpx.Response) -> _UploadAnswer:
    status = response.status_code
    if 300 <= status < 400:
        to = shown(_in_one_line(response.headers.get("location", "")))
        return _UploadAnswer(
            status,
            f"answered {status}, moved to {to}; redirects are not followed: give the new address",
        )
    words = masked_text(_in_one_line(response.text))[:_LONGEST_REASON] * (status >= 400)
    reason = f"answered {status} {response.reason_phrase}".rstrip() + (words and f": {words}")
    after = response.headers.get("retry-after", "")
    return _UploadAnswer(status, reason, float(after) if after.isdecimal() else 0)


def _in_one_line(text: str) -> str:
    return plain(" ".join(text.split()))
