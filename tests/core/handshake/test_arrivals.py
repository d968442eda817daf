"""Messages that do not come one in each TLS record, and reading bytes without waiting."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest

from sealring import _native
from sealring.core.handshake.tls import TlsConnection
from sealring.errors import MalformedSetup
from tests.core.handshake.meeting import connected, in_background, soon
from tests.core.identity.issuing import Issuer

ISSUER = Issuer()


def tls_pair() -> tuple[TlsConnection, TlsConnection]:
    near, far = connected()
    ends = []
    for sock, rank, dialer in ((near, 1, True), (far, 0, False)):
        own = ISSUER.credentials(rank)
        ends.append(TlsConnection(sock, own, dialer=dialer, who="the peer", deadline=soon()))
    with in_background(ends[1].handshake):
        ends[0].handshake()
    return ends[0], ends[1]


def message(receiver: TlsConnection, most: int = 1000) -> bytearray:
    while (found := receiver.message_now(most)) is None:
        receiver.wait()
    return found


@pytest.mark.parametrize(
    "records",
    [
        [b"\0\0\0\3one", b"\0\0\0\3two"],
        [b"\0\0\0\3one\0\0\0\3two"],
        [b"\0\0", b"\0\3o", b"ne\0\0\0\3t", b"wo"],
        [b"\0\0\0\3one\0", b"\0\0\3two"],
    ],
    ids=["one each", "both in one", "in pieces", "one and a bit"],
)
def test_messages_are_the_same_however_records_carry_them(records: list[bytes]) -> None:
    sender, receiver = tls_pair()
    with closing(sender), closing(receiver):
        for each in records:
            sender.send(each)
        assert [message(receiver), message(receiver)] == [b"one", b"two"]
        assert receiver.message_now() is None


@pytest.mark.parametrize("record", [b"\0\0\0\x0bhello world", b"\0\0\0\x0b"])
def test_a_message_that_is_too_long_is_refused(record: bytes) -> None:
    sender, receiver = tls_pair()
    with closing(sender), closing(receiver):
        sender.send(record)
        with pytest.raises(MalformedSetup, match="announced a set-up message of 11 bytes"):
            message(receiver, most=10)


def test_bytes_are_taken_without_waiting() -> None:
    near, far = socket.socketpair()  # these sockets would block
    with near, far:
        assert _native.receive_now(far.fileno(), 10) is None
        near.sendall(b"abcde")
        assert _native.receive_now(far.fileno(), 2, peek=True) == b"ab"
        assert _native.receive_now(far.fileno(), 2) == b"ab"
        assert _native.receive_now(far.fileno(), 10) == b"cde"
        near.shutdown(socket.SHUT_WR)
        assert _native.receive_now(far.fileno(), 10) == b""
    with pytest.raises(OSError, match="Bad file descriptor"):
        _native.receive_now(far.fileno(), 10)
