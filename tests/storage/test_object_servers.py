"""The object stores of the tests, and the faults of the proxy in front of them, as obstore sees them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from tests.support.object_servers import ObjectServer, moto_server, object_server
from tests.support.store_proxy import Rule, StoreProxy, Traffic, puts, store_proxy
from tests.support.waiting import until

if TYPE_CHECKING:
    from obstore.store import ObjectStore

obstore = pytest.importorskip("obstore", reason="needs obstore (pip install obstore)")
pytestmark = pytest.mark.slow

Connect = Callable[..., "ObjectStore"]


OTHERS = [pytest.param(name, marks=pytest.mark.release) for name in ("azurite", "ceph")]


@pytest.fixture(scope="module", params=["moto", *OTHERS])
def any_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ObjectServer]:
    with object_server(request.param, tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    with moto_server(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def proxy(moto: ObjectServer) -> Iterator[StoreProxy]:
    with store_proxy(moto.url) as proxy:
        yield proxy


@pytest.fixture
def connect(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Connect:
    """A function that opens a new folder in a server's bucket, with obstore's settings in the environment."""

    def connect(
        server: ObjectServer, url: str = "", max_retries: int = 0, timeout: str = "30s"
    ) -> ObjectStore:
        for name, value in server.environment(url).items():
            monkeypatch.setenv(name, value)
        folder = request.node.name.replace("[", "-").removesuffix("]")
        return obstore.store.from_url(
            f"{server.store}/{folder}",
            retry_config={"max_retries": max_retries},
            client_options={
                "timeout": timeout,
                "allow_http": True,
            },  # replaces that of the environment
        )

    return connect


@pytest.fixture
def store(moto: ObjectServer, proxy: StoreProxy, connect: Connect) -> ObjectStore:
    """moto behind the proxy, without obstore's own retries."""
    return connect(moto, proxy.url)


def create(store: ObjectStore, key: str, content: bytes = b"1") -> str:
    """Put an object unless the key exists; return "created", or the name of obstore's error."""
    try:
        obstore.put(store, key, content, mode="create")
    except obstore.exceptions.BaseError as error:
        return type(error).__name__
    return "created"


def keys(store: ObjectStore) -> list[str]:
    return [found["path"] for found in obstore.list(store).collect()]


def test_a_create_only_put_keeps_the_first_object(
    any_server: ObjectServer, connect: Connect
) -> None:
    store = connect(any_server)
    assert create(store, "a", b"first") == "created"
    assert create(store, "a", b"second") == "AlreadyExistsError"
    assert bytes(obstore.get(store, "a").bytes()) == b"first"


def test_one_of_sixteen_concurrent_puts_succeeds(
    any_server: ObjectServer, connect: Connect
) -> None:
    store = connect(any_server)
    together = threading.Barrier(16)

    def put(key: str, content: bytes) -> str:
        together.wait()
        return create(store, key, content)

    with ThreadPoolExecutor(16) as pool:
        for key in map(str, range(20)):
            contents = [b"%d" % number for number in range(16)]
            ended = list(pool.map(put, [key] * 16, contents))
            assert sorted(ended) == ["AlreadyExistsError"] * 15 + ["created"]
            winner = contents[ended.index("created")]
            assert bytes(obstore.get(store, key).bytes()) == winner


def test_a_server_accepts_requests_through_the_proxy(
    any_server: ObjectServer, connect: Connect
) -> None:
    with store_proxy(any_server.url) as proxy:
        store = connect(any_server, proxy.url)
        key = "a b/Zoë=50%+1"
        assert create(store, key, b"12345") == "created"
        assert bytes(obstore.get(store, key).bytes()) == b"12345"
        assert bytes(obstore.get_range(store, key, start=1, end=3)) == b"23"
        assert obstore.head(store, key)["size"] == 5
        assert keys(store) == [key]
        obstore.delete(store, key)
        assert keys(store) == []
        assert proxy.traffic().requests["LIST"] == 2


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("slow_down", "GenericError"),
        ("expired", "PermissionDeniedError"),
        ("bad_token", "GenericError"),
        ("drop_request", "GenericError"),
    ],
)
def test_a_refused_put_stores_nothing(
    store: ObjectStore, proxy: StoreProxy, fault: str, error: str
) -> None:
    proxy.rules = [Rule(fault)]
    assert create(store, "a") == error
    proxy.rules = []
    assert keys(store) == []


def test_a_put_whose_reply_is_dropped_stores_its_object(
    store: ObjectStore, proxy: StoreProxy
) -> None:
    proxy.rules = [Rule("drop_reply", only=puts)]
    assert create(store, "a") == "GenericError"
    assert keys(store) == ["a"]


def test_obstore_repeats_a_put_whose_reply_was_dropped(
    moto: ObjectServer, proxy: StoreProxy, connect: Connect
) -> None:
    proxy.rules = [Rule("drop_reply", times=1)]
    assert create(connect(moto, proxy.url, max_retries=2), "a") == "AlreadyExistsError"
    assert proxy.traffic().requests["PUT"] == 2


