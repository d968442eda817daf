"""Either every pair is linked with the right keys, or every worker gets the same named error."""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import Any

import pytest

from sealring.core.handshake import SessionTable
from sealring.core.links import Link, build_mesh
from sealring.core.links.mesh import MeshAttempt
from sealring.core.links.settling import Settling
from sealring.errors import ConfigurationError, PeerUnreachable, Unsupported, WrongPeer, named
from tests.core.handshake.meeting import terms
from tests.core.identity.issuing import HOUR, NOW, Issuer
from tests.core.links.worlds import ISSUER, DictStore, World, address_key, world


def assert_linked(mesh: World) -> None:
    for rank in range(mesh.size):
        links = mesh.links(rank)
        assert [link.peer for link in links] == [r for r in range(mesh.size) if r != rank]
        for link in links:
            assert_pair(mesh, rank, link)


def assert_pair(mesh: World, rank: int, link: Link) -> None:
    back = next(one for one in mesh.links(link.peer) if one.peer == rank)
    assert link.send_key == back.receive_key != link.receive_key
    assert link.peer_group_key == mesh.mesh(link.peer).agreed.group_key(link.peer)
    assert link.host == f"host-{link.peer}"
    assert link.dialer is (rank > link.peer)
    assert (link.memory is None) == (back.memory is None)
    # The bare socket carries bytes at once, in both directions.
    link.socket.send(rank.to_bytes(2, "big"))
    back.socket.setblocking(True)
    back.socket.settimeout(10)
    assert back.socket.recv(100) == rank.to_bytes(2, "big")
    back.socket.setblocking(False)


@pytest.mark.parametrize(
    "options",
    [
        {"transport": "tcp"},
        {"transport": "shm"},
        {"transport": "auto"},
        {"transport": "tcp", "environ": {"SEALRING_ADDRESS": "::1"}},
        {"transport": "auto", "environ": {"SEALRING_ADDRESS": "lo"}},
        {"transport": "auto", "environ": {"MASTER_ADDR": "localhost"}},
    ],
)
def test_four_workers(options: dict[str, Any]) -> None:
    with world(4, **options) as mesh:
        mesh.start_all()
        mesh.join()
        assert_linked(mesh)
        for rank in range(4):
            for link in mesh.links(rank):
                assert (link.memory is None) == (options["transport"] == "tcp")


def test_sixteen_workers() -> None:
    """A large group begins with a tree of links; other links are made when they are needed."""
    with world(16) as mesh:
        mesh.start_all()
        mesh.join()
        assert [link.peer for link in mesh.links(0)] == [1, 2, 4, 8]
        assert [link.peer for link in mesh.links(6)] == [4, 7]
        assert sum(len(mesh.links(rank)) for rank in range(16)) == 2 * 15
        for rank in range(16):
            for link in mesh.links(rank):
                assert_pair(mesh, rank, link)
        agreed = {mesh.mesh(rank).agreed.transcript for rank in range(16)}
        assert len(agreed) == 1


def test_a_group_of_some() -> None:
    with world(6) as mesh:
        for rank in (5, 1, 3):
            mesh.start(rank, own_terms=mesh.terms(rank, members=(5, 1, 3)))
        mesh.join()
        assert [link.peer for link in mesh.links(3)] == [1, 5]


def test_a_group_of_one_needs_no_peer() -> None:
    store = DictStore()
    mesh = build_mesh(store, ISSUER.credentials(2), terms(2, members=(2,)), timeout=1)
    assert mesh.links == []
    assert len(mesh.agreed.group_key(2)) == 32
    assert store.values == {}


@pytest.mark.threat("K15")
def test_the_sockets_are_fit_for_records() -> None:
    with world(2) as mesh:
        mesh.start_all()
        mesh.join()
        for rank in (0, 1):
            (link,) = mesh.links(rank)
            assert not link.socket.getblocking()
            tcp = socket.IPPROTO_TCP
            assert link.socket.getsockopt(tcp, socket.TCP_NODELAY)
            assert link.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert link.socket.getsockopt(tcp, socket.TCP_KEEPCNT) == 9
            assert link.address.startswith("127.0.0.1:")
            assert "key" not in repr(link)


