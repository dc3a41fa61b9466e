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
    """Return ``text`` if it is an address, or may become one when its ``${NAME}`` are replaced.

    Raises:
        ValueError: Nothing may be sent to this address.
    """
    if _VARIABLE.search(text) is None and (problem := _problem_of(text)) is not None:
        raise ValueError(problem)
    return text


def address_of(text: str) -> str:
    """Replace each ``${NAME}`` in ``text`` with that environment variable. Secrets in the result are
    masked in this process's messages from then on.

    Raises:
        JobError: A variable is not set, the address can't be used, or it contains a masked secret.
    """
    address = _VARIABLE.sub(lambda found: _value_of(found[1]), text)
    _learn(address)
    if (problem := _problem_of(address)) is not None:
        raise JobError(f"{UPLOAD}: {problem}")
    if MASK in address:
        raise JobError(
            f"{UPLOAD}: {shown(address)}: a run folder does not store the signature of an address; give the job"
            " file that has it, or --upload ADDRESS"
        )
    return address


def variables_in(text: str) -> list[str]:
    return list(dict.fromkeys(_VARIABLE.findall(text)))


def host_of(text: str) -> str:
    """Return the host in ``text`` with the current environment, or "" if the address is unusable."""
    address = _VARIABLE.sub(lambda found: os.environ.get(found[1], "").strip(), text)
    return "" if _problem_of(address) is not None else urlsplit(address).hostname or ""


def url_for(address: str, name: str) -> str:
    """Return the address for the file ``name``."""
    return address.replace(PLACE, quote(name, safe=""))


def shown(address: str) -> str:
    """Return ``address`` without its query and its secrets."""
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
    """Return why nothing may be sent to ``address``, without its secrets, or None if it is usable."""
    if "://" not in address or _UNSAFE.search(address):
        return "expected an address without spaces, like https://host/path"
    try:
        parts = urlsplit(address)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        return f"{shown(address)}: {error}; expected https://host/path"
    if parts.scheme not in ("http", "https"):
        return f"found {parts.scheme}://, expected https:// (for a store, use a signed address for PUT)"
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
    """Mask the address's secrets, also unquoted, and the key name in a credential: servers may quote either."""
    learn({"output": {"upload": address}})
    for pair in address.partition("?")[2].split("&"):
        name, _, value = pair.partition("=")
        secret = unquote(value)
        if name.lower().endswith("credential"):
            learn_secret(secret.partition("/")[0])
        if not secret.isalpha():
            learn_secret(secret)
