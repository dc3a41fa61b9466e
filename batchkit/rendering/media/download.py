"""Images from http(s) URLs, only from hosts that the job names.

An entry of ``media.allow_urls`` is a host for ports 80 and 443, or ``host:port``. A name must
resolve to public addresses only, so that no name, listed or redirected to, reaches into the
network that batchkit runs in. A literal address (``10.0.0.5``, ``127.0.0.1:8123``, ``[::1]:80``)
is the user's explicit choice and is allowed without this check.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from urllib.parse import quote, urljoin, urlsplit

from batchkit.config.tables import MediaTable
from batchkit.errors import MediaError
from batchkit.rendering.media.source import check_bytes, shown

TIMEOUT_S = 30.0
MAX_REDIRECTS = 3

_CHUNK_BYTES = 2**16
_IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
_NAT64 = ipaddress.ip_network("64:ff9b::/96")  # RFC 6052: the last 32 bits are an IPv4 address
# IANA has assigned public addresses only from this range. Outside of it are, among others,
# 64:ff9b:1::/48 (RFC 8215: a network's own translation to IPv4) and ::a.b.c.d, which Python's
# is_global accepts.
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")


class _Address(NamedTuple):
    """An allowed URL, split up, with the addresses that may be connected to."""

    secure: bool
    host: str
    port: int
    target: str
    addresses: list[str]


class _Response(NamedTuple):
    """Either the body or, for a redirect, the new location."""

    body: bytes
    location: str | None


def fetch(url: str, name: str, media: MediaTable, *, timeout_s: float = TIMEOUT_S) -> bytes:
    """The body at ``url``; at most ``MAX_REDIRECTS`` redirects, every hop checked again.

    Connects only to the addresses that were checked: the name is resolved once per hop, so it
    can't change in between. No proxy is used. ``timeout_s`` covers everything but the resolver,
    which has limits of its own.

    Raises:
        MediaError: refused, unreachable, too slow, over ``media.max_bytes``, or not status 200.
    """
    deadline = time.monotonic() + timeout_s
    hop = url
    for _ in range(MAX_REDIRECTS + 1):
        try:
            response = _get(_allowed(hop, name, media), name, media, deadline)
            if response.location is not None:
                hop = urljoin(hop, response.location)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if time.monotonic() >= deadline:
                raise _too_slow(name, timeout_s) from error
            raise MediaError(
                f"{name}: the download failed ({type(error).__name__}: {error});"
                " check the URL, or download the image beforehand"
            ) from error
        if time.monotonic() >= deadline:
            raise _too_slow(name, timeout_s)
        if response.location is None:
            return response.body
    raise MediaError(
        f"{name}: redirected more than {MAX_REDIRECTS} times, last to {shown(hop)};"
        " give the URL of the image itself"
    )


def _too_slow(name: str, timeout_s: float) -> MediaError:
    return MediaError(f"{name}: not complete after {timeout_s:g} s; download the image beforehand")


def _allowed(url: str, name: str, media: MediaTable) -> _Address:
    """``url`` split up, if ``media.allow_urls`` and the addresses of its host allow it."""
    at = name if shown(url) == name else f"{name}: redirected to {shown(url)}"
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https"):
        raise MediaError(
            f"{at}: images can't be read from {parts.scheme}://;"
            " use http(s), set media.root to a URL that they lie below, or download them under it"
        )
    if parts.username is not None or not parts.hostname:
        raise MediaError(f"{at}: has a user name, or no host; write https://host/path")
    host = parts.hostname.rstrip(".")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    bare = f"[{host}]" if ":" in host else host
    listed = {entry.lower() for entry in media.allow_urls}
    if f"{bare}:{port}" not in listed and (port not in (80, 443) or not listed & {bare, host}):
        entry = bare if port in (80, 443) else f"{bare}:{port}"
        raise MediaError(
            f"{at}: {entry} is not on media.allow_urls {sorted(listed)};"
            f' add "{entry}" if images may be fetched from there'
        )
    target = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~")
    if parts.query:
        target += "?" + quote(parts.query, safe="/%:@!$&'()*+,;=~?[]")
    addresses = _public_addresses(host, port, at)
    return _Address(parts.scheme == "https", host, port, target, addresses)


def _public_addresses(host: str, port: int, at: str) -> list[str]:
    """The addresses of ``host``: itself if it is one, else all that its name resolves to."""
    try:
        return [str(ipaddress.ip_address(host))]
    except ValueError:
        pass  # a name
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    for address in addresses:
        if not _is_public(ipaddress.ip_address(address)):
            raise MediaError(
                f"{at}: {host} resolves to {address}, which is not a public address;"
                f' if that is meant, put the address in the URL and "{address}:{port}" on'
                " media.allow_urls"
            )
    return addresses


def _is_public(address: _IPAddress) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return _is_public(inner)
        if address not in _GLOBAL_UNICAST:
            return False
    return address.is_global and not address.is_multicast


def _get(address: _Address, name: str, media: MediaTable, deadline: float) -> _Response:
    sock = _connect(address, deadline)
    if address.secure:
        context = ssl.create_default_context()
        sock = context.wrap_socket(
            sock, server_hostname=address.host, do_handshake_on_connect=False
        )
    with sock, _cut_off(sock, deadline):
        if isinstance(sock, ssl.SSLSocket):
            sock.do_handshake()
        kind = http.client.HTTPSConnection if address.secure else http.client.HTTPConnection
        connection = kind(address.host, address.port)
        connection.sock = sock
        headers = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "batchkit"}
        connection.request("GET", address.target, headers=headers)
        with connection.getresponse() as response:
            location = response.getheader("Location")
            if response.status in (301, 302, 303, 307, 308) and location:
                return _Response(b"", location)
            if response.status != 200:
                raise MediaError(
                    f"{name}: {address.host} answered {response.status} {response.reason};"
                    " check the URL"
                )
            return _Response(_body(response, name, media), None)


def _connect(address: _Address, deadline: float) -> socket.socket:
    """A connection to the first of the checked addresses that answers."""
    problem: OSError = TimeoutError("timed out")
    for one in address.addresses:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            break
        try:
            return socket.create_connection((one, address.port), timeout=left_s)
        except OSError as error:
            problem = error
    raise problem


@contextmanager
def _cut_off(sock: socket.socket, deadline: float) -> Iterator[None]:
    """Ends every read of ``sock`` at the deadline, however slowly the server sends its bytes."""

    def cut() -> None:
        try:
            # Not SSLSocket's own shutdown: it removes the SSL state while the reader uses it.
            socket.socket.shutdown(sock, socket.SHUT_RDWR)
        except OSError:
            pass  # closed already

    # The timer's thread runs beside the reader and uses nothing but the connection.
    timer = threading.Timer(max(0.0, deadline - time.monotonic()), cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _body(response: http.client.HTTPResponse, name: str, media: MediaTable) -> bytes:
    stated = response.getheader("Content-Length", "")
    if stated.isdecimal():
        check_bytes(int(stated), name, media)
    body = bytearray()
    while chunk := response.read(_CHUNK_BYTES):
        body += chunk
        check_bytes(len(body), name, media)
    if stated.isdecimal() and len(body) < int(stated):
        raise MediaError(f"{name}: ended after {len(body)} of {stated} bytes; try again")
    return bytes(body)
