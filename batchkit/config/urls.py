"""URLs that fsspec reads: which text is one, and what is reported if one fails."""

from __future__ import annotations

import re

from batchkit.config.installation import how_to_install
from batchkit.config.masking import MASK, masked_text, without_user_info
from batchkit.config.suggest import nearest
from batchkit.errors import JobError

_ELSEWHERE = ("file", "local", "http", "https")  # folders, and hosts in media.allow_urls
_IN_EXTRA = ("gcsfs", "huggingface_hub", "s3fs")  # what the extra `remote` installs

_QUERY = re.compile(r"\?\S*=\S*")  # some libraries quote a URL without its host
_MASKED = re.compile(
    r"(?<![a-z0-9+.-])([a-z][a-z0-9+.-]{0,30})://?[^/]*" + re.escape(MASK) + "@", re.IGNORECASE
)


def is_remote(path: str) -> bool:
    """Whether files below ``path`` are read through fsspec; otherwise ``path`` is a folder."""
    scheme, separator, _ = path.partition("://")
    return bool(separator) and scheme.lower() not in _ELSEWHERE


def check_user_info(url: str, key: str) -> None:
    """Raises JobError if ``url``, the value of ``key``, holds a password: a job.toml would keep it."""
    if (found := _MASKED.search(without_user_info(url))) is not None:
        raise JobError(
            f"{key}: {bare(url)} is given with a password; set it in the environment as"
            f" FSSPEC_{found[1].upper()}_PASSWORD (or what the store itself reads)"
        )


def bare(url: str) -> str:
    """``url`` without its user info and its query."""
    path, mark, _ = re.sub(r"(?<=://)[^/]*@", "", without_user_info(url)).partition("?")
    return path + (mark and "?…")


def failure(error: Exception, url: str) -> str:
    """Why fsspec can't open or read ``url``: what is missing, and how to install it; no secrets."""
    if error.__cause__ is not None and str(error) and str(error) in url:  # it only names the file
        error = error.__cause__ if isinstance(error.__cause__, Exception) else error
    text = _QUERY.sub("?…", masked_text(str(error))) or type(error).__name__
    if isinstance(error, ImportError):
        package = getattr(error.__cause__ or error, "name", None)
        return f"{text}; {how_to_install('remote')}" if package in _IN_EXTRA else text
    return text + _near_scheme(url)


def _near_scheme(url: str) -> str:
    from fsspec import available_protocols

    known, scheme = available_protocols(), url.partition("://")[0].rpartition("::")[2]
    near = nearest(scheme.lower(), known, cutoff=0.5)
    return f"; did you mean {near}://?" if near and scheme not in known else ""
