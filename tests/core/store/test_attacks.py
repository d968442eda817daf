"""The store's server is the adversary: it reads everything that it holds and answers anything."""

from __future__ import annotations

import pickle
import time
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from sealring import _native
from sealring.core.links.rendezvous import AddressBook
from sealring.core.store import SealedStore
from sealring.core.store.sealed import store_under_secret
from sealring.core.store.values import PART_OVERHEAD, Kind, StoreKeys
from sealring.errors import (
    ConfigurationError,
    PeerUnreachable,
    StoreError,
)
from tests.codes import coded
from tests.core.store.server import KEYS, Server
from tests.workers import SECRET

SECRET_NAME = "a name that tells something"
SECRET_VALUE = b"a value that tells even more"


@pytest.mark.threat("T1")
def test_names_and_values_cannot_be_read(server: Server) -> None:
    worker = server.worker()
    worker.set(SECRET_NAME, SECRET_VALUE)
    worker.append(SECRET_NAME, SECRET_VALUE)
    worker.add(f"{SECRET_NAME} as well", 1)
    worker.compare_set("another", "", SECRET_VALUE)
    names = server.store.list_keys()
    everything = b"".join([name.encode() + bytes(server.store.get(name)) for name in names])
    for at in range(len(SECRET_VALUE) - 4):
        assert SECRET_VALUE[at : at + 4] not in everything
    for at in range(len(SECRET_NAME) - 4):
        assert SECRET_NAME[at : at + 4].encode() not in everything


@pytest.mark.threat("T1")
def test_equal_values_look_different(server: Server) -> None:
    worker = server.worker()
    worker.set("one", SECRET_VALUE)
    worker.set("two", SECRET_VALUE)
    first = server.held("one")
    worker.set("one", SECRET_VALUE)
    assert len({first, server.held("one"), server.held("two")}) == 3


@pytest.mark.threat("T2")
def test_every_byte_changed_in_turn(server: Server) -> None:
    worker = server.worker()
    worker.set("key", SECRET_VALUE)
    good = server.held("key")
    assert len(good) == PART_OVERHEAD + len(SECRET_VALUE)
    for at in range(len(good)):
        server.put("key", good[:at] + bytes([good[at] ^ 0x01]) + good[at + 1 :])
        with pytest.raises(StoreError, check=coded("store.tampered_value")):
            worker.get("key")
    server.put("key", good)
    assert worker.get("key") == SECRET_VALUE


@pytest.mark.threat("T2")
def test_cut_at_every_byte_and_lengthened(server: Server) -> None:
    worker = server.worker()
    worker.set("key", SECRET_VALUE)
    good = server.held("key")
    for end in range(len(good)):
        server.put("key", good[:end])
        with pytest.raises(StoreError, check=coded("store.tampered_value")):
            worker.get("key")
    server.put("key", good + b"\x00")
    with pytest.raises(StoreError, check=coded("store.tampered_value")):
        worker.get("key")


@pytest.mark.parametrize("raw", [b"", b"5", b"plain text", pickle.dumps([1, 2]), bytes(4096)])
@pytest.mark.threat("T2")
def test_a_value_that_is_not_sealed(server: Server, raw: bytes) -> None:
    worker = server.worker()
    server.put("key", raw)
    for call in (
        lambda: worker.get("key"),
        lambda: worker.multi_get(["key"]),
    ):
        with pytest.raises(StoreError, check=coded("store.tampered_value")):
            call()
    if raw:  # torch's compare_set takes an empty value for a missing one
        with pytest.raises(StoreError, check=coded("store.tampered_value")):
            worker.compare_set("key", raw, "x")
        with pytest.raises(StoreError, check=coded("store.tampered_value")):
            worker.add("key", 1)


@pytest.mark.threat("T2")
def test_a_value_moved_to_another_key(server: Server) -> None:
    worker = server.worker()
    worker.set("one", "1")
    worker.set("two", "2")
    server.put("two", server.held("one"))
    with pytest.raises(
        StoreError, match="no worker of this job put there", check=coded("store.tampered_value")
    ):
        worker.get("two")


@pytest.mark.threat("T2")
def test_values_exchanged_in_one_answer(server: Server) -> None:
    worker = server.worker()
    worker.multi_set(["one", "two"], ["1", "2"])
    one, two = server.held("one"), server.held("two")
    server.put("one", two)
    server.put("two", one)
    with pytest.raises(StoreError, check=coded("store.tampered_value")):
        worker.multi_get(["one", "two"])


