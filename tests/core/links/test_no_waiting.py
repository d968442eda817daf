"""The thread that serves all listeners never waits for a peer, whatever an admitted worker does."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from sealring.core.handshake import SecureChannel
from sealring.core.links.agreement import Settled, settle_as_acceptor
from sealring.core.links.connections import WaitingLink, WaitingLinks
from sealring.errors import PeerUnreachable, WrongPeer
from tests.codes import coded
from tests.core.handshake.meeting import meeting, soon, terms
from tests.core.identity.issuing import Issuer

ISSUER = Issuer()


@contextlib.contextmanager
def channels() -> Iterator[tuple[SecureChannel, SecureChannel]]:
    """Yields the dialer's channel and the acceptor's."""
    with meeting((ISSUER.credentials(1), terms(1)), (ISSUER.credentials(0), terms(0))) as met:
        yield met.channels()


def fill(sock: socket.socket) -> None:
    """Sends until the kernel takes no more for a peer that does not read."""
    with contextlib.suppress(BlockingIOError):
        while True:
            sock.send(bytes(1 << 16))


def empty(sock: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):
        while sock.recv(1 << 16):
            pass


@pytest.mark.threat("J18")
def test_a_dialer_that_does_not_read_is_not_waited_for() -> None:
    with channels() as (dialer, acceptor):
        acceptor.connection.deadline = soon(0.5)
        fill(acceptor.socket)
        settling = settle_as_acceptor(acceptor, "tcp")
        next(settling)  # does not raise PeerUnreachable at the deadline
        assert acceptor.connection.half_sent
        empty(dialer.socket)
        settled: list[Settled] = []

        def settle() -> Iterator[None]:
            settled.append((yield from settling))

        for _ in settle():
            empty(dialer.socket)
        assert settled == [Settled(None)]


@pytest.mark.parametrize("failed", [False, True])
@pytest.mark.threat("J18")
def test_a_link_that_comes_too_late_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, failed: bool
) -> None:
    """The late link's peer neither reads nor ends the connection."""
    own = WaitingLinks(terms(0))
    asked: list[float] = []
    with channels() as (dialer, acceptor):

        def until(self: WaitingLink, until: float) -> None:
            asked.append(until)
            plain(self, until)

        plain = WaitingLink.discard
        monkeypatch.setattr(WaitingLink, "discard", until)
        if failed:
            assert not own.take_all(WrongPeer("there is no group", code="handshake.wrong_group"))
        else:
            own.close()
        before = soon(0)
        link = WaitingLink(acceptor, Settled(None), dialer=False)
        own.add(link)
        after = soon(0)
        if failed:
            assert not asked
            assert own.take_newcomers() == [link]
            own.tell([link])
            assert own.are_informed([1])
            with pytest.raises(
                WrongPeer, match="there is no group", check=coded("handshake.wrong_group")
            ):
                dialer.receive(soon())
        else:
            assert before <= asked[0] <= after
            with pytest.raises(PeerUnreachable):
                dialer.receive(soon())
    own.release()