def test_workers_need_not_want_the_same_transport() -> None:
    with world(2) as mesh:
        mesh.start(0, transport="tcp")
        mesh.start(1, transport="auto")
        mesh.join()
        assert_linked(mesh)
        assert mesh.links(0)[0].memory is mesh.links(1)[0].memory is None


@pytest.mark.parametrize("demanding", [0, 1])
def test_shared_memory_that_is_demanded_and_not_available(demanding: int) -> None:
    with world(2) as mesh:
        mesh.start(demanding, transport="shm")
        mesh.start(1 - demanding, transport="tcp")
        mesh.join()
        assert mesh.errors() == dict.fromkeys(range(2), Unsupported.code)


# ---- what is wrong at one worker is reported to all workers -----------------------------------


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"epoch": "9"}, "handshake.wrong_group"),
        ({"settings": {"record_bytes": 1}}, "handshake.settings_mismatch"),
        ({"members": (0, 1, 3, 2)}, "handshake.wrong_group"),
    ],
)
@pytest.mark.parametrize("odd", [0, 3])
@pytest.mark.threat("D3")
def test_one_worker_with_other_terms(changes: dict[str, Any], error: str, odd: int) -> None:
    with world(4, timeout=8.0) as mesh:
        mesh.start_all(odd)
        mesh.start(odd, own_terms=mesh.terms(odd, **changes))
        mesh.join()
        assert mesh.errors() == dict.fromkeys(range(4), error)


@pytest.mark.threat("J6")
def test_one_worker_with_another_world_size() -> None:
    with world(3, timeout=8.0) as mesh:
        mesh.start_all(2)
        mesh.start(
            2,
            credentials=ISSUER.credentials(2, world=4),
            own_terms=mesh.terms(2, world=4, members=(0, 1, 2, 3)),
        )
        mesh.join()
        assert mesh.errors() == dict.fromkeys(range(3), "handshake.wrong_world_size")


@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.threat("J28")
def test_one_worker_whose_certificate_has_expired(odd: int) -> None:
    # The others wait for a worker with a valid certificate; at the timeout they name this one.
    with world(3, timeout=2.0) as mesh:
        mesh.start_all(odd)
        mesh.start(odd, credentials=ISSUER.credentials(odd, world=3, now=NOW - 5 * HOUR))
        mesh.join()
        assert mesh.errors() == dict.fromkeys(range(3), "handshake.certificate_expired")


@pytest.mark.parametrize("double", [0, 1])
@pytest.mark.threat("J26")
def test_two_workers_with_one_rank(double: int) -> None:
    """Rank 0 finds two workers of rank 1, which both dial; two of rank 0 meet through the store."""
    # Rank 2 stays away, so that the first of the two cannot finish before the second comes.
    with world(2 + double, timeout=10.0) as mesh:
        mesh.start(double, name="first")
        if double == 0:
            mesh.store.address(0)
        mesh.start(double, name="second")
        if double == 1:
            mesh.start(0)
        mesh.join()
        assert set(mesh.errors().values()) == {"handshake.duplicate_rank"}


# ---- which worker is missing, and why -----------------------------------------------------------


def test_a_worker_that_does_not_come() -> None:
    with world(3, timeout=1.0) as mesh:
        mesh.start_all(1)
        mesh.join()
        assert mesh.errors() == {0: "handshake.peer_unreachable", 2: "handshake.peer_unreachable"}
        said = str(mesh.outcomes[0])
        assert "rank 1 did not appear within 1 s" in said


@pytest.mark.parametrize("stranger", [0, 1])
def test_a_worker_of_another_authority(stranger: int) -> None:
    with world(2, timeout=1.5) as mesh:
        mesh.start(1 - stranger)
        mesh.start(stranger, credentials=Issuer("other").credentials(stranger, world=2))
        mesh.join()
        assert mesh.errors() == {0: "handshake.unknown_authority", 1: "handshake.unknown_authority"}


@pytest.mark.threat("J4")
def test_a_worker_of_another_job() -> None:
    with world(2, timeout=1.5) as mesh:
        mesh.start(0)
        mesh.start(
            1,
            credentials=ISSUER.credentials(1, world=2, job="other"),
            own_terms=mesh.terms(1, job="other"),
        )
        mesh.join()
        assert mesh.errors() == {0: "handshake.wrong_job", 1: "handshake.wrong_job"}


