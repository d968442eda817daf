"""Strangers connect and the store lies, but the job still comes up."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable

import pytest

from sealring.core.handshake import dial
from sealring.errors import MalformedSetup, PeerUnreachable, WrongPeer, named
from tests.core.handshake.meeting import soon
from tests.core.links.test_mesh import assert_linked
from tests.core.links.worlds import ISSUER, DictStore, SilentStore, World, address_key, world


def stranger(address: tuple[str, int], send: Callable[[socket.socket], None]) -> threading.Thread:
    """Connects, calls `send`, and stays until the listener closes the connection."""

    def run() -> None:
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=20) as sock:
            send(sock)
            while sock.recv(65536):
                pass

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def say_nothing(_: socket.socket) -> None:
    pass


def talk_http(sock: socket.socket) -> None:
    sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")


def flood(sock: socket.socket) -> None:
    for _ in range(64):
        sock.sendall(b"\xa5" * (1 << 16))


def claim_a_huge_record(sock: socket.socket) -> None:
    sock.sendall(b"\x16\x03\x01\x40\x00\x01\xff\xff\xff" + bytes(1 << 14))


def hang_up(sock: socket.socket) -> None:
    sock.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("behaviour", [say_nothing, talk_http, flood, claim_a_huge_record, hang_up])
@pytest.mark.threat("S6")
def test_strangers_do_no_harm(
    behaviour: Callable[[socket.socket], None], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "sealring"), world(3) as mesh:
        mesh.start(0)
        strangers = [stranger(mesh.store.address(0), behaviour) for _ in range(5)]
        if behaviour is not say_nothing:
            for thread in strangers:
                thread.join()
        mesh.start(1)
        mesh.start(2)
        mesh.join()
        assert_linked(mesh)
        for thread in strangers:
            thread.join()
    # Silent strangers may still be waiting when the group is complete.
    assert behaviour is say_nothing or "was refused" in caplog.text


@pytest.mark.threat("S12")
def test_a_member_that_stops_half_way_can_come_again() -> None:
    """The same worker connects, is admitted and vanishes; then it joins properly."""
    with world(2) as mesh:
        own = mesh.terms(1)
        mesh.start(0)
        sock = socket.create_connection(mesh.store.address(0))

        def vanish(*_: object) -> None:
            sock.shutdown(socket.SHUT_RDWR)
            raise PeerUnreachable("it stops before its accept")

        with pytest.raises(PeerUnreachable, match="before its accept"):
            dial(sock, ISSUER.credentials(1, world=2), own, 0, soon(), offer=vanish)
        mesh.start(1, own_terms=own)
        mesh.join()
        assert_linked(mesh)


@pytest.mark.parametrize("offer", [{}, {"socket": "0" * 64}, {"socket": "0" * 64, "token": 1}])
def test_a_member_whose_accept_offers_what_is_no_memory(offer: dict[str, object]) -> None:
    with world(2) as mesh:
        mesh.start(0)
        sock = socket.create_connection(mesh.store.address(0))
        own = mesh.terms(1)
        channel = dial(sock, ISSUER.credentials(1, world=2), own, 0, soon(), offer=lambda *_: offer)
        with pytest.raises(MalformedSetup):
            channel.receive(soon())
        channel.close(until=0)
        mesh.join()
        assert isinstance(mesh.outcomes[0], MalformedSetup)
        assert mesh.outcomes[0].peer == 1


@pytest.mark.parametrize(
    "lie",
    [
        b'[["127.0.0.1",1]]',
        b"rubbish",
        b"[" * 5000,
        b'[["0.0.0.0",80]]',
    ],
)
@pytest.mark.threat("S3")
def test_a_stale_or_wrong_address_is_corrected(lie: bytes) -> None:
    with world(2) as mesh:
        key = address_key(0)
        mesh.store.overlay[key] = lie
        mesh.start(1)
        mesh.start(0)
        mesh.store.address(0)
        del mesh.store.overlay[key]
        mesh.join()
        assert_linked(mesh)


@pytest.mark.threat("S3")
def test_an_address_that_was_overwritten_is_put_back() -> None:
    with world(2) as mesh:
        mesh.start(0)
        mesh.store.address(0)
        mesh.store.set(address_key(0), '[["127.0.0.1",1]]')
        mesh.start(1)
        mesh.join()
        assert_linked(mesh)


@pytest.mark.threat("S9")
def test_an_address_that_leads_to_a_silent_server_is_put_back() -> None:
    with world(2, timeout=60.0) as mesh, socket.create_server(("127.0.0.1", 0)) as silent:
        mesh.start(0)
        right = mesh.store.address(0)
        host, port = silent.getsockname()
        mesh.store.set(address_key(0), f'[["{host}",{port}]]')
        peer, _ = silent.accept()  # rank 0 checks who is at that address, and waits for an answer
        with peer:
            assert mesh.store.address(0) == right, "the address is corrected before the answer"
            mesh.start(1)
            mesh.join()
        assert_linked(mesh)


@pytest.mark.parametrize(
    ("address", "problem"),
    [("255.255.255.255", "Network is unreachable"), ("127.0.0.1", "Connection refused")],
)
def test_an_address_that_cannot_be_reached_is_named_with_the_networks_answer(
    address: str, problem: str
) -> None:
    """No TCP connection can go to a broadcast address, whatever routes the machine has."""
    with world(2, timeout=1.0) as mesh:
        mesh.store.overlay[address_key(0)] = f'[["{address}",1]]'.encode()
        mesh.start(1)
        mesh.join()
        assert isinstance(mesh.outcomes[1], PeerUnreachable)
        assert mesh.outcomes[1].peer == 0
        told = f"rank 0 cannot be connected to at {address} port 1: {problem}"
        assert told in str(mesh.outcomes[1])
        assert "firewall" in str(mesh.outcomes[1])


def test_a_rank_that_no_other_dials_names_the_firewall() -> None:
    with world(2, timeout=0.5) as mesh:
        mesh.start(0)
        mesh.join()
        assert isinstance(mesh.outcomes[0], PeerUnreachable)
        assert mesh.outcomes[0].peer == 1
        assert "this worker listens at 127.0.0.1 port" in str(mesh.outcomes[0])
        assert "firewall" in str(mesh.outcomes[0])


def until_logged(caplog: pytest.LogCaptureFixture, text: str) -> None:
    end = time.monotonic() + 15
    while text not in caplog.text:
        assert time.monotonic() < end, caplog.text
        time.sleep(0.01)


def shown(address: tuple[str, int]) -> bytes:
    return f'[["{address[0]}",{address[1]}]]'.encode()


@pytest.mark.threat("S4")
def test_an_address_that_leads_to_another_member_ends_no_group(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "sealring"), world(3) as mesh:
        mesh.start(0)
        mesh.start(1)
        mesh.store.address(0)
        mesh.store.overlay[address_key(0)] = shown(mesh.store.address(1))
        mesh.start(2)  # rank 2 reaches rank 1 in place of rank 0
        until_logged(caplog, "was to be rank 0 and proved to be rank 1")
        mesh.store.overlay.clear()
        mesh.join()
        assert_linked(mesh)


@pytest.mark.threat("S4")
def test_an_address_that_leads_into_another_group_ends_neither(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        caplog.at_level(logging.WARNING, "sealring"),
        world(2) as one,
        contextlib.closing(World(2)) as other,
    ):
        other.start(0, own_terms=other.terms(0, epoch="9"))
        other.store.address(0)
        one.start(0)
        one.store.address(0)
        one.store.overlay[address_key(0)] = shown(other.store.address(0))
        one.start(1)
        until_logged(caplog, "rank 0 in group 'default', epoch '9'")
        one.store.overlay.clear()
        other.start(1, own_terms=other.terms(1, epoch="9"))
        one.join()
        other.join()
        assert_linked(one)
        assert_linked(other)


class Ending(DictStore):
    """A store whose process ends when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = False

    def check(self, keys: list[str]) -> bool:
        if self.ended:
            raise RuntimeError("Connection reset by peer")
        return super().check(keys)


