"""The relay passes everything on, reads plaintext headers, and flips one bit on demand."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sealring.core.schedule import Operation
from sealring.lab.demo.wiretap import PAIR, SEALED_HEADER_BYTES, Dissector, Flip, Relay, TappedWire
from tests.core.engine.attacker import header

RANDOM = random.Random(3)
TLS = b"\x16\x03\x03\x00\x05hello" + b"\x17\x03\x03\x01\x00" + bytes(256)


def record(collective: int, length: int, operation: int = Operation.ALL_REDUCE) -> bytes:
    head = header(
        kind=PAIR, length=length, collective=collective, operation=operation, total=1 << 20
    )
    return head + RANDOM.randbytes(16 + length + 16)


STREAM = TLS + b"".join(
    (
        record(1, 100, Operation.BROADCAST),
        record(2, 5000),
        record(2, 5000),
        record(3, 700),
        record(3, 5000),
        record(4, 5000),
    )
)


@pytest.mark.parametrize("piece", [1, 7, 79, 80, 81, 4096, len(STREAM)])
def test_records_are_found_however_the_stream_is_cut(piece: int) -> None:
    dissector = Dissector()
    sightings = [
        sighting
        for at in range(0, len(STREAM), piece)
        for sighting in dissector.feed(STREAM[at : at + piece])
    ]
    assert [s.fields["collective"] for s in sightings] == [1, 2, 2, 3, 3, 4]
    assert [s.payload.stop - s.payload.start for s in sightings] == [
        100,
        *[5000] * 2,
        700,
        *[5000] * 2,
    ]
    assert all(STREAM[s.start : s.start + 2] == b"SR" for s in sightings)
    assert (dissector.setup_bytes, dissector.seen) == (len(TLS), len(STREAM))


@pytest.mark.parametrize("rubbish", [b"GET / HTTP/1.1", b"S" + bytes(100)])
def test_what_is_no_stream_of_ours_is_refused(rubbish: bytes) -> None:
    with pytest.raises(ValueError, match=r"never writes|neither TLS nor a record"):
        Dissector().feed(rubbish)


@pytest.mark.parametrize("piece", [1, 100, 4096, len(STREAM)])
@pytest.mark.parametrize("byte", [0, 500, 10_000])
def test_a_flip_changes_one_bit_of_the_chosen_record(piece: int, byte: int) -> None:
    wire = TappedWire(Flip(gradient=2, byte=byte, bit=6))
    out = b"".join(wire.carry(STREAM[at : at + piece]) for at in range(0, len(STREAM), piece))
    different = [at for at, pair in enumerate(zip(STREAM, out, strict=True)) if pair[0] != pair[1]]
    first_of_3 = STREAM.index(
        header(kind=PAIR, length=700, collective=3, operation=1, total=1 << 20)
    )
    assert different == [first_of_3 + SEALED_HEADER_BYTES + min(byte, 699)]
    assert STREAM[different[0]] ^ out[different[0]] == 1 << 6
    assert wire.flipped is not None
    assert wire.flipped.offset == different[0]
    assert bytes(wire.stream) == STREAM
    assert wire.gradients == [2, 3, 4]


@contextmanager
def two_ends(relay: Relay, server: socket.socket) -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_connection(relay.address, timeout=10) as lured:
        peer, _ = server.accept()
        with peer:
            peer.settimeout(10)
            yield lured, peer


def everything(sock: socket.socket) -> bytes:
    received = b""
    while data := sock.recv(1 << 16):
        received += data
    return received


@pytest.mark.parametrize("flip", [None, Flip(gradient=3, byte=9, bit=0)])
def test_the_relay_passes_both_directions_on(flip: Flip | None) -> None:
    back = TLS + record(9, 30_000)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        Relay(lambda: server.getsockname()[:2], flip) as relay,
        two_ends(relay, server) as (lured, peer),
    ):
        sender = threading.Thread(target=peer.sendall, args=(STREAM,))
        sender.start()
        lured.sendall(back)
        lured.shutdown(socket.SHUT_WR)
        assert everything(peer) == back
        sender.join()
        peer.shutdown(socket.SHUT_WR)
        received = everything(lured)
        towards, from_lured = relay.link
    bits = (int.from_bytes(received, "big") ^ int.from_bytes(STREAM, "big")).bit_count()
    assert len(received) == len(STREAM)
    assert bits == (0 if flip is None else 1)
    assert bytes(towards.stream) == STREAM
    assert bytes(from_lured.stream) == back


def test_a_relay_that_finds_no_peer_says_so() -> None:
    def nowhere() -> tuple[str, int]:
        raise LookupError("no such rank")

    with Relay(nowhere) as relay:
        with socket.create_connection(relay.address, timeout=10) as lured:
            assert lured.recv(1) == b""
        with pytest.raises(LookupError, match="no such rank"):
            _ = relay.link


def test_a_relay_that_saw_nothing_says_so() -> None:
    with Relay(lambda: ("127.0.0.1", 9)) as relay, pytest.raises(RuntimeError, match="no record"):
        _ = relay.link
