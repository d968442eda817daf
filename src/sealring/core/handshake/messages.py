"""The messages of two workers over TLS before the first record. No I/O: bytes in, value out.

Each message is a JSON object behind a 32-bit length. The parser takes exactly one spelling of each
message: unknown, missing, repeated or wrongly typed fields raise MalformedSetup. It reads the
version first, so that a later version may have other fields and still get PeerIncompatible.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sealring import _native
from sealring.core.handshake.terms import (
    PURPOSES,
    Purpose,
    Terms,
    is_instance,
    is_name,
    members_digest,
)
from sealring.core.identity.names import is_job
from sealring.errors import MalformedSetup, PeerIncompatible
from sealring.formats.strict import read_json
from sealring.limits import MAX_SETUP_BYTES, MAX_WORLD, PROTOCOL_VERSION, SUITE

Message = dict[str, Any]

_MAX_INTEGER: Final = 1 << 53
_MAX_SUITES: Final = 16
_MAX_SETTINGS: Final = 32


@dataclass(frozen=True, slots=True)
class Hello:
    """What a worker says of itself and of the group, as its peer parses it."""

    suites: tuple[str, ...]
    job: str
    group: str
    epoch: str
    world: int
    members: str
    """The digest of the members' ranks."""
    sender: int
    receiver: int
    instance: str
    settings: Mapping[str, int]
    host: str
    transcript: str
    """The group's transcript, if the group was formed before; else empty."""
    purpose: Purpose
    """The purpose of the pipe that this connection will be."""
    lane: int


_HELLO_FIELDS: Final = frozenset({"type", "version", *Hello.__dataclass_fields__})


def write_hello(terms: Terms, receiver: int) -> bytes:
    return encode_message(
        {
            "type": "hello",
            "version": PROTOCOL_VERSION,
            "suites": [SUITE],
            "job": terms.job,
            "group": terms.group,
            "epoch": terms.epoch,
            "world": terms.world,
            "members": members_digest(terms.members),
            "sender": terms.rank,
            "receiver": receiver,
            "instance": terms.instance,
            "settings": dict(terms.settings),
            "host": terms.host,
            "transcript": terms.transcript,
            "purpose": terms.purpose,
            "lane": terms.lane,
        }
    )


def encode_message(message: Mapping[str, Any]) -> bytes:
    encoded = _ENCODER.encode(message).encode("ascii")
    if len(encoded) > MAX_SETUP_BYTES:
        raise MalformedSetup(f"a set-up message of {len(encoded)} bytes is over {MAX_SETUP_BYTES}")
    return encoded


def parse_message(raw: bytes | bytearray) -> Message:
    """Parses a JSON object that has a string in "type". Raises MalformedSetup for anything else."""
    if len(raw) > MAX_SETUP_BYTES:
        raise MalformedSetup(f"a set-up message of {len(raw)} bytes is over {MAX_SETUP_BYTES}")
    try:
        message = read_json(raw, MAX_SETUP_BYTES, "whole")
    except ValueError:
        raise MalformedSetup("a set-up message is not JSON as sealring writes it") from None
    if type(message) is not dict or type(message.get("type")) is not str:
        raise MalformedSetup("a set-up message is not an object with a type")
    return message


def parse_hello(raw: bytes) -> Hello:
    return hello_of(parse_message(raw))