def test_a_late_put_stores_its_object_after_its_error(
    store: ObjectStore, proxy: StoreProxy
) -> None:
    proxy.rules = [Rule("late", seconds=60, only=puts)]
    assert create(store, "a") == "GenericError"
    assert keys(store) == []
    proxy.close()  # nothing waits from now on
    until(lambda: keys(store) == ["a"])
    assert proxy.n_waiting() == 0


def test_the_client_gets_the_second_reply_to_a_duplicated_put(
    store: ObjectStore, proxy: StoreProxy
) -> None:
    proxy.rules = [Rule("duplicate")]
    assert create(store, "a") == "AlreadyExistsError"
    assert keys(store) == ["a"]


def test_a_held_put_arrives_after_a_later_one(store: ObjectStore, proxy: StoreProxy) -> None:
    proxy.rules = [Rule("hold", passes=2, times=1)]
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(create, store, "a", b"held")
        until(proxy.n_waiting)
        assert create(store, "b") == "created"
        assert not held.done()
        assert create(store, "a", b"later") == "created"
        assert held.result() == "AlreadyExistsError"
    assert bytes(obstore.get(store, "a").bytes()) == b"later"


def test_a_put_arrives_after_its_client_gave_up(
    moto: ObjectServer, proxy: StoreProxy, connect: Connect
) -> None:
    store = connect(moto, proxy.url, max_retries=2, timeout="1s")
    proxy.rules = [Rule("hold", passes=1000, times=1)]
    assert create(store, "a") == "GenericError"  # obstore repeats no create-only put that timed out
    assert proxy.traffic().requests["PUT"] == 1
    proxy.close()
    until(lambda: keys(store) == ["a"])


def test_a_held_put_waits_no_longer_than_its_limit(store: ObjectStore, proxy: StoreProxy) -> None:
    proxy.rules = [Rule("hold", seconds=0.1)]
    assert create(store, "a") == "created"


def test_an_old_listing_lacks_new_objects(store: ObjectStore, proxy: StoreProxy) -> None:
    create(store, "old/a&b")
    snapshot = Rule("old_listing")
    for key in ("old/c&d", "new/e"):
        create(store, key)
    proxy.rules = [snapshot]
    assert keys(store) == ["old/a&b"]
    assert obstore.list_with_delimiter(store)["common_prefixes"] == ["old"]
    assert snapshot.fired == 2
    proxy.rules = []
    assert keys(store) == ["new/e", "old/a&b", "old/c&d"]


def test_a_lagging_listing_shows_objects_later(store: ObjectStore, proxy: StoreProxy) -> None:
    lag = Rule("old_listing", seconds=60)
    proxy.rules = [lag]
    create(store, "a")
    assert keys(store) == []
    lag.seconds = 0.1
    until(lambda: keys(store) == ["a"])


def test_requests_wait_up_to_the_delay(store: ObjectStore, proxy: StoreProxy) -> None:
    proxy.rules = [Rule("delay", seconds=0.2)]
    start = time.monotonic()
    for key in "abcde":
        assert create(store, key) == "created"
    assert time.monotonic() - start > 0.2  # five random times, 0.5 s on average


def test_a_rule_has_its_probability(store: ObjectStore, proxy: StoreProxy) -> None:
    rule = Rule("slow_down", probability=0.3)
    proxy.rules = [rule]
    ended = [create(store, str(number)) for number in range(100)]
    assert ended.count("GenericError") == rule.fired
    assert 15 <= rule.fired <= 45


def test_a_rule_ends_after_its_times(store: ObjectStore, proxy: StoreProxy) -> None:
    proxy.rules = [Rule("slow_down", times=2)]
    ended = [create(store, key) for key in "abc"]
    assert ended == ["GenericError", "GenericError", "created"]


def test_a_rule_applies_only_to_its_requests(store: ObjectStore, proxy: StoreProxy) -> None:
    proxy.rules = [Rule("expired", only=lambda request: request.path.endswith("/b"))]
    assert [create(store, key) for key in "abc"] == ["created", "PermissionDeniedError", "created"]


def test_the_proxy_counts_requests_and_bytes(store: ObjectStore, proxy: StoreProxy) -> None:
    create(store, "a", b"12345")
    obstore.get(store, "a").bytes()
    obstore.get(store, "a").bytes()
    assert proxy.traffic() == Traffic({"PUT": 1, "GET": 2}, bytes_in=5, bytes_out=10)
    keys(store)
    assert proxy.traffic().requests["LIST"] == 1


def test_a_server_that_has_ended_closes_connections(moto: ObjectServer, connect: Connect) -> None:
    with store_proxy("http://127.0.0.1:9") as proxy:
        assert create(connect(moto, proxy.url), "a") == "GenericError"
