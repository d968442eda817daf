"""The ports on which a worker listens, and the addresses that it gives to others."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack

import pytest

from sealring.core.handshake.terms import PipeName
from sealring.core.links import Mesh
from sealring.core.links.addresses import Reach, read_advertised, read_ports, read_reach
from sealring.core.links.dialer import Dialer
from sealring.core.links.listener import listen_at
from sealring.core.links.rendezvous import Address, parse_addresses
from sealring.errors import ConfigurationError, PeerUnreachable
from tests.core.links.worlds import World, address_key

LOOPBACK = {"SEALRING_ADDRESS": "127.0.0.1"}


@pytest.mark.parametrize(
    ("written", "ports"),
    [
        ("29600", (29600,)),
        ("29600-29602", (29600, 29601, 29602)),
        ("29700, 29600-29601", (29700, 29600, 29601)),
        ("1,65535", (1, 65535)),
        ("", ()),
    ],
)
def test_ports(written: str, ports: tuple[int, ...]) -> None:
    assert read_ports({"SEALRING_PORTS": written}) == ports


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("0", "0 is not within 1 to 65535"),
        ("0-10", "0-10 is not within 1 to 65535"),
        ("65535-65536", "65535-65536 is not within 1 to 65535"),
        ("99999", "99999 is not within 1 to 65535"),
        ("29603-29600", "write 29600-29603: a range begins with its lowest port"),
        ("29600,", "'' is no port and no range"),
        (",", "'' is no port and no range"),
        ("-", "'-' is no port and no range"),
        ("29600-", "'29600-' is no port and no range"),
        ("-1", "'-1' is no port and no range"),
        ("http", "'http' is no port and no range"),
        ("29600:29603", "'29600:29603' is no port and no range"),
        ("٢", "is no port and no range"),
        ("29600-29610,29605", "it has port 29605 twice"),
    ],
)
def test_what_are_no_ports(written: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        read_ports({"SEALRING_PORTS": written})
    assert f"SEALRING_PORTS is {written!r}; " in str(refused.value)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("written", "address", "ports"),
    [
        ("203.0.113.7", "203.0.113.7", ()),
        ("203.0.113.7:41000-41001", "203.0.113.7", (41000, 41001)),
        ("203.0.113.7:41001,41000", "203.0.113.7", (41001, 41000)),
        ("2001:db8::7", "2001:db8::7", ()),
        ("[2001:db8::7]", "2001:db8::7", ()),
        ("[2001:db8::7]:41000-41001", "2001:db8::7", (41000, 41001)),
        ("::ffff:203.0.113.7", "203.0.113.7", ()),
        ("[::ffff:cb00:7107]:41000-41001", "203.0.113.7", (41000, 41001)),
    ],
)
def test_an_address_from_outside(written: str, address: str, ports: tuple[int, ...]) -> None:
    assert read_advertised({"SEALRING_ADVERTISE": written}, [29600, 29601]) == (address, ports)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (":29600", "give the IP address at which peers reach this machine"),
        ("[]:29600", "give the IP address at which peers reach this machine"),
        ("203.0.113.7:", "give the IP address at which peers reach this machine"),
        ("gpu1.example.org", "A name is not taken, because it can mean another address elsewhere"),
        ("gpu1.example.org:29600-29601", "A name is not taken"),
        ("https://203.0.113.7", "give the IP address"),
        ("203.0.113.7,203.0.113.8", "give the IP address"),
        ("0.0.0.0", "0.0.0.0 is none"),
        ("[::]:29600-29601", ":: is none"),
        ("::ffff:0.0.0.0", "0.0.0.0 is none"),
        ("169.254.1.2", "169.254.1.2 is none"),
        ("fe80::1", "fe80::1 is none"),
        ("fe80::1%eth0", "is none"),
        ("224.0.0.1", "224.0.0.1 is none"),
        ("203.0.113.7:0-1", "0-1 is not within 1 to 65535"),
        ("203.0.113.7:41000", "it has 1 ports and SEALRING_PORTS has 2: give one for each"),
        ("203.0.113.7:41000-41002", "it has 3 ports and SEALRING_PORTS has 2"),
    ],
)
def test_what_is_no_address_from_outside(written: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        read_advertised({"SEALRING_ADVERTISE": written}, [29600, 29601])
    assert f"SEALRING_ADVERTISE is {written!r}; " in str(refused.value)
    assert said in str(refused.value)


def test_ports_from_outside_stand_for_ports_inside() -> None:
    with pytest.raises(ConfigurationError, match="stand for those of SEALRING_PORTS: set that too"):
        read_reach({**LOOPBACK, "SEALRING_ADVERTISE": "203.0.113.7:41000"})


@pytest.mark.parametrize("address", ["::ffff:0.0.0.0", "fe80::1", "fe80::1%lo", "ff02::1"])
def test_where_no_worker_listens(address: str) -> None:
    with pytest.raises(ConfigurationError, match="give the one address that peers shall connect"):
        read_reach({"SEALRING_ADDRESS": address})


def test_an_ipv4_address_in_ipv6_is_the_ipv4_address() -> None:
    assert read_reach({"SEALRING_ADDRESS": "::ffff:127.0.0.1"}).hosts == ("127.0.0.1",)
    assert parse_addresses(b'[["::ffff:10.0.0.1",29600]]') == (("10.0.0.1", 29600),)


@pytest.mark.parametrize(
    ("outside", "inside", "told"),
    [
        ("203.0.113.7:41000,42000", [("10.0.0.5", 29601)],
         [("203.0.113.7", 42000), ("10.0.0.5", 29601)]),
        ("203.0.113.7", [("10.0.0.5", 29601)], [("203.0.113.7", 29601), ("10.0.0.5", 29601)]),
        ("10.0.0.5", [("10.0.0.5", 29601)], [("10.0.0.5", 29601)]),
        ("203.0.113.7", [("fd00::5", 7), ("10.0.0.5", 8)],
         [("203.0.113.7", 8), ("fd00::5", 7), ("10.0.0.5", 8)]),
    ],
)  # fmt: skip
def test_what_others_are_told(outside: str, inside: list[Address], told: list[Address]) -> None:
    ports = (29600, 29601)
    host, mapped = read_advertised({"SEALRING_ADVERTISE": outside}, ports)
    assert Reach((), ports, host, mapped).announced(inside) == told


def free_ports(count: int) -> list[int]:
    """Returns free ports outside the range from which the system takes ports by itself."""
    found: list[int] = []
    with ExitStack() as held:
        for port in range(21000 + time.time_ns() // 1000 % 8000, 32000):
            sock = held.enter_context(socket.socket())
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            found.append(port)
            if len(found) == count:
                return found
    raise AssertionError("no port is free")


def test_listeners_take_the_first_free_port_and_no_other() -> None:
    first, second = free_ports(2)
    with ExitStack() as held:
        for expected in (first, second):
            (sock,) = listen_at(["127.0.0.1"], [first, second])
            held.enter_context(sock)
            assert sock.getsockname()[1] == expected
        with pytest.raises(ConfigurationError) as refused:
            listen_at(["127.0.0.1"], [first, second])
    said = str(refused.value)
    assert "none of the 2 ports of SEALRING_PORTS is available on 127.0.0.1" in said
    assert "Address already in use" in said
    assert "give more ports" in said
    assert "docs/reach.md" in said


def test_all_addresses_of_a_worker_have_one_port() -> None:
    first, second = free_ports(2)
    with socket.create_server(("127.0.0.2", first)):
        socks = listen_at(["127.0.0.1", "127.0.0.2"], [first, second])
    found = [sock.getsockname() for sock in socks]
    for sock in socks:
        sock.close()
    assert found == [("127.0.0.1", second), ("127.0.0.2", second)]
    (again,) = listen_at(["127.0.0.1"], [first])  # the port that was bound first has been released
    again.close()


def test_a_port_serves_the_next_group_at_once() -> None:
    """The system keeps connections that this end closed for about a minute."""
    (port,) = free_ports(1)
    for _ in range(2):
        (listening,) = listen_at(["127.0.0.1"], [port])
        with listening, socket.create_connection(("127.0.0.1", port)) as dialed:
            # The kernel reports a connection only when its first byte has come.
            dialed.sendall(b"x")
            listening.setblocking(True)
            accepted, _ = listening.accept()
            assert accepted.recv(1) == b"x"
            accepted.close()
            assert dialed.recv(1) == b""


def test_workers_of_two_groups_share_ports() -> None:
    ports = free_ports(4)
    environ = {**LOOPBACK, "SEALRING_PORTS": ",".join(map(str, ports))}
    worlds = [World(2, environ=environ) for _ in range(2)]
    for world in worlds:
        world.start_all()
    for world in worlds:
        world.join()
    meshes = [world.mesh(rank) for world in worlds for rank in (0, 1)]
    try:
        bound = {
            mesh.agreed.members[rank].addresses[0][1]
            for mesh in meshes
            for rank in (0, 1)
        }  # fmt: skip
        assert bound == set(ports)
    finally:
        end(meshes)


def end(meshes: list[Mesh]) -> None:
    for mesh in meshes:
        for link in mesh.links:
            link.discard()
        assert mesh.exchange is not None
        mesh.exchange.stop()


@pytest.mark.parametrize("deaf", [0, 1])
def test_a_worker_that_only_dials_is_linked_whatever_its_rank(deaf: int) -> None:
    """The store hides this worker's address, as a firewall would block it."""
    world = World(2)
    world.store.overlay[address_key(deaf)] = b'[["255.255.255.255",1]]'
    world.start_all()
    world.join()
    meshes = [world.mesh(rank) for rank in (0, 1)]
    try:
        assert [mesh.links[0].dialer for mesh in meshes] == [deaf == 0, deaf == 1]
    finally:
        end(meshes)


class Told:
    def __init__(self, *addresses: Address) -> None:
        self.addresses = addresses

    def lookup(self, rank: int) -> tuple[Address, ...]:
        return self.addresses


def test_every_address_that_was_tried_is_in_the_error() -> None:
    (port,) = free_ports(1)
    told = Told(("127.0.0.1", port), ("255.255.255.255", 9))
    failed: list[Exception] = []
    dialer = Dialer(told, lambda *_: lambda: None, lambda _, error: failed.append(error))
    dialer.dial(PipeName(1))
    until = time.monotonic() + 10
    while 1 not in dialer.problems or "255" not in str(dialer.problems[1]):
        assert time.monotonic() < until
        time.sleep(0.005)
    dialer.stop()
    assert not failed
    problem = dialer.problems[1]
    assert isinstance(problem, PeerUnreachable)
    assert f"at 127.0.0.1 port {port}: Connection refused" in str(problem)
    assert "at 255.255.255.255 port 9: Network is unreachable" in str(problem)
    assert "docs/reach.md" in str(problem)
