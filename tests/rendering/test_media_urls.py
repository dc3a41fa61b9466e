"""Images from URLs: only listed hosts, only public addresses, and bounded in bytes and time."""

from __future__ import annotations

import socket
import time
from asyncio.selector_events import BaseSelectorEventLoop
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from batchkit.config.tables import MediaTable
from batchkit.errors import MediaError
from batchkit.rendering.media import load_image
from batchkit.rendering.media.download import fetch
from tests.support.images import PNG, media_table, refused
from tests.support.web import Page, web_server

pytestmark = pytest.mark.slow

Answer = Callable[[Page], object]


class Server:
    """``pages`` maps a path to what answers it."""

    def __init__(self) -> None:
        self.pages: dict[str, Answer] = {}
        self.seen: list[str] = []
        self.port = 0

    def answer(self, handler: Page) -> None:
        self.seen.append(f"{handler.headers['Host']}{handler.path}")
        self.pages[handler.path](handler)

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def media(self, **keys: Any) -> MediaTable:
        return media_table(allow_urls=[f"127.0.0.1:{self.port}"], **keys)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    with web_server(type("Handler", (Page,), {"do_GET": lambda page: made.answer(page)})) as url:
        made.port = int(url.rpartition(":")[2])
        yield made


def page(body: bytes, status: int = 200, *, length: int | None = None, **headers: str) -> Answer:
    """``length``: what the answer says; None: its own, -1: nothing."""
    said = {} if length == -1 else {"Content_Length": len(body) if length is None else length}

    def answer(handler: Page) -> None:
        with suppress(OSError):  # the client has seen enough
            handler.reply(status, body, **said, **headers)

    return answer


def test_a_listed_url_is_fetched_whatever_its_content_type_says(server: Server) -> None:
    server.pages["/a%20b.png?x=%2F&y=1"] = page(PNG, Content_Type="text/html")
    image = load_image(server.url("/a b.png?x=%2F&y=1#part"), server.media())
    assert image.size == (64, 48)
    assert server.seen == [f"127.0.0.1:{server.port}/a%20b.png?x=%2F&y=1"]


def test_a_web_page_in_place_of_an_image_is_recognised(server: Server) -> None:
    server.pages["/a.png"] = page(b"<html>sign in", Content_Type="image/png")
    message = refused(server.url("/a.png"), server.media())
    assert "not an image" in message
    assert "<html>sign in" in message


def test_no_host_is_contacted_that_is_not_listed(server: Server) -> None:
    for allow in ([], ["127.0.0.1"], ["example.com"], [f"127.0.0.1:{server.port + 1}"]):
        message = refused(server.url("/a.png"), media_table(allow_urls=allow))
        assert f'add "127.0.0.1:{server.port}"' in message
    assert server.seen == []


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.0.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.1.1",
        "255.255.255.255",
        "::1",
        "::",
        "fe80::1",
        "fd00::1",
        "ff0e::1",
        "::ffff:10.0.0.1",
        "2002:7f00:1::",
        "64:ff9b::a00:1",
        "64:ff9b:1::a00:1",
        "::a00:1",
        "fec0::1",
    ],
)
def test_one_private_address_among_public_ones_refuses_the_name(
    address: str, monkeypatch: Any
) -> None:
    asked = []

    def resolve(host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        return [(2, 1, 6, "", (a, port)) for a in ("93.184.216.34", address)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    message = refused("http://pictures.test/a.png", media_table(allow_urls=["pictures.test"]))
    assert f"pictures.test resolves to {address}" in message
    assert asked == ["pictures.test"]


def test_the_address_that_was_checked_is_the_one_connected_to(monkeypatch: Any) -> None:
    """A resolver that changes its mind after the check (DNS rebinding) is not asked again."""
    asked: list[str] = []
    connected: list[Any] = []

    def resolve(host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        address = "93.184.216.34" if len(asked) == 1 else "127.0.0.1"
        return [(2, 1, 6, "", (address, port))]

    async def connect(_loop: Any, _socket: Any, address: Any) -> None:
        connected.append(address)
        raise ConnectionRefusedError("no network here")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(BaseSelectorEventLoop, "sock_connect", connect)
    message = refused("https://pictures.test/a.png", media_table(allow_urls=["Pictures.test"]))
    assert "ConnectError" in message
    assert asked == ["pictures.test"]
    assert connected == [("93.184.216.34", 443)]


def test_redirects_are_followed_on_the_list_and_three_at_most(server: Server) -> None:
    server.pages["/3"] = page(b"", 302, Location="/2")
    server.pages["/2"] = page(b"", 307, Location=server.url("/1"))
    server.pages["/1"] = page(b"", 301, Location="0")
    server.pages["/0"] = page(PNG)
    assert load_image(server.url("/3"), server.media()).size == (64, 48)
    server.pages["/4"] = page(b"", 303, Location="/3")
    assert "redirected more than 3 times" in refused(server.url("/4"), server.media())


@pytest.mark.parametrize(
    ("location", "word"),
    [
        ("http://169.254.169.254/latest", "169.254.169.254 is not in media.allow_urls"),
        ("http://127.0.0.1:1/a.png", "127.0.0.1:1 is not in media.allow_urls"),
        ("file:///etc/passwd", "can't be read from file://"),
        ("http://u:p@127.0.0.1/", "user name"),
        ("http://[::1", "Invalid port"),
    ],
)
def test_a_redirect_off_the_list_is_refused(server: Server, location: str, word: str) -> None:
    server.pages["/a"] = page(b"", 302, Location=location)
    message = refused(server.url("/a"), server.media())
    assert word in message
    assert message.startswith(server.url("/a"))


def test_a_download_is_bounded_by_what_comes_and_not_by_what_is_stated(server: Server) -> None:
    media = server.media(max_bytes=100_000)
    server.pages["/stated"] = page(PNG, length=10**12)
    assert "has 1000000000000 bytes" in refused(server.url("/stated"), media)
    server.pages["/unstated"] = page(bytes(10_000_000), length=-1)
    assert "media.max_bytes is 100000" in refused(server.url("/unstated"), media)


def test_a_failed_download_says_why(server: Server) -> None:
    server.pages["/404"] = page(b"no", 404)
    assert "127.0.0.1 answered 404 Not Found" in refused(server.url("/404"), server.media())
    server.pages["/short"] = page(PNG, length=len(PNG) + 50)
    assert f"received {len(PNG)} bytes" in refused(server.url("/short"), server.media())
    server.pages["/junk"] = lambda handler: handler.wfile.write(b"\0junk\n")
    assert "download failed (RemoteProtocolError" in refused(server.url("/junk"), server.media())
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        message = refused(f"http://{address}/a.png", media_table(allow_urls=[address]))
    assert "ConnectError" in message


@pytest.mark.parametrize("start", [b"", b"HTTP/1.0 200 OK\r\n", b"HTTP/1.0 200 OK\r\n\r\n"])
def test_a_server_that_drips_is_cut_off(server: Server, start: bytes) -> None:
    def drip(handler: Page) -> None:
        """Never ends by itself."""
        handler.wfile.write(start)
        with suppress(OSError):
            while True:
                handler.wfile.write(b"x")
                time.sleep(0.05)

    server.pages["/slow"] = drip
    url = server.url("/slow")
    with pytest.raises(MediaError, match=r"not complete after 0\.4 s"):
        fetch(url, url, server.media(), timeout_s=0.4)