def hello_of(message: Message) -> Hello:
    if message["type"] != "hello":
        raise MalformedSetup("a hello was due, and another message came")
    version = integer(message, "version")
    if version != PROTOCOL_VERSION:
        raise PeerIncompatible(
            f"the peer speaks version {version} of the protocol and this worker "
            f"{PROTOCOL_VERSION}: install one version of sealring everywhere",
            code="handshake.protocol_mismatch",
        )
    exactly(message, _HELLO_FIELDS)
    job, instance = text(message, "job"), text(message, "instance")
    if not is_job(job) or not is_instance(instance):
        raise MalformedSetup("a hello's job or instance is not one")
    transcript = text(message, "transcript") and digest(message, "transcript")
    purpose, lane = _pipe(message)
    if bool(transcript) == (purpose == "form"):
        raise MalformedSetup("a hello's purpose does not fit its transcript")
    return Hello(
        suites=_suites(message["suites"]),
        job=job,
        group=_name(message, "group"),
        epoch=_name(message, "epoch"),
        world=integer(message, "world", 1, MAX_WORLD),
        members=digest(message, "members"),
        sender=integer(message, "sender", 0, MAX_WORLD - 1),
        receiver=integer(message, "receiver", 0, MAX_WORLD - 1),
        instance=instance,
        settings=_settings(message["settings"]),
        host=_name(message, "host"),
        transcript=transcript,
        purpose=purpose,
        lane=lane,
    )


def exactly(message: Message, fields: frozenset[str]) -> None:
    if message.keys() != fields:
        raise MalformedSetup(f"a {message['type'][:32]!r} message has not the fields it must have")


def integer(message: Message, field: str, low: int = 0, high: int = _MAX_INTEGER) -> int:
    value = message.get(field)
    # isinstance() would take a bool for an int.
    if type(value) is not int or not low <= value <= high:
        raise MalformedSetup(f"{field} is not a whole number from {low} to {high}")
    return value


def text(message: Message, field: str) -> str:
    value = message.get(field)
    if type(value) is not str:
        raise MalformedSetup(f"{field} is not a string")
    return value


def digest(message: Message, field: str) -> str:
    """A field of 32 bytes in lower-case hexadecimal, returned as text."""
    value = text(message, field)
    if len(value) != 64 or not set(value) <= set("0123456789abcdef"):
        raise MalformedSetup(f"{field} is not 32 bytes in hexadecimal")
    return value


def instances(message: Message, field: str) -> dict[int, str]:
    """Workers' instances by rank."""
    value = message.get(field)
    if type(value) is not dict or not value:
        raise MalformedSetup(f"{field} is no object of instances")
    found: dict[int, str] = {}
    for rank in value:
        # int() refuses a number of thousands of digits with an error of its own.
        short = len(rank) <= len(str(MAX_WORLD)) and rank.isascii() and rank.isdigit()
        if not (short and str(int(rank)) == rank and int(rank) < MAX_WORLD):
            raise MalformedSetup(f"{field} holds something that is no rank")
        instance = text(value, rank)
        if not is_instance(instance):
            raise MalformedSetup(f"{field} holds something that is no instance")
        found[int(rank)] = instance
    return found


def _pipe(message: Message) -> tuple[Purpose, int]:
    said = text(message, "purpose")
    purpose = next((each for each in PURPOSES if each == said), None)
    if purpose is None:
        raise MalformedSetup("a hello's purpose is none")
    most = _native.MAX_LANES - 1 if purpose == "collectives" else 0
    return purpose, integer(message, "lane", 0, most)


def _name(message: Message, field: str) -> str:
    value = text(message, field)
    if not is_name(value):
        raise MalformedSetup(f"{field} is not a short printable string")
    return value


def _suites(value: object) -> tuple[str, ...]:
    if type(value) is not list or not 1 <= len(value) <= _MAX_SUITES:
        raise MalformedSetup("suites is not a short list")
    if not all(type(suite) is str and is_name(suite) for suite in value):
        raise MalformedSetup("suites holds something that is not a name")
    return tuple(value)


def _settings(value: object) -> Mapping[str, int]:
    if type(value) is not dict or len(value) > _MAX_SETTINGS:
        raise MalformedSetup("settings is not a small object")
    for name in value:
        if not is_name(name):
            raise MalformedSetup("settings holds something that is not a name")
        integer(value, name, -_MAX_INTEGER)
    return value


# Made once: a link needs a dozen messages, and making an encoder takes longer than using it.
_ENCODER: Final = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
