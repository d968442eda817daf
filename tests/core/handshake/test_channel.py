"""The channel that a handshake returns, its keys, and the bare socket after `detach`."""

from __future__ import annotations

import gc
import os
import socket
import ssl
import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from sealring.core.handshake import Terms, accept, dial, group_context, parse_message
from sealring.core.identity import Credentials
from sealring.errors import (
    ConfigurationError,
    HandshakeError,
    MalformedSetup,
    PeerIncompatible,
    PeerUnreachable,
    named,
)
from tests.codes import coded
from tests.core.handshake.meeting import connected, in_background, meeting, soon, terms
from tests.core.identity.issuing import Issuer

ISSUER = Issuer()
ONE, ZERO = ISSUER.credentials(1), ISSUER.credentials(0)


def keys(one: Terms, zero: Terms) -> tuple[bytes, bytes]:
    with meeting((ONE, one), (ZERO, zero)) as met:
        dialer, acceptor = met.channels()
        assert dialer.link_keys.send == acceptor.link_keys.receive
        assert dialer.link_keys.receive == acceptor.link_keys.send
        assert bytes(dialer.link_keys.send).hex() not in repr(dialer.link_keys)
        return bytes(dialer.link_keys.send), bytes(dialer.link_keys.receive)


@pytest.mark.threat("J34", "K6", "K15")
def test_only_both_ends_have_the_same_keys() -> None:
    seen = [
        key
        for changes in ({}, {}, {"group": "other"}, {"epoch": "0.2"})
        for key in keys(terms(1, **changes), terms(0, **changes))
    ]
    assert all(len(key) == 32 for key in seen)
    assert len(set(seen)) == len(seen), "one key per direction, connection, group and epoch"


def test_the_peer_is_verified_and_described() -> None:
    with meeting((ONE, terms(1)), (ZERO, terms(0))) as met:
        dialer, acceptor = met.channels()
        assert (dialer.peer.rank, acceptor.peer.rank) == (0, 1)
        assert acceptor.peer.fingerprint == ONE.fingerprint
        assert (dialer.peer_hello.host, acceptor.peer_hello.host) == ("host-0", "host-1")


@pytest.mark.threat("K6")
def test_members_share_one_group_context() -> None:
    assert group_context(terms(0)) == group_context(terms(3))
    others: list[dict[str, object]] = [
        {"job": "k"},
        {"group": "g"},
        {"epoch": "e"},
        {"group": "default0", "epoch": ".1"},
        {"world": 5},
        {"members": (0, 1, 3, 2)},
        {"members": (0, 1, 2)},
    ]
    assert len({group_context(terms(0, **other)) for other in [{}, *others]}) == len(others) + 1


def test_messages_go_both_ways() -> None:
    with meeting((ONE, terms(1)), (ZERO, terms(0))) as met:
        dialer, acceptor = met.channels()
        dialer.send({"type": "a", "n": 1})
        acceptor.send({"type": "b", "s": "ü"})
        assert acceptor.receive() == {"type": "a", "n": 1}
        assert dialer.receive() == {"type": "b", "s": "ü"}


def test_raw_bytes_after_detach() -> None:
    """Records right after the last TLS message are still there for the bare socket."""
    with meeting((ONE, terms(1)), (ZERO, terms(0))) as met:
        dialer, acceptor = met.channels()
        dialer.send({"type": "last"})
        acceptor.send({"type": "last"})
        raw = dialer.detach()
        raw.setblocking(True)
        raw.sendall(b"\x17\x03\x03\x00\x05hello" * 1000)
        assert acceptor.receive() == {"type": "last"}
        bare = acceptor.detach()
        bare.setblocking(True)
        bare.settimeout(10)
        del dialer, acceptor
        met.dialer = met.acceptor = PeerUnreachable("gone")
        gc.collect()
        received = b""
        while len(received) < 10_000:
            received += bare.recv(65536)
        assert received == b"\x17\x03\x03\x00\x05hello" * 1000
        # TLS sends nothing after that: no close_notify and no late ticket.
        bare.sendall(b"!")
        raw.settimeout(10)
        length = int.from_bytes(raw.recv(5)[3:], "big")
        while length:
            length -= len(raw.recv(length))
        assert raw.recv(10) == b"!"
        raw.close()
        assert bare.recv(1) == b""
        bare.close()


@pytest.mark.threat("S6")
def test_silence_ends_at_the_deadline() -> None:
    for call in (
        lambda sock: dial(sock, ONE, terms(1), 0, soon(0.2)),
        lambda sock: accept(sock, ZERO, terms(0), soon(0.2)),
    ):
        near, far = connected()
        with pytest.raises(PeerUnreachable, match="in time"):
            call(near)
        assert near.fileno() == -1
        far.close()


@pytest.mark.parametrize("rubbish", [b"GET / HTTP/1.1\r\n\r\n", bytes(64), b"\xff" * 100_000])
@pytest.mark.threat("S6")
def test_rubbish_is_refused(rubbish: bytes) -> None:
    near, far = connected()
    with in_background(lambda: _flood(far, rubbish)), pytest.raises(MalformedSetup):
        accept(near, ZERO, terms(0), soon())
    assert near.fileno() == -1


