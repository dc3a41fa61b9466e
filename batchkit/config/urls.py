"""Recognition of URLs that fsspec reads, and error messages for URLs that can't be read."""

from __future__ import annotations

import re

from batchkit.config.installation import how_to_install
from batchkit.config.masking import MASK, masked_text, without_user_info
from batchkit.config.suggest import nearest
from batchkit.errors import JobError

# Not read through fsspec: local folders, and hosts of media.allow_urls.
_ELSEWHERE = ("file", "local", "http", "https")
CHECK_KEYS = "check the store's keys in the environment"
_IN_EXTRA = ("gcsfs", "huggingface_hub", "s3fs")  # installed by the extra `remote`

_QUERY = re.compile(r"\?\S*=\S*")  # also matches a URL that a library prints without its host
_MASKED = re.compile(
    r"(?<![a-z0-9+.-])([a-z][a-z0-9+.-]{0,30})://?[^/]*" + re.escape(MASK) + "@", re.IGNORECASE
)


def is_remote(path: str) -> bool:
    """Return True if files below ``path`` are read through fsspec; False if ``path`` is a local folder or an http(s)
    URL."""
    scheme, separator, _ = path.partition("://")
    return bool(separator) and scheme.lower() not in _ELSEWHERE


def check_user_info(url: str, key: str) -> None:
    """Raise JobError if ``url``, the value of ``key``, contains a password, because job.toml would store it."""
    if (found := _MASKED.search(without_user_info(url))) is not None:
        raise JobError(
            f"{key}: {bare(url)} contains a password; put it into the environment variable"
            f" FSSPEC_{found[1].upper()}_PASSWORD (or one that the store itself reads)"
        )


def bare(url: str) -> str:
    """Return ``url`` without user name, password and query, for messages."""
    path, mark, _ = re.sub(r"(?<=://)[^/]*@", "", without_user_info(url)).partition("?")
    return path + (mark and "?…")


def failure(error: Exception, url: str) -> str:
    """Return the reason for ``error`` of fsspec about ``url``, on one line; for a missing package, also the command that
    installs it; if the store refused access, also the advice to check its keys. The text contains no secrets."""
    # It only repeats the file name.
    if error.__cause__ is not None and str(error) and str(error) in url:
        error = error.__cause__ if isinstance(error.__cause__, Exception) else error
    text = " ".join(_QUERY.sub("?…", masked_text(str(error))).split()).rstrip(".")
    text = text or type(error).__name__
    if isinstance(error, ImportError):
        package = getattr(error.__cause__ or error, "name", None)
        return f"{text}; {how_to_install('remote')}" if package in _IN_EXTRA else text
    is_refused = isinstance(error, PermissionError) or type(error).__name__ == "NoCredentialsError"
    if is_refused and is_remote(url):
        return f"{text}; {CHECK_KEYS}"
    return text + _near_scheme(url)


def _near_scheme(url: str) -> str:
    from fsspec import available_protocols

    if "://" not in url:
        return ""
    known, scheme = available_protocols(), url.partition("://")[0].rpartition("::")[2]
    near = nearest(scheme.lower(), known, cutoff=0.5)
    return f"; did you mean {near}://?" if near and scheme not in known else ""