def test_a_refusal_counts_where_the_store_ends_with_the_one_that_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Rank 0 hosts the store and is in another group; its refusal still counts."""
    with (
        caplog.at_level(logging.WARNING, "sealring"),
        world(2, timeout=40.0) as one,
        contextlib.closing(World(2, timeout=12.0)) as other,
    ):
        one.store = other.store = store = Ending()
        other.start(0, own_terms=other.terms(0, epoch="9"))
        one.start(1)
        until_logged(caplog, "rank 0 in group 'default', epoch '9'")
        store.ended = True
        one.join()
        assert named(one.outcomes[1]) == "handshake.wrong_group", one.outcomes[1]
        other.join()


def test_members_that_list_different_members_end_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Wrong addresses are not the cause: both ends report the disagreement and neither retries."""
    with world(3, timeout=30.0) as mesh, caplog.at_level(logging.WARNING, "sealring"):
        mesh.start(0)
        mesh.start(1, own_terms=mesh.terms(1, members=(0, 1)))
        mesh.start(2)
        mesh.join()
        assert mesh.errors() == dict.fromkeys(range(3), "handshake.wrong_group")
        for error in mesh.outcomes.values():
            assert named(error) == "handshake.wrong_group"
            assert isinstance(error, WrongPeer)
            assert not error.misdirected


@pytest.mark.threat("S4")
def test_a_workers_own_address_in_another_group_is_no_second_worker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A rank checks who answers at its address in the store; here that is the rank itself."""
    with (
        caplog.at_level(logging.WARNING, "sealring"),
        world(2) as one,
        contextlib.closing(World(2)) as other,
    ):
        other.start(0, own_terms=other.terms(0, epoch="9"))
        other.store.address(0)
        one.start(0)
        one.store.address(0)
        one.store.overlay[address_key(0)] = shown(other.store.address(0))
        until_logged(caplog, "rank 0 in group 'default', epoch '9'")
        one.store.overlay.clear()
        one.start(1)
        other.start(1, own_terms=other.terms(1, epoch="9"))
        one.join()
        other.join()
        assert_linked(one)
        assert_linked(other)


@pytest.mark.threat("S5")
def test_a_store_that_fails() -> None:
    class Broken:
        def set(self, *_: object) -> bytes:
            raise OSError("store is gone")

        get = check = set

    mesh = World(2)
    mesh.store = Broken()  # type: ignore[assignment]
    mesh.start(0)
    mesh.start(1, timeout=0.5)
    mesh.close()
    assert mesh.errors() == {0: "handshake.peer_unreachable", 1: "handshake.peer_unreachable"}
    for outcome in mesh.outcomes.values():
        assert "store is gone" in str(outcome)


@pytest.mark.parametrize("asked_for", ["set", "check", "get"])
@pytest.mark.threat("S5")
def test_a_store_that_answers_no_more(asked_for: str) -> None:
    """torch's client would wait for the store without end."""
    with SilentStore(asked_for) as store:
        mesh = World(2, timeout=0.5)
        mesh.store = store
        mesh.start_all()
        mesh.close()
        assert mesh.errors() == {0: "handshake.peer_unreachable", 1: "handshake.peer_unreachable"}
        assert not store.ended.is_set()
