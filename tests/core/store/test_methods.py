"""A sealed store answers as torch's own stores do, alone and through a PrefixStore."""

from __future__ import annotations

import gc
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from sealring.core.store import SealedStore
from sealring.core.store.sealed import REMEMBERED_NAMES, Freshness
from sealring.errors import Unsupported
from tests.core.store.server import KEYS, Server, tcp_store


@pytest.fixture(params=["tcp", "hash", "file"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Any]:
    """Returns two workers' views of one store."""
    stores: list[Any]
    if request.param == "tcp":
        first = tcp_store()
        stores = [first, first.clone()]
    elif request.param == "hash":
        stores = [HashStore()] * 2
    else:
        path = str(tmp_path / "store")
        stores = [dist.FileStore(path, 2), dist.FileStore(path, 2)]
    return SealedStore(stores[0], KEYS), SealedStore(stores[1], KEYS)


@pytest.fixture(params=["bare", "prefixed"])
def views(request: pytest.FixtureRequest, pair: tuple[Any, Any]) -> Any:
    if request.param == "bare":
        yield pair
    else:
        # `pair` keeps the sealed stores alive, because a PrefixStore does not.
        yield tuple(dist.PrefixStore("a", dist.PrefixStore("b", store)) for store in pair)


def test_values(views: Any) -> None:
    one, other = views
    assert not other.check(["key"])
    one.set("key", "text")
    one.set("bytes", b"\x00\xff" * 5000)
    one.set("empty", b"")
    assert other.check(["key", "bytes", "empty"])
    assert other.get("key") == b"text"
    assert other.get("bytes") == b"\x00\xff" * 5000
    assert other.get("empty") == b""
    other.set("key", "other text")
    assert other.get("key") == b"other text"
    assert one.get("key") == b"other text"
    assert one.delete_key("key") is True
    assert not other.check(["key"])
    one.set("key", "again")
    assert other.get("key") == b"again"


def test_compare_set(views: Any) -> None:
    one, other = views
    assert one.compare_set("key", "not there", "x") == b"not there"
    assert not one.check(["key"])
    assert one.compare_set("key", "", "first") == b"first"
    assert other.compare_set("key", "", "second") == b"first"
    assert other.compare_set("key", "first", "second") == b"second"
    assert one.compare_set("key", "first", "third") == b"second"
    assert one.get("key") == b"second"


def test_counters(views: Any) -> None:
    one, other = views
    assert one.add("count", 3) == 3
    assert other.add("count", -1) == 2
    assert other.check(["count"])
    other.wait(["count"], timedelta(seconds=30))
    assert one.get("count") == b"2"
    assert one.delete_key("count")
    assert not other.check(["count"])
    assert other.add("count", 1) == 1


def test_a_counter_can_be_read_by_who_never_added(views: Any) -> None:
    one, other = views
    one.add("count", 41)
    assert other.get("count") == b"41"


def test_a_key_is_a_counter_or_a_value(views: Any) -> None:
    one, other = views
    one.set("value", "5")
    with pytest.raises(Unsupported, match="holds a sealed value"):
        other.add("value", 1)
    assert one.get("value") == b"5"
    one.add("count", 5)
    with pytest.raises(Unsupported, match="is a counter"):
        other.compare_set("count", "5", "6")


def test_extended_methods(pair: Any) -> None:
    one = pair[0]
    if not one.has_extended_api():
        inside: Any = dist.PrefixStore("a", one)
        assert not inside.has_extended_api()
        return
    prefixed: Any = [dist.PrefixStore("a", store) for store in pair]
    for first, second in (pair, prefixed):
        assert second.has_extended_api()
        first.multi_set(["x", "y"], ["1", b"2"])
        assert second.multi_get(["y", "x"]) == [b"2", b"1"]
        for number, writer in enumerate([first, second, first, second]):
            writer.append("list", f"{number},")
            assert first.get("list") == "".join(f"{n}," for n in range(number + 1)).encode()
        first.set("list", "new")
        second.append("list", "+")
        assert second.get("list") == b"new+"


def test_number_of_keys(server: Server) -> None:
    worker = server.worker()
    before = worker.num_keys()
    worker.set("key", "value")
    assert worker.num_keys() == before + 1
    worker.add("count", 1)
    assert dist.PrefixStore("a", worker).num_keys() == before + 3


def test_what_is_not_served_reaches_no_server(server: Server) -> None:
    worker: Any = server.worker()
    before = server.store.num_keys()
    for call in (
        lambda: worker.queue_push("key", "value"),
        lambda: worker.queue_pop("key"),
        lambda: worker.queue_len("key"),
        lambda: worker.list_keys(),
    ):
        with pytest.raises(NotImplementedError):
            call()
    assert server.store.num_keys() == before


def test_waiting_ends(server: Server) -> None:
    one, other = server.worker(), server.worker()
    later = threading.Timer(0.1, lambda: other.set("key", "value"))
    later.start()
    one.wait(["key"], timedelta(seconds=60))
    assert one.get("key") == b"value"
    later.join()
    with pytest.raises(dist.DistStoreError):
        one.wait(["never"], timedelta(milliseconds=20))


def test_a_timeout_that_torch_sets_reaches_the_store(server: Server) -> None:
    sealed = SealedStore(server.store.clone(), KEYS)
    dist.PrefixStore("a", sealed).set_timeout(timedelta(milliseconds=20))
    assert sealed.timeout == timedelta(milliseconds=20)
    with pytest.raises(dist.DistStoreError):
        sealed.get("never")


def test_torchs_barrier(server: Server) -> None:
    stores = [server.worker() for _ in range(3)]
    for _ in range(2):
        ready = [
            threading.Thread(
                target=dist.distributed_c10d._store_based_barrier,
                args=(rank, dist.PrefixStore("p", store), "group", 3, timedelta(seconds=60)),
            )
            for rank, store in enumerate(stores)
        ]
        for thread in ready:
            thread.start()
        for thread in ready:
            thread.join(60)
            assert not thread.is_alive()


def test_clones_live_with_their_store(server: Server) -> None:
    sealed = server.worker()
    prefixed: Any = dist.PrefixStore("a", sealed)
    clone = prefixed.clone()
    gc.collect()
    clone.set("key", "value")
    assert sealed.get("a/key") == b"value"


@pytest.mark.threat("T11")
def test_many_threads_and_connections_raise_no_false_alarm() -> None:
    """Reads overtake each other, and writers do not know of each other."""
    store = SealedStore(HashStore(), KEYS)
    stores = [store, store.clone(), SealedStore(store.inner, KEYS)]
    store.set("key", "0")
    problems: list[BaseException] = []

    def work(mine: SealedStore, number: int) -> None:
        try:
            for step in range(150):
                match (step + number) % 4:
                    case 0:
                        mine.set("key", str(step))
                    case 1:
                        mine.append("key", "+")
                    case 2:
                        mine.compare_set("key", "0", "1")
                    case _:
                        mine.get("key")
        except BaseException as problem:
            problems.append(problem)

    threads = [
        threading.Thread(target=work, args=(stores[number % 3], number)) for number in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def test_memory_of_names_is_bounded() -> None:
    freshness = Freshness()
    for number in range(REMEMBERED_NAMES + 10):
        freshness.replaced(str(number), b"writer", 1)
    assert len(freshness.remembered) == REMEMBERED_NAMES
    assert freshness.seen("0").gone == {}
    assert freshness.seen("10").gone == {b"writer": 1}