class FewerAnswers(HashStore):
    def multi_get(self, keys: Any) -> Any:
        return super().multi_get(keys)[:-1]


@pytest.mark.threat("T2")
def test_fewer_values_than_keys() -> None:
    worker = SealedStore(FewerAnswers(), KEYS)
    worker.multi_set(["one", "two"], ["1", "2"])
    with pytest.raises(
        StoreError, match="1 values for 2 keys", check=coded("store.tampered_value")
    ):
        worker.multi_get(["one", "two"])


@pytest.mark.threat("T3")
def test_a_number_is_never_taken_for_a_value(server: Server) -> None:
    worker = server.worker()
    worker.set("key", "value")
    server.store.set(KEYS.counter_name("key"), "1000")
    assert worker.get("key") == b"value"
    server.store.delete_key(KEYS.value_name("key"))
    assert not worker.check(["key"])
    server.store.add(KEYS.value_name("key"), 7)
    with pytest.raises(StoreError, check=coded("store.tampered_value")):
        worker.get("key")


@pytest.mark.threat("T3")
def test_the_mark_of_a_counter_moved_to_a_value(server: Server) -> None:
    worker = server.worker()
    worker.set("key", "value")
    worker.add("count", 1)
    server.put("key", server.held("count"))
    with pytest.raises(StoreError, check=coded("store.tampered_value")):
        worker.get("key")


def test_a_counter_is_what_the_server_says(server: Server) -> None:
    """The documented limit: numbers are neither secret nor protected."""
    worker = server.worker()
    worker.add("count", 1)
    assert server.store.get(KEYS.counter_name("count")) == b"1"
    server.store.set(KEYS.counter_name("count"), "100")
    assert worker.add("count", 1) == 101


@pytest.mark.threat("T5")
def test_a_value_its_reader_saw_replaced(server: Server) -> None:
    one, other = server.worker(), server.worker()
    one.set("key", "old")
    old = server.held("key")
    assert other.get("key") == b"old"
    one.set("key", "new")
    assert other.get("key") == b"new"
    server.put("key", old)
    with pytest.raises(StoreError, check=coded("store.replayed_value")):
        other.get("key")


@pytest.mark.threat("T5")
def test_a_value_of_one_writer_that_another_had_replaced(server: Server) -> None:
    one, other, reader = server.worker(), server.worker(), server.worker()
    one.set("key", "old")
    old = server.held("key")
    assert reader.get("key") == b"old"
    other.set("key", "new")
    assert reader.get("key") == b"new"
    server.put("key", old)
    with pytest.raises(StoreError, check=coded("store.replayed_value")):
        reader.get("key")


@pytest.mark.parametrize("replace", ["set", "compare_set", "delete_key"])
@pytest.mark.threat("T5")
def test_a_writer_knows_what_it_replaced_itself(server: Server, replace: str) -> None:
    worker = server.worker()
    worker.set("key", "old")
    old = server.held("key")
    match replace:
        case "set":
            worker.set("key", "new")
        case "compare_set":
            worker.compare_set("key", "old", "new")
        case _:
            worker.delete_key("key")
    server.put("key", old)
    with pytest.raises(StoreError, check=coded("store.replayed_value")):
        worker.get("key")


@pytest.mark.threat("T6")
def test_what_was_appended_cannot_be_cut_reordered_or_repeated(server: Server) -> None:
    writer, reader = server.worker(), server.worker()
    ends = []
    for text in ("a", "b", "c"):
        writer.append("key", text)
        ends.append(len(server.held("key")))
    good = server.held("key")
    assert reader.get("key") == b"abc"
    first, second, third = good[: ends[0]], good[ends[0] : ends[1]], good[ends[1] :]
    for forged in (first + second, first, first + third + second, first + second + third + third):
        server.put("key", forged)
        with pytest.raises(StoreError, check=coded("store.replayed_value")):
            reader.get("key")
    for forged in (first + third + second, first + first):
        server.put("key", forged)
        with pytest.raises(
            StoreError, check=coded("store.replayed_value")
        ):  # the order also shows to a reader that never saw the value
            server.worker().get("key")


