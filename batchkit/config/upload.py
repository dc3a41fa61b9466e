"""``output.upload``: the address that exports are sent to. A part of it may be a secret, such as a signature."""

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
    """``text``, which is an address, or becomes one once its ``${NAME}`` are filled in.

    Raises:
        ValueError: it is none that anything may be sent to.
    """
    if _VARIABLE.search(text) is None and (problem := _problem_of(text)) is not None:
        raise ValueError(problem)
    return text


def address_of(text: str) -> str:
    """``text`` with each ``${NAME}`` replaced by that environment variable. What is secret in it is hidden
    from messages of this process.

    Raises:
        JobError: a variable is not set, the address can't be used, or a secret of it was not kept.
    """
    address = _VARIABLE.sub(lambda found: _value_of(found[1]), text)
    _learn(address)
    if (problem := _problem_of(address)) is not None:
        raise JobError(f"{UPLOAD}: {problem}")
    if MASK in address:
        raise JobError(
            f"{UPLOAD}: {shown(address)}: a run folder keeps no signature of an address; name the job file"
            " that has it, or give --upload ADDRESS"
        )
    return address


def variables_in(text: str) -> list[str]:
    return list(dict.fromkeys(_VARIABLE.findall(text)))


def host_of(text: str) -> str:
    """The host that ``text`` names now; empty if it has no usable address."""
    address = _VARIABLE.sub(lambda found: os.environ.get(found[1], "").strip(), text)
    return "" if _problem_of(address) is not None else urlsplit(address).hostname or ""


def url_for(address: str, name: str) -> str:
    """Where the file ``name`` goes."""
    return address.replace(PLACE, quote(name, safe=""))


def shown(address: str) -> str:
    """Without its query and its secrets."""
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
    raise JobError(
        f"{UPLOAD}: the environment variable {name} is not set; it has a part of the address"
    )


def _problem_of(address: str) -> str | None:
    """Why nothing may be sent to ``address``, without what is secret in it."""
    if "://" not in address or _UNSAFE.search(address):
        return "expected an address without spaces, as https://host/path"
    try:
        parts = urlsplit(address)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        return f"{shown(address)}: {error}; expected https://host/path"
    if parts.scheme not in ("http", "https"):
        return (
            f"found {parts.scheme}://, expected https:// (for a store, a signed address to PUT to)"
        )
    if not host or "{" in parts.netloc:
        return "names no host; expected https://host/path"
    if parts.username is not None:
        return f"{shown(address)} has a user name or a password; use a signed address instead"
    if parts.scheme == "http" and not is_local(address):
        return f"found http://{host}, expected https://; only this machine (localhost) is sent to without"
    if "#" in address:
        return f"{shown(address)}: # ends a path; write %23"
    return None


def _learn(address: str) -> None:
    """Also as a server may quote them: unpacked, and of a credential its first part, the name of a key."""
    learn({"output": {"upload": address}})
    for pair in address.partition("?")[2].split("&"):
        name, _, value = pair.partition("=")
        secret = unquote(value)
        if name.lower().endswith("credential"):
            learn_secret(secret.partition("/")[0])
        if not secret.isalpha():
            learn_secret(secret)
