"""Downloads of images from http(s) URLs, only from hosts that the job names.

An entry of ``media.allow_urls`` is a host for ports 80 and 443, or ``host:port``. A host name must resolve to public
addresses only, so that neither a listed name nor a redirect leads into the local network. A literal address
(``10.0.0.5``, ``127.0.0.1:8123``, ``[::1]:80``) is allowed without this check, because the user chose it explicitly.
"""

from __future__ import annotations

import functools
import ipaddress
import socket
import ssl
from typing import NamedTuple
from urllib.parse import urljoin

import anyio
import httpx
from anyio.from_thread import start_blocking_portal

from batchkit.config.tables import MediaTable
from batchkit.errors import MediaError
from batchkit.rendering.media.source import check_bytes, shown

TIMEOUT_S = 30.0
MAX_REDIRECTS = 3

_HEADERS = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "batchkit"}
_IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
_NAT64 = ipaddress.ip_network("64:ff9b::/96")  # RFC 6052: the last 32 bits are an IPv4 address
# IANA has assigned public addresses only from this range. Python's is_global also accepts
# 64:ff9b:1::/48 (RFC 8215: a network's own translation to IPv4) and ::a.b.c.d, which are outside of it.
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")


class _Hop(NamedTuple):
    """An allowed URL in a chain of redirects, with the checked addresses of its host."""

    url: httpx.URL
    addresses: list[str]


def fetch(url: str, name: str, media: MediaTable, *, timeout_s: float = TIMEOUT_S) -> bytes:
    """Return the body at ``url``. At most ``MAX_REDIRECTS`` redirects are followed, and each one is checked.

    Each URL's host name is resolved once, and its addresses are checked. Connections go only to these addresses,
    without a proxy, so the name can't resolve to another address after the check.

    ``timeout_s``: limit for the whole download except name resolution, which has its own limits.

    Raises:
        MediaError: the URL is not allowed or unreachable, the download is too slow or over ``media.max_bytes``, or the
            status is not 200.
    """
    try:
        # An event loop is used, because it can limit the time of the whole download, while httpx's timeouts start again
        # with each byte. The loop runs in its own thread, because the caller's thread may already run another one (in a
        # notebook).
        with start_blocking_portal() as portal:
            return portal.call(_follow, url, name, media, timeout_s)
    except TimeoutError as error:
        raise MediaError(
            f"{name}: the download was not complete after {timeout_s:g} s; download the file beforehand"
        ) from error
    except (OSError, httpx.HTTPError, ValueError) as error:
        raise MediaError(
            f"{name}: the download failed ({type(error).__name__}: {error});"
            " check the URL, or download the file beforehand"
        ) from error


async def _follow(url: str, name: str, media: MediaTable, timeout_s: float) -> bytes:
    client = httpx.AsyncClient(verify=_tls(), trust_env=False, timeout=None, headers=_HEADERS)
    with anyio.fail_after(timeout_s):
        async with client:
            for _ in range(MAX_REDIRECTS + 1):
                found = await _get(client, _allowed(url, name, media), name, media)
                if isinstance(found, bytes):
                    return found
                url = urljoin(url, found)
    raise MediaError(
        f"{name}: redirected more than {MAX_REDIRECTS} times, last to {shown(url)};"
        " give the URL of the file itself"
    )


@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


def _allowed(url: str, name: str, media: MediaTable) -> _Hop:
    """Return ``url`` with the addresses of its host. Raises MediaError if ``media.allow_urls`` does not allow the URL,
    or an address is not public."""
    at = name if shown(url) == name else f"{name}: redirected to {shown(url)}"
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:  # its message quotes the URL, which may contain a key
        raise MediaError(f"{at}: its host or port is not valid; write https://host/path") from None
    if parsed.scheme not in ("http", "https"):
        raise MediaError(
            f"{at}: files can't be read from {parsed.scheme}://;"
            " use http(s), set media.root to a URL above the files, or download the files below media.root"
        )
    host = parsed.host.rstrip(".")
    port = parsed.port or (443 if parsed.scheme == "https" else 80)
    if parsed.userinfo or not host or "%" in host or port >= 2**16:
        problem = "has a user name" if parsed.userinfo else "its host or port is not valid"
        raise MediaError(f"{at}: {problem}; write https://host/path")
    bare = f"[{host}]" if ":" in host else host
    listed = {entry.lower() for entry in media.allow_urls}
    if f"{bare}:{port}" not in listed and (port not in (80, 443) or not listed & {bare, host}):
        entry = bare if port in (80, 443) else f"{bare}:{port}"
        raise MediaError(
            f"{at}: {entry} is not in media.allow_urls {sorted(listed)};"
            f' add "{entry}" if files may be fetched from there'
        )
    return _Hop(parsed.copy_with(host=host), _public_addresses(host, port, at))


def _public_addresses(host: str, port: int, at: str) -> list[str]:
    """Return the addresses of ``host``, which is a name or an address. Raises MediaError if an address is not
    public."""
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
                f' if you want this, write the address in the URL and add "{address}:{port}" to'
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


async def _get(client: httpx.AsyncClient, hop: _Hop, name: str, media: MediaTable) -> bytes | str:
    """Return the body of the response or, for a redirect, the new URL."""
    response = await _connect(client, hop)
    try:
        if response.has_redirect_location:
            return str(response.headers["Location"])
        if response.status_code != 200:
            raise MediaError(
                f"{name}: {hop.url.host} answered {response.status_code} {response.reason_phrase};"
                " check the URL"
            )
        stated = response.headers.get("Content-Length", "")
        if stated.isdecimal():
            check_bytes(int(stated), name, media)
        body = bytearray()
        async for chunk in response.aiter_raw():
            body += chunk
            check_bytes(len(body), name, media)
        return bytes(body)
    finally:
        await response.aclose()


async def _connect(client: httpx.AsyncClient, hop: _Hop) -> httpx.Response:
    """Try the host's checked addresses in order. Return the first response; its body is not read yet."""
    problem = httpx.ConnectError("its name has no address")
    for address in hop.addresses:
        request = client.build_request(
            "GET",
            hop.url.copy_with(host=address),
            headers={"Host": hop.url.netloc.decode("ascii")},
            # The name in the certificate.
            extensions={"sni_hostname": hop.url.raw_host.decode("ascii")},
        )
        try:
            return await client.send(request, stream=True)
        except httpx.ConnectError as error:
            problem = error
    raise problem