@pytest.mark.threat("T6")
def test_values_joined_to_one(server: Server) -> None:
    worker = server.worker()
    worker.set("key", "one")
    one = server.held("key")
    worker.set("key", "two")
    server.put("key", one + server.held("key"))
    with pytest.raises(
        StoreError, match="do not make one value", check=coded("store.tampered_value")
    ):
        worker.get("key")


def test_an_older_value_to_a_newcomer_is_not_noticed(server: Server) -> None:
    """The documented limit: a reader that has seen nothing newer cannot notice it."""
    worker = server.worker()
    worker.set("key", "old")
    old = server.held("key")
    worker.set("key", "new")
    server.put("key", old)
    assert server.worker().get("key") == b"old"


class Restless(HashStore):
    """A store that changes its value each time after a worker has looked."""

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return bytes(super().get(key)) if super().check([key]) else b"x"


@pytest.mark.threat("T8")
def test_a_store_that_never_exchanges() -> None:
    worker = SealedStore(Restless(), KEYS)
    worker.set("key", "value")
    with pytest.raises(StoreError, match="changed its value 1000 times"):
        worker.compare_set("key", "value", "other")


ENVIRONMENT = {
    "SEALRING_SECRET": SECRET,
    "TORCHELASTIC_RUN_ID": "run",
    "TORCHELASTIC_RESTART_COUNT": "1",
}


@pytest.mark.parametrize(
    "change",
    [
        {"SEALRING_SECRET": SECRET.replace("f", "e")},
        {"SEALRING_JOB": "other"},
        {"TORCHELASTIC_RUN_ID": "other"},
        {"TORCHELASTIC_RESTART_COUNT": "2"},
    ],
    ids=["secret", "job", "run", "restart"],
)
@pytest.mark.threat("T4")
def test_values_of_another_job_run_or_restart_do_not_open(change: dict[str, str]) -> None:
    plain = HashStore()
    ours = store_under_secret(plain, ENVIRONMENT)
    theirs = store_under_secret(plain, ENVIRONMENT | change)
    ours.set("key", "value")
    assert store_under_secret(plain, ENVIRONMENT).get("key") == b"value"
    assert not theirs.check(["key"])  # the two stores do not even use one name
    plain.set(theirs._keys.value_name("key"), plain.get(ours._keys.value_name("key")))  # type: ignore[arg-type]
    with pytest.raises(StoreError, check=coded("store.tampered_value")):
        theirs.get("key")


def test_without_a_secret_there_is_no_key_before_the_group() -> None:
    with pytest.raises(ConfigurationError, match="sealed_store"):
        store_under_secret(HashStore(), {})


@pytest.mark.threat("T7")
def test_a_forged_address_is_refused_and_read_again(server: Server) -> None:
    """A group over a sealed store treats forged addresses as one over a plain store does."""
    until = time.monotonic() + 60
    book, others = (AddressBook(server.worker(), "1", until) for _ in range(2))
    book.publish(0, [("127.0.0.1", 1)])
    assert others.lookup(0) == (("127.0.0.1", 1),)
    server.put("sealring/1/address/0", b'[["127.0.0.1",2]]')
    for each in (book, others):
        with pytest.raises(PeerUnreachable, match=r"no worker of this job|not sealed|has more"):
            each.lookup(0)
    book.publish(0, [("127.0.0.1", 1)])
    assert others.lookup(0) == (("127.0.0.1", 1),)


def test_printing_keys_shows_none() -> None:
    text = repr(KEYS)
    for key in (KEYS.name_key, KEYS.counter_key, KEYS.value_key):
        assert bytes(key).hex() not in text
        assert repr(bytes(key)) not in text


def test_a_context_is_not_another_one_spelled_differently() -> None:
    contexts = [["a", "b"], ["ab"], ["a", "b", ""], ["", "a", "b"], []]
    names = {
        StoreKeys.derive(_native.Secret(bytes(range(32))), context).value_name("key")
        for context in contexts
    }
    assert len(names) == len(contexts)


@pytest.mark.threat("T2")
def test_a_part_says_what_it_is(server: Server) -> None:
    """The kind is authenticated: a part that was appended cannot pass for a first part."""
    sealed = KEYS.seal(Kind.APPENDED, KEYS.value_name("key"), bytes(16), 1, b"x")
    server.put("key", sealed[:3] + bytes([Kind.VALUE]) + sealed[4:])
    with pytest.raises(StoreError, check=coded("store.tampered_value")):
        server.worker().get("key")