def _flood(sock: socket.socket, data: bytes) -> None:
    with sock:
        try:
            sock.sendall(data)
            while sock.recv(4096):
                pass
        except OSError:
            pass


def test_a_peer_that_hangs_up() -> None:
    near, far = connected()
    far.close()
    with pytest.raises(PeerUnreachable, match="closed the connection"):
        accept(near, ZERO, terms(0), soon())


@pytest.mark.threat("S11")
def test_a_message_that_is_too_long_is_not_read() -> None:
    with meeting((ONE, terms(1)), (ZERO, terms(0))) as met:
        dialer, acceptor = met.channels()
        dialer.connection.send(b"\x7f\xff\xff\xff")
        with pytest.raises(MalformedSetup, match="2147483647") as caught:
            acceptor.receive()
        assert caught.value.proven
        assert caught.value.peer == 1


# ---- peers with another TLS stack: Python's ssl module with its own OpenSSL --------------------


def foreign(tmp_path: Path, credentials: Credentials, side: int) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    key = credentials.private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path = tmp_path / "both.pem"
    path.write_bytes(key + credentials.certificate.public_bytes(Encoding.PEM))
    context.load_cert_chain(path)
    context.load_verify_locations(
        cadata=credentials.authorities[0].public_bytes(Encoding.PEM).decode()
    )
    context.set_alpn_protocols(["sealring"])
    # This leaves out X25519MLKEM768, which this OpenSSL may know.
    context.set_ecdh_curve("prime256v1")
    return context


def read_message(tls: ssl.SSLSocket) -> dict[str, object]:
    length = int.from_bytes(tls.recv(4), "big")
    return parse_message(tls.recv(length))


@pytest.mark.threat("D2")
def test_a_dialer_without_the_hybrid_key_exchange(tmp_path: Path) -> None:
    near, far = connected()
    near.settimeout(10)
    with in_background(lambda: accept(far, ZERO, terms(0), soon())) as outcome:
        context = foreign(tmp_path, ONE, ssl.PROTOCOL_TLS_CLIENT)
        with context.wrap_socket(near) as tls:
            assert read_message(tls)["error"] == "handshake.suite_mismatch"
    assert named(outcome[0]) == "handshake.suite_mismatch"
    assert "X25519MLKEM768" in str(outcome[0])


@pytest.mark.threat("D2")
def test_an_acceptor_without_the_hybrid_key_exchange(tmp_path: Path) -> None:
    near, far = connected()
    far.settimeout(10)
    context = foreign(tmp_path, ZERO, ssl.PROTOCOL_TLS_SERVER)

    def serve() -> dict[str, object]:
        with context.wrap_socket(far, server_side=True) as tls:
            return read_message(tls)

    with (
        in_background(serve) as outcome,
        pytest.raises(PeerIncompatible, check=coded("handshake.suite_mismatch")),
    ):
        dial(near, ONE, terms(1), 0, soon())
    assert isinstance(outcome[0], dict)
    assert outcome[0]["error"] == "handshake.suite_mismatch"


@pytest.mark.filterwarnings("ignore:ssl:DeprecationWarning")
@pytest.mark.parametrize(
    ("change", "error"),
    [
        ("TLS 1.2", "handshake.protocol_mismatch"),
        ("no certificate", "handshake.unknown_authority"),
    ],
)
@pytest.mark.threat("J1", "D1")
def test_lesser_tls_is_refused(tmp_path: Path, change: str, error: str) -> None:
    near, far = connected()
    near.settimeout(10)
    context = foreign(tmp_path, ONE, ssl.PROTOCOL_TLS_CLIENT)
    if change == "TLS 1.2":
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    else:
        bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        bare.check_hostname = False
        bare.verify_mode = ssl.CERT_NONE
        context = bare
    with (
        in_background(lambda: accept(far, ZERO, terms(0), soon())) as outcome,
        pytest.raises(ssl.SSLError),
    ):
        _first_byte(context, near)
    assert named(outcome[0]) == error
    assert isinstance(outcome[0], HandshakeError)
    assert not outcome[0].proven


def _first_byte(context: ssl.SSLContext, sock: socket.socket) -> bytes:
    with context.wrap_socket(sock) as tls:
        return tls.recv(1)


# ---- housekeeping --------------------------------------------------------------------------


@pytest.mark.threat("S8")
def test_no_descriptor_is_left() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for changes in ({}, {"epoch": "9"}):
        with meeting((ONE, terms(1, **changes)), (ZERO, terms(0))):
            pass
    near, far = connected()
    with pytest.raises(PeerUnreachable):
        accept(near, ZERO, terms(0), time.monotonic())
    far.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    "changes",
    [
        {"members": (0, 0, 1)},
        {"members": (1, 2)},
        {"members": (0, 9)},
        {"world": 0, "members": ()},
        {"group": ""},
        {"epoch": "a\nb"},
        {"instance": "xyz"},
        {"job": "a/b"},
    ],
)
def test_terms_that_cannot_be(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        terms(0, **changes)
