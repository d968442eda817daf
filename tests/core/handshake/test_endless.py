"""Admitted peers that send without end, or that read nothing."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from OpenSSL import SSL

from sealring.core.handshake import tls
from sealring.core.handshake.incoming import Incoming
from sealring.core.handshake.tls import TlsConnection
from sealring.errors import MalformedSetup
from tests.core.handshake.meeting import connected, in_background, soon, terms
from tests.core.identity.issuing import Issuer

ISSUER = Issuer()
ONE, ZERO = ISSUER.credentials(1), ISSUER.credentials(0)


def _expanded(secret: bytes, label: bytes, length: int) -> bytes:
    """HKDF-Expand-Label of RFC 8446, section 7.1, with an empty context."""
    label = b"tls13 " + label
    told = struct.pack(">HB", length, len(label)) + label + b"\0"
    return HKDFExpand(hashes.SHA384(), length, told).derive(secret)


def key_updates(secret: bytes) -> Iterator[bytes]:
    """Yields KeyUpdate records (RFC 8446, 4.6.3), each sealed under its own key."""
    inner = bytes([24, 0, 0, 1, 0, 22])
    header = b"\x17\x03\x03" + struct.pack(">H", len(inner) + 16)
    while True:
        key, nonce = _expanded(secret, b"key", 32), _expanded(secret, b"iv", 12)
        yield header + AESGCM(key).encrypt(nonce, inner, header)
        secret = _expanded(secret, b"traffic upd", 48)


def admitted(near: socket.socket, far: socket.socket) -> tuple[TlsConnection, Incoming]:
    dialer = TlsConnection(near, ONE, dialer=True, who="rank 0", deadline=soon())
    incoming = Incoming(far, ZERO, terms(0))
    with in_background(dialer.handshake):
        while not incoming.advance():
            incoming.wait(soon())
    return dialer, incoming


@pytest.mark.threat("J17")
def test_a_peer_whose_keys_change_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a limit one call would read as long as the peer sends, beyond any deadline."""
    secrets: dict[bytes, bytes] = {}
    plain = tls.new_context

    def tell_secrets(authorities: tuple[x509.Certificate, ...], *, dialer: bool) -> SSL.Context:
        def keep(_: object, line: bytes) -> None:
            kind, _, secret = line.split()
            secrets[kind] = bytes.fromhex(secret.decode())

        context = plain(authorities, dialer=dialer)
        if dialer:
            context.set_keylog_callback(keep)
        return context

    monkeypatch.setattr(tls, "new_context", tell_secrets)
    tls.context_for.cache_clear()
    near, far = connected()
    dialer, incoming = admitted(near, far)
    try:
        incoming.allow_until(soon())
        records = key_updates(secrets[b"CLIENT_TRAFFIC_SECRET_0"])
        near.setblocking(True)
        near.sendall(b"".join(next(records) for _ in range(200)))
        answering = incoming.answering()
        incoming.wait(soon())
        with pytest.raises(MalformedSetup, match="goes on with TLS's handshake after its end"):
            next(answering)
    finally:
        dialer.close(until=0.0)
        incoming.close()


@pytest.mark.threat("J18")
def test_sending_to_a_peer_that_takes_nothing_yields_and_goes_on_later() -> None:
    near, far = connected()
    dialer, incoming = admitted(near, far)
    connection = incoming.connection
    assert connection is not None
    connection.deadline = soon()
    message = bytearray(range(256)) * 65536
    try:
        sending = connection.sending(message)
        next(sending)  # returns before the peer has taken the message
        assert connection.half_sent
        received: list[bytearray] = []
        reader = threading.Thread(target=lambda: received.append(dialer.receive(len(message))))
        reader.start()
        for _ in sending:
            connection.wait()
        reader.join(timeout=60)
        assert received == [message]
        assert not connection.half_sent
    finally:
        dialer.close(until=0.0)
        incoming.close()
