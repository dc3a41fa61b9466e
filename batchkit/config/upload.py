"""The address in ``output.upload``, where exports are sent. Parts of it may be secret, such as a signature."""

from __future__ import annotations

import ipaddress
import os
import re
from urllib.parse import quote, unquote, urlsplit

from batchkit.config.masking import MASK, UPLOAD, learn, learn_secret, masked
from batchkit.config.urls import bare
from batchkit.errors import JobError

PLACE = "{name}"
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_UNSAFE = re.compile(r"[\s\x00-\x1f\x7f]")


def check_address(text: str) -> str:
    """Return ``text`` unchanged if exports can be sent to this address. An address with ``${NAME}`` is not checked,
    because the variables are replaced later.

    Raises:
        ValueError: The address is unusable, for example because it has no host or begins with ``http://``.
    """
    if _VARIABLE.search(text) is None and (problem := _problem_of(text)) is not None:
        raise ValueError(problem)
    return text


def address_of(text: str) -> str:
    """Return ``text`` with each ``${NAME}`` replaced by that environment variable. From then on, this process masks the
    secrets of the address in its messages.

    Raises:
        JobError: A variable is not set, the address is unusable, or a secret in it was masked.
    """
    address = _VARIABLE.sub(lambda found: _value_of(found[1]), text)
    _learn(address)
    if (problem := _problem_of(address)) is not None:
        raise JobError(f"{UPLOAD}: {problem}")
    if MASK in address:
        raise JobError(
            f"{UPLOAD}: {shown(address)}: the secret parts of this address are missing, because run folders store no"
            " secrets; give the original job file, or --upload ADDRESS"
        )
    return address


def variables_in(text: str) -> list[str]:
    return list(dict.fromkeys(_VARIABLE.findall(text)))


def host_of(text: str) -> str:
    """Return the host of the address, with the environment variables of this process, or "" if the address is
    unusable."""
    address = _VARIABLE.sub(lambda found: os.environ.get(found[1], "").strip(), text)
    return "" if _problem_of(address) is not None else urlsplit(address).hostname or ""


def url_for(address: str, name: str) -> str:
    """Return ``address`` with ``{name}`` replaced by the file's ``name``, quoted for a URL."""
    return address.replace(PLACE, quote(name, safe=""))


def shown(address: str) -> str:
    """Return ``address`` for a message: without its query and its secrets."""
    return bare(str(masked(address, UPLOAD)))


def is_local(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _value_of(name: str) -> str:
    if value := os.environ.get(name, "").strip():
        return value
    raise JobError(f"{UPLOAD}: the environment variable {name} is not set; the address needs it")


def _problem_of(address: str) -> str | None:
    """Return why exports can't be sent to ``address``, without its secrets; None if they can."""
    if "://" not in address or _UNSAFE.search(address):
        return "expected an address without spaces, like https://host/path"
    try:
        parts = urlsplit(address)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        return f"{shown(address)}: {error}; expected https://host/path"
    if parts.scheme not in ("http", "https"):
        return f"found {parts.scheme}://, expected https:// (for s3:// and similar, use a signed URL for PUT)"
    if not host or "{" in parts.netloc:
        return "contains no host; expected https://host/path"
    if parts.username is not None:
        return f"{shown(address)} has a user name or a password; use a signed address instead"
    if parts.scheme == "http" and not is_local(address):
        return f"found http://{host}, expected https://; http is allowed only for this machine (localhost)"
    if "#" in address:
        return f"{shown(address)}: # starts a fragment; write %23"
    return None


def _learn(address: str) -> None:
    """Make messages of this process mask the secrets in the address: its query values, also percent-decoded, and the
    key name in a credential. A server's error message may quote any of them."""
    learn({"output": {"upload": address}})
    for pair in address.partition("?")[2].split("&"):
        name, _, value = pair.partition("=")
        secret = unquote(value)
        if name.lower().endswith("credential"):
            learn_secret(secret.partition("/")[0])
        if not secret.isalpha():
            learn_secret(secret)
