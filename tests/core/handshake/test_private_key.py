"""Counts the private key's copies in memory during, after and on refusal of a connection."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sealring import _native
from sealring.core.handshake import accept, dial
from sealring.core.handshake.tls import TlsConnection
from sealring.core.identity import Credentials, WorkerName
from sealring.core.identity.certificates import issue
from sealring.core.identity.kept_key import KeptKey
from sealring.errors import SealringError
from tests.attacks.key_search import masked
from tests.core.handshake.meeting import connected, meeting, soon, terms
from tests.core.identity.issuing import HOUR, NOW, Issuer
from tests.own_memory import places

ISSUER, OTHER = Issuer(), Issuer()


def identity(rank: int) -> tuple[Credentials, str]:
    """Returns credentials as from a job secret or a broker, and the masked private key."""
    seed = _native.Secret.random(32)
    public = Ed25519PrivateKey.from_private_bytes(memoryview(seed)).public_key()
    name = WorkerName("job", rank)
    certificate = issue(ISSUER.certificate, ISSUER.key, public, name, 4, HOUR, NOW)
    key = KeptKey.of_seed(seed)
    hidden = masked(seed)
    seed.wipe()
    return Credentials("job", rank, certificate, (ISSUER.certificate,), key), hidden


def by_a_stranger(own: Credentials) -> list[Any]:
    """Meets a peer whose authority is unknown: TLS itself refuses it."""
    with meeting((own, terms(1)), (OTHER.credentials(0), terms(0))) as met:
        return [met.dialer, met.acceptor]


def of_a_stranger(own: Credentials) -> list[Any]:
    with meeting((OTHER.credentials(1), terms(1)), (replace(own, rank=0), terms(0))) as met:
        return [met.acceptor, met.dialer]


def after_tls(own: Credentials) -> list[Any]:
    """Meets a peer that disagrees in the messages after TLS."""
    with meeting((own, terms(1)), (ISSUER.credentials(0), terms(0, group="other"))) as met:
        return [met.dialer, met.acceptor]


def by_a_peer_that_goes(own: Credentials) -> list[Any]:
    """Meets peers that close the connection in the middle of TLS."""
    errors = []
    for act in (dialing, accepting):
        near, far = connected()
        far.close()
        try:
            act(near, own)
        except SealringError as error:
            errors.append(error)
    return errors


def dialing(sock: socket.socket, own: Credentials) -> None:
    dial(sock, own, terms(1), 0, soon())


def accepting(sock: socket.socket, own: Credentials) -> None:
    accept(sock, own, terms(1), soon())


@pytest.mark.parametrize(
    ("refused", "error"),
    [
        (by_a_stranger, "handshake.unknown_authority"),
        (of_a_stranger, "handshake.unknown_authority"),
        (after_tls, "handshake.wrong_group"),
        (by_a_peer_that_goes, "handshake.peer_unreachable"),
    ],
)
@pytest.mark.threat("J16")
def test_no_copy_stays_with_the_error_of_a_refused_connection(
    refused: Callable[[Credentials], list[Any]], error: str
) -> None:
    own, key = identity(1)
    (kept,) = places(key)
    errors = refused(own)
    assert errors[0].code == error, errors
    assert all(one.__traceback__ is not None for one in errors)
    assert places(key) == [kept]


@pytest.mark.parametrize("dialer", [True, False])
@pytest.mark.threat("J16")
def test_a_connection_gives_the_key_up_when_it_has_signed(dialer: bool) -> None:
    own, key = identity(int(dialer))
    (kept,) = places(key)
    other = ISSUER.credentials(int(not dialer))
    ends = (own, other) if dialer else (other, own)
    with meeting((ends[0], terms(1)), (ends[1], terms(0))) as met:
        channels = met.channels()
        assert places(key) == [kept]
        for sender, receiver in (channels, channels[::-1]):
            sender.send({"type": "linked", "instances": {}})
            assert receiver.receive() == {"type": "linked", "instances": {}}
        assert channels[0].link_keys is not None
    assert places(key) == [kept]


@pytest.mark.threat("J16")
def test_handshakes_under_way_share_one_copy_of_the_key() -> None:
    """This matters because strangers may begin a thousand handshakes."""
    own, key = identity(1)
    copies = []
    ends, begun = [], []
    for _ in range(5):
        near, far = connected()
        ends.append(far)
        begun.append(TlsConnection(near, own, dialer=True, who="the peer", deadline=soon()))
        assert begun[-1].advance() is None
        copies.append(len(places(key)))
    assert copies == [copies[0]] * 5
    for connection in begun[:-1]:
        connection.close(until=0.0)
    assert len(places(key)) == copies[0], "the last one still needs it"
    begun[-1].close(until=0.0)
    assert len(places(key)) == 1
    for end in ends:
        end.close()


def test_handshakes_that_end_while_others_begin() -> None:
    """One handshake frees the key while the next one takes it; sharing one object once crashed."""
    own, key = identity(1)

    def begin_and_end(_: int) -> None:
        near, far = connected()
        with far:
            TlsConnection(near, own, dialer=True, who="the peer", deadline=soon()).close(until=0.0)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(begin_and_end, range(1000)))
    assert len(places(key)) == 1


def test_a_handshake_under_way_has_the_key() -> None:
    """Shows that the search does find the key while a handshake needs it."""
    own, key = identity(1)
    (kept,) = places(key)
    near, far = connected()
    with far:
        connection = TlsConnection(near, own, dialer=True, who="the peer", deadline=soon())
        assert connection.advance() is None
        assert len(places(key)) > 1
        connection.close(until=0.0)
    assert places(key) == [kept]
