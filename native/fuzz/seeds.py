"""Writes inputs of honest peers for the native fuzz targets: python native/fuzz/seeds.py FOLDER.

From them the fuzzer reaches whole collectives and messages in one mutation; from random bytes it
would take hours. The layout of a line is that of native/fuzz/script.hpp.
"""

from __future__ import annotations

import struct
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding

from sealring.core.identity.certificates import issue, make_authority
from sealring.core.identity.names import WorkerName

PAIR, GROUP, ALERT, BYE, ANNOUNCE, ACCEPT, DATA, STATUS, FETCHED = range(1, 10)
UINT8, SUM = 9, 1
WIRE_LANE, GPU_LANE = 256, 1


def line(
    kind: int,
    *,
    peer: int = 0,
    length: int = 0,
    fill: int = 3,
    lane: int = 0,
    sender: int = 0,
    collective: int = 1,
    operation: int = 0,
    algorithm: int = 0,
    message: int = 0,
    segment: int = 0,
    total: int = 0,
    reads: int = 0,
) -> bytes:
    # The script takes kinds modulo nine, from one on.
    header = struct.pack(
        "<2sBBIQIIIIQBBBBIIIQ",
        b"SR", 1, kind - 1, 0, 0, lane, 0, sender, 0, collective,
        operation, UINT8, SUM, algorithm, message, segment, 0, total,
    )  # fmt: skip
    return struct.pack("<BBHBBH64sHB5x", peer, 0, 0, 0, fill, length, header, 0, reads)


def segments(chunk: int = 2000, segment: int = 1024) -> list[int]:
    return [min(segment, chunk - at) for at in range(0, chunk, segment)]


def ring() -> bytes:
    """What rank 2 sends to rank 0 in a ring all-reduce of three."""
    call = {"operation": 1, "algorithm": 1, "total": 6000}
    script = b""
    for number, length in enumerate(segments()):
        for chunk in (1, 0):
            script += line(PAIR, peer=1, length=length, message=chunk, segment=number, **call)
        for chunk in (2, 1):
            script += line(
                GROUP, peer=1, length=length, sender=chunk, message=chunk, segment=number, **call
            )
    return script


def broadcast(lane: int) -> bytes:
    call = {"operation": 4, "algorithm": 2, "total": 2000}
    return b"".join(
        line(GROUP, length=length, sender=1, lane=lane + (number if lane >= WIRE_LANE else 0),
             segment=number, **call)
        for number, length in enumerate(segments())
    )  # fmt: skip


def direct(lane: int) -> bytes:
    call = {"operation": 1, "algorithm": 2, "total": 2000}
    script = b""
    for number, length in enumerate(segments()):
        for peer in (0, 1):
            script += line(PAIR, peer=peer, length=length, message=peer + 1, segment=number,
                           lane=lane + (number if lane >= WIRE_LANE else 0), **call)  # fmt: skip
            script += line(FETCHED, peer=peer, collective=number + 1, total=number + 1)
    return script


def messages(lane: int) -> bytes:
    """A short message, a long one in records, and the acceptance of one of ours."""
    long = 1400 if lane == 0 else 2100
    piece = 32 << 10 if lane == 0 else 2048
    script = line(ANNOUNCE, length=700 + 1, message=1, segment=1, total=701, collective=1)
    place = 0 if lane == 0 else 2
    script += line(ANNOUNCE, message=2, segment=place, total=long + 2, collective=2)
    for number, at in enumerate(range(0, long + 2, piece)):
        script += line(DATA, length=min(piece, long + 2 - at), segment=number, total=long + 2,
                       collective=2, lane=lane)  # fmt: skip
    return script + line(ACCEPT, collective=1) + line(BYE)


def certificates() -> dict[str, bytes]:
    """A worker's with every extension, one with less, its authority's, and one with a curve."""
    authority = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    worker = Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))
    start = datetime(2026, 1, 1, tzinfo=UTC)
    end = start + timedelta(days=36500)
    own = make_authority(authority, "fuzzed", 1, start, end)

    def issued(key: Any, world: int | None, attestation: bytes | None = None) -> x509.Certificate:
        name = WorkerName("job", 1)
        hour = timedelta(hours=1)
        return issue(own, authority, key, name, world, hour, start, attestation=attestation)

    curve = ec.derive_private_key(7, ec.SECP256R1()).public_key()
    made = {
        "worker": issued(worker.public_key(), 4, b"{}"),
        "no-world": issued(worker.public_key(), None),
        "curve": issued(curve, 4),
        "authority": own,
    }
    return {name: each.public_bytes(Encoding.DER) for name, each in made.items()}


def statements() -> dict[str, bytes]:
    fields = [bytes(7) + b"\1", b"0" * 32, b"host", b'[["127.0.0.1",9]]', b"c" * 40, bytes(32)]
    said = b"".join(struct.pack(">I", len(each)) + each for each in [*fields, b"k" * 32])
    return {"whole": said}


def receives(*messages_: int) -> bytes:
    return bytes([*messages_, *[0] * (6 - len(messages_))])


def seeds() -> dict[str, dict[str, bytes]]:
    short, long, long_on_gpu = 1 << 5 | 1, 2 << 5 | 2, 3 << 5 | 4 | 2
    sends = 1 << 5 | 16 | 3
    return {
        "link": {
            "pairs": b"\x00" + b"".join(line(PAIR, length=100 * i, reads=i) for i in range(8)),
            "published": b"\x00" + ring(),
            "gpu": b"\x06" + line(PAIR, length=64, lane=GPU_LANE) + line(GROUP, sender=2, length=9),
        },
        "collective": {
            "ring": b"\x00" + ring(),
            "broadcast": b"\x04" + broadcast(0),
            "broadcast-gpu": b"\x05" + broadcast(GPU_LANE),
            "broadcast-wires": b"\x07" + broadcast(WIRE_LANE),
            "direct-wires": b"\x03" + direct(WIRE_LANE),
        },
        "mailbox": {
            "cpu": b"\x00\x00" + receives(short, long, sends) + messages(0),
            "gpu": b"\x11\x00" + receives(short, long_on_gpu, sends) + messages(GPU_LANE),
        },
        "certificate": certificates(),
        "statements": statements(),
        "frames": {
            "short": b"\x03" + bytes([31, 0, 2, 0, 20]) + bytes(range(20)),
            "several": b"\x3f" + bytes([31, 0, 2, 64, 16]) + b"x" * 40_000,
            "empty": b"\x00" + bytes([31, 0, 2, 0, 16]) + bytes(16),
        },
        "commands": {
            "batch": b"".join(line(PAIR, length=300 * i, lane=GPU_LANE, fill=i) for i in range(8))
        },
    }


def main() -> None:
    for target, inputs in seeds().items():
        folder = Path(sys.argv[1]) / target
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in inputs.items():
            (folder / name).write_bytes(content)


if __name__ == "__main__":
    main()
