"""Every parser of bytes that an adversary may write, and what must hold for any bytes at all.

A target takes bytes and raises AssertionError (or whatever it should not) if a parser misbehaves:
anything but the documented error comes out, or what was read does not write back to the same.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable
from typing import Final

from sealring import _native
from sealring.engine.failures import ERROR_BY_CODE, Names, error_from
from sealring.errors import (
    GroupError,
    MalformedSetup,
    ProtocolMismatch,
    SealringError,
    TamperedValue,
)
from sealring.handshake.messages import encode_message, parse_hello, parse_message
from sealring.handshake.refusals import error_of
from sealring.limits import HEADER_BYTES, MAX_PAYLOAD_BYTES, PROTOCOL_VERSION, TAG_BYTES
from sealring.links.memory import parse_offer
from sealring.links.rendezvous import encode_addresses, parse_addresses
from sealring.store.values import Kind as StoredKind
from sealring.store.values import StoreKeys, parse_parts
from tests.engine.attacker import Kind, header

ALERT_FIXED: Final = struct.Struct("<BiiQ")
ALERT_TEXT_BYTES: Final = 512


def record_header(data: bytes) -> None:
    """Native: 64 bytes to fields, or None. The layout and the limits are written out here again."""
    fields = _native.parse_header(data)
    good = (
        len(data) >= HEADER_BYTES
        and data[:3] == b"SR" + bytes([PROTOCOL_VERSION])
        and data[3] in list(Kind)
        and int.from_bytes(data[4:8], "little") <= MAX_PAYLOAD_BYTES
        and data[19] < 0x80
    )
    assert (fields is not None) == good
    if fields is not None:
        assert header(**fields) == data[:HEADER_BYTES]


def alert(data: bytes) -> None:
    """Native: any payload becomes a failure, and only plain characters reach a terminal."""
    sender = 3
    fields = _native.parse_alert(data, sender)
    code, about, collective, seen_by, text = fields
    assert code in ERROR_BY_CODE
    assert len(text) <= ALERT_TEXT_BYTES
    assert text.isascii()
    assert text.isprintable()
    if len(data) < ALERT_FIXED.size or data[0] not in ERROR_BY_CODE:
        assert (ERROR_BY_CODE[code].__name__, about, seen_by) == ("PeerLost", sender, sender)
    else:
        assert (code, about, seen_by, collective) == ALERT_FIXED.unpack_from(data)
        again = ALERT_FIXED.pack(code, about, seen_by, collective) + text.encode()
        assert _native.parse_alert(again, sender) == fields
    assert isinstance(error_from(fields, Names(0, (0, 1, 2, 5), {3: "host"})), GroupError)


def hello(data: bytes) -> None:
    try:
        read = parse_hello(data)
    except (MalformedSetup, ProtocolMismatch):
        return
    written = {"type": "hello", "version": PROTOCOL_VERSION, **dataclasses.asdict(read)}
    assert parse_hello(encode_message(written)) == read


def refusal(data: bytes) -> None:
    try:
        message = parse_message(data)
        error = error_of(message, "rank 1", 1)
    except MalformedSetup:
        return
    assert isinstance(error, SealringError)
    assert str(error).isprintable()
    assert parse_message(encode_message(message)) == message


def offer(data: bytes) -> None:
    try:
        read = parse_offer(parse_message(data)["shm"])
    except (MalformedSetup, KeyError):
        return
    assert parse_offer(read.message()) == read


def addresses(data: bytes) -> None:
    try:
        read = parse_addresses(data)
    except MalformedSetup:
        return
    assert read
    assert parse_addresses(encode_addresses(read).encode()) == read


def stored(data: bytes) -> None:
    """A sealed store's value. Whatever parses, nothing opens that was not sealed under the key."""
    try:
        parts = parse_parts(data)
    except TamperedValue:
        return
    assert b"".join(part.header + part.sealed for part in parts) == data
    assert all(part.kind is StoredKind.APPENDED for part in parts[1:])
    for part in parts:
        assert len(part.sealed) == int.from_bytes(part.header[4:8], "big") + TAG_BYTES
        try:
            _STORE_KEYS.open(part, _STORE_KEYS.value_name("key"))
        except TamperedValue:
            continue
        raise AssertionError("a forged part was opened")


_STORE_KEYS: Final = StoreKeys.derive(bytes(32), ["nobody has sealed anything under this"])

TARGETS: Final[dict[str, Callable[[bytes], None]]] = {
    "header": record_header,
    "alert": alert,
    "hello": hello,
    "refusal": refusal,
    "offer": offer,
    "addresses": addresses,
    "stored": stored,
}