@pytest.mark.threat("S10")
def test_a_strangers_failure_does_not_stop_the_others() -> None:
    """A worker of another authority is refused, and the right worker can still join."""
    with world(2) as mesh:
        mesh.start(0)
        other = Issuer("other").credentials(1, world=2)
        mesh.start(1, name="stranger", credentials=other, timeout=1.0)
        end = time.monotonic() + 10
        while "stranger" not in mesh.outcomes:
            assert time.monotonic() < end
            time.sleep(0.01)
        mesh.start(1)
        mesh.join()
        assert named(mesh.outcomes.pop("stranger")) == "handshake.unknown_authority"
        assert_linked(mesh)


@pytest.mark.threat("J5", "S4")
def test_a_worker_that_reached_another_rank() -> None:
    sessions = SessionTable()
    with world(3, timeout=8.0) as mesh:
        mesh.start(0)
        mesh.start(1, sessions=sessions)
        # Rank 1 is linked with rank 0, so it will hear why the others end.
        while not sessions.handshakes:
            assert 1 not in mesh.outcomes
            time.sleep(0.005)
        host, port = mesh.store.address(1)
        lie = f'[["{host}",{port}]]'.encode()
        mesh.store.overlay |= {address_key(0): lie, address_key(2): lie}
        mesh.start(2)
        mesh.join()
        assert mesh.errors() == dict.fromkeys(range(3), "handshake.wrong_rank")
        assert named(mesh.outcomes[2]) == "handshake.wrong_rank"
        assert isinstance(mesh.outcomes[2], WrongPeer)
        assert mesh.outcomes[2].peer == 0, "the rank that it did not find"


# ---- what is refused before anything starts -----------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"transport": "udp"},
        {"terms": terms(1)},
        {"environ": {"SEALRING_ADDRESS": "0.0.0.0"}},
        {"environ": {"SEALRING_ADDRESS": "192.0.2.1"}},
    ],
)
def test_a_call_that_cannot_work(options: dict[str, Any]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    arguments: dict[str, Any] = {
        "store": DictStore(),
        "credentials": ISSUER.credentials(0),
        "terms": terms(0),
        "timeout": 1.0,
        "environ": {},
    } | options
    with pytest.raises(ConfigurationError):
        build_mesh(**arguments)
    assert len(os.listdir("/proc/self/fd")) == before


def test_neighbours_that_come_later_are_told_why_there_is_no_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 5 fails and tells rank 4; rank 6, which dials rank 4, and rank 0 join later."""
    staying = threading.Event()
    plain = MeshAttempt.stay_to_tell

    def stay(self: MeshAttempt) -> Any:
        if self._terms.rank == 4:
            staying.set()
        return plain(self)

    linked = Settling.say_linked

    def fail(self: Settling, links: Any) -> None:
        if self._terms.rank == 5:
            raise PeerUnreachable("the disk is full")
        linked(self, links)

    monkeypatch.setattr(Settling, "say_linked", fail)
    monkeypatch.setattr(MeshAttempt, "stay_to_tell", stay)
    with world(12, timeout=8.0) as mesh:
        mesh.start(4)
        mesh.start(5)
        staying.wait(4.0)
        mesh.start(6)
        mesh.start(0)
        mesh.join()
        for rank in (0, 4, 6):
            assert isinstance(mesh.outcomes[rank], PeerUnreachable)
            assert "the disk is full" in str(mesh.outcomes[rank]), rank


def test_a_death_after_linked_ends_the_attempt_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 4 still lacks other links, but must not wait for rank 5 to return."""
    plain, say_linked = MeshAttempt.abort, Settling.say_linked

    def die(self: Settling, links: Any) -> None:
        say_linked(self, links)
        raise MemoryError

    def abort(self: MeshAttempt, error: BaseException) -> None:
        if isinstance(error, MemoryError):  # as the kernel does for a killed process
            for link in self._waiting.take_all(PeerUnreachable("dead")):
                link.channel.socket.close()
            self._stop()
        else:
            plain(self, error)

    monkeypatch.setattr(Settling, "say_linked", die)
    monkeypatch.setattr(MeshAttempt, "abort", abort)
    with world(12, timeout=8.0) as mesh:
        mesh.start(4)
        mesh.start(5)
        mesh.join()
        assert isinstance(mesh.outcomes[4], PeerUnreachable)
        assert "went away" in str(mesh.outcomes[4])
