"""Writes the corpus's first entries: well-formed input, and input at the limits.

python -m tests.fuzz.write_corpus. What fuzzing finds beyond that is kept beside them, by hand.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

from sealring.errors import WrongRank
from sealring.handshake.messages import encode_message, write_hello
from sealring.handshake.refusals import refusal_of
from sealring.limits import MAX_PAYLOAD_BYTES
from sealring.links.memory import Offer
from sealring.links.rendezvous import encode_addresses
from tests.engine.attacker import EVERYONE, Kind, header
from tests.fuzz.targets import ALERT_FIXED
from tests.handshake.meeting import terms

CORPUS = Path(__file__).parent / "corpus"


def headers() -> Iterator[tuple[str, bytes]]:
    for kind in Kind:
        yield kind.name.lower(), header(kind=kind, length=16, sender=1, receiver=2, collective=7)
    plain = header(kind=Kind.PAIR)
    yield "published", header(kind=Kind.GROUP, receiver=EVERYONE, length=1, total=1)
    yield "longest", header(kind=Kind.PAIR, length=MAX_PAYLOAD_BYTES)
    yield "too-long", header(kind=Kind.PAIR, length=MAX_PAYLOAD_BYTES + 1)
    yield "header-lane", header(kind=Kind.PAIR, lane=0x80000000)
    yield "all-ones", plain[:4] + b"\xff" * 60
    yield "version-2", plain[:2] + b"\x02" + plain[3:]
    yield "kind-0", plain[:3] + b"\x00" + plain[4:]
    yield "kind-9", plain[:3] + b"\x09" + plain[4:]
    yield "short", plain[:63]
    yield "longer", plain + b"payload"
    yield "empty", b""


def alerts() -> Iterator[tuple[str, bytes]]:
    for code in range(9):
        yield f"code-{code}", ALERT_FIXED.pack(code, 1, 2, 3) + b"what happened"
    yield "about-nobody", ALERT_FIXED.pack(7, -1, 0, 0)
    yield "short", ALERT_FIXED.pack(1, 1, 2, 3)[:-1]
    yield "extremes", struct.pack("<BIIQ", 1, 0x80000000, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF)
    yield "terminal-escape", ALERT_FIXED.pack(1, 1, 2, 3) + b"\x1b[2J\x00\xff\n"
    yield "too-much-text", ALERT_FIXED.pack(1, 1, 2, 3) + b"a" * 600
    view = b"{operation=1 algorithm=99 dtype=3 reduction=255 bytes=18446744073709551615}"
    yield "view", ALERT_FIXED.pack(4, 1, 2, 3) + b"rank 1 is in collective 1 " + view
    yield "huge-view", ALERT_FIXED.pack(4, 1, 2, 3) + view.replace(b"=1 ", b"=" + b"9" * 300 + b" ")
    yield "empty", b""


def hellos() -> Iterator[tuple[str, bytes]]:
    good = write_hello(terms(1, instance="0" * 32), 0)
    yield "good", good
    fields = json.loads(good)
    for name, value in {
        "version-2": {"version": 2},
        "version-true": {"version": True},
        "no-suites": {"suites": []},
        "world-0": {"world": 0},
        "world-huge": {"world": 1 << 60},
        "float": {"world": 4.0},
        "unprintable": {"host": "\x1b[2J"},
        "surrogate": {"host": "\ud800"},
        "nested": {"settings": {"a": {"b": 1}}},
        "more": {"more": 1},
    }.items():
        yield name, json.dumps(fields | value).encode()
    yield "repeated-key", good.replace(b'"world":4', b'"world":4,"world":4')
    yield "not-a-number", good.replace(b'"world":4', b'"world":NaN')
    yield "many-digits", good.replace(b'"world":4', b'"world":' + b"4" * 5000)
    yield "deep", b"[" * 8000
    yield "too-long", b'{"type":"hello","version":1,"host":"' + b"a" * (16 << 10) + b'"}'
    yield "not-utf-8", b'{"type":"\xff"}'
    yield "empty", b""


def refusals() -> Iterator[tuple[str, bytes]]:
    yield "good", encode_message(refusal_of(WrongRank("it is rank 3")))
    for name in ("Unsupported", "SealringError", "SystemExit", "__class__", ""):
        message = {"type": "refusal", "error": name, "text": "\x1b[2J" + "a" * 700}
        yield f"error-{name.strip('_').lower() or 'none'}", encode_message(message)
    yield "no-text", b'{"type":"refusal","error":"WrongRank"}'
    yield "list", b'{"type":"refusal","error":["WrongRank"],"text":""}'
    yield "long-type", encode_message({"type": "\x1b" * 1000})


def offers() -> Iterator[tuple[str, bytes]]:
    good = Offer(1, 3, "0" * 64, 1 << 20).message()
    for name, change in {
        "good": {},
        "pid-0": {"pid": 0},
        "pid-text": {"pid": "self"},
        "fd-negative": {"fd": -1},
        "fd-true": {"fd": True},
        "nonce-upper": {"nonce": "A" * 64},
        "bytes-huge": {"bytes": 1 << 70},
        "more": {"more": 1},
    }.items():
        yield name, encode_message({"type": "link", "group_key": "0" * 64, "shm": good | change})
    yield "none", encode_message({"type": "link", "group_key": "0" * 64, "shm": None})


def address_lists() -> Iterator[tuple[str, bytes]]:
    yield "one", encode_addresses([("127.0.0.1", 29500)]).encode()
    yield "both", encode_addresses([("10.0.0.1", 1), ("2001:db8::1", 65535)]).encode()
    yield "mapped", b'[["::ffff:10.0.0.1",1]]'
    for name, text in {
        "port-0": '[["127.0.0.1",0]]',
        "port-true": '[["127.0.0.1",true]]',
        "name": '[["localhost",1]]',
        "scope": '[["fe80::1%eth0",1]]',
        "any": '[["0.0.0.0",1]]',
        "multicast": '[["224.0.0.1",1]]',
        "number": "[[2130706433,1]]",
        "nothing": "[]",
        "nine": json.dumps([["127.0.0.1", 1]] * 9),
        "deep": "[" * 1000,
        "infinite": '[["127.0.0.1",Infinity]]',
    }.items():
        yield name, text.encode()
    yield "not-ascii", '[["\uff11.1.1.1",1]]'.encode()
    yield "too-long", b" " * 1100


def stored_values() -> Iterator[tuple[str, bytes]]:
    def part(kind: int, value: bytes, length: int | None = None) -> bytes:
        head = struct.pack(">2sBBI", b"SV", 1, kind, len(value) if length is None else length)
        return head + bytes(range(16)) + (1).to_bytes(8, "big") + bytes(32) + value + bytes(16)

    first, appended, counter = part(1, b"value"), part(2, b"more"), part(3, b"")
    yield "value", first
    yield "empty-value", part(1, b"")
    yield "appended", first + appended + appended
    yield "only-appended", appended
    yield "counter", counter
    yield "counter-appended", counter + appended
    yield "two-values", first + first
    yield "kind-0", part(0, b"value")
    yield "kind-4", part(4, b"value")
    yield "version-2", first[:2] + b"\x02" + first[3:]
    yield "too-long", part(1, b"value", (1 << 30) + 1)
    yield "longest", part(1, b"value", 0xFFFFFFFF)
    yield "cut", first[:-1]
    yield "trailing", first + b"\x00"
    yield "number", b"17"
    yield "empty", b""


def main() -> None:
    for target, entries in {
        "header": headers(),
        "alert": alerts(),
        "hello": hellos(),
        "refusal": refusals(),
        "offer": offers(),
        "addresses": address_lists(),
        "stored": stored_values(),
    }.items():
        folder = CORPUS / target
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in entries:
            (folder / name).write_bytes(data)


if __name__ == "__main__":
    main()
