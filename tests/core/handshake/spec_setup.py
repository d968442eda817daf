"""A second reader of the set-up protocol, written only from docs/spec.md, sections 3 to 5.

It imports nothing of sealring. With a session's secret it opens what passed between two workers.
From what all members said it computes the keys of the links and of the group.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

HEADER: Final = bytes.fromhex("1f0003")
FIELDS: Final = {
    "hello": {
        "type", "version", "suites", "job", "group", "epoch", "world", "members", "sender",
        "receiver", "instance", "settings", "transcript", "purpose", "lane", "host",
    },
    "accept": {"type", "shm"},
    "link": {"type", "shm"},
    "transport": {"type", "transport"},
    "linked": {"type", "instances"},
    "ready": {"type", "transcript"},
    "refusal": {"type", "error", "text"},
}  # fmt: skip
"""The fields of each kind of JSON message; a refusal may have more."""
REFUSALS: Final = {
    "handshake.wrong_job",
    "handshake.wrong_rank",
    "handshake.wrong_world_size",
    "handshake.wrong_group",
    "handshake.duplicate_rank",
    "handshake.certificate_expired",
    "handshake.certificate_not_yet_valid",
    "handshake.certificate_revoked",
    "handshake.unknown_authority",
    "handshake.protocol_mismatch",
    "handshake.suite_mismatch",
    "handshake.settings_mismatch",
    "handshake.malformed_setup",
    "handshake.peer_unreachable",
    "handshake.not_attested",
    "handshake.peer_not_admitted",
    "handshake.group_ended",
    "configuration.unsupported",
}
FAILURES: Final = {
    "group.peer_lost",
    "group.peer_silent",
    "group.no_longer_admitted",
    "group.closed",
    "group.out_of_step",
    "group.tampered_record",
    "group.missing_record",
    "group.replayed_record",
}
UP, DOWN, AGREED = 1, 2, 3


class NotTheSpecification(Exception):
    pass


def require(condition: bool, what: str) -> None:
    if not condition:
        raise NotTheSpecification(what)


def hkdf(salt: bytes, secret: bytes, info: bytes, length: int = 32) -> bytes:
    return HKDF(SHA256(), length, salt, info).derive(secret)


def framed(fields: Iterable[bytes]) -> bytes:
    return b"".join(len(each).to_bytes(4, "big") + each for each in fields)


def digest(*fields: bytes) -> bytes:
    return hashlib.sha256(framed(fields)).digest()


def integer(value: int) -> bytes:
    return value.to_bytes(8, "big")


# ---- section 3 ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Session:
    """What both ends have of a session when a connection is opened."""

    secret: bytes
    """The secret for connections that the dialer opens."""
    step: int
    dialers_certificate: bytes
    acceptors_certificate: bytes


@dataclass(frozen=True)
class Said:
    by_dialer: bool
    raw: bytes

    @property
    def words(self) -> dict[str, Any]:
        """The fields of a JSON message."""
        return message_of(self.raw)


@dataclass
class Connection:
    """Everything that passed on one connection under a session."""

    secret: bytes
    next_secret: bytes
    certificates: bytes
    said: list[Said] = field(default_factory=list)
    """First the dialer's messages, then the acceptor's; each part is in the order of sending."""

    def exported(self, label: bytes, context: bytes, length: int) -> bytes:
        info = b"sealring 2 exporter" + len(label).to_bytes(4, "big") + label + context
        return hkdf(b"", self.secret, info, length)

    def of(self, kind: str) -> list[Said]:
        return [each for each in self.said if each.raw[0] >= 0x20 and each.words["type"] == kind]

    def rounds(self, *, by_dialer: bool) -> list[bytes]:
        """Returns what this end said in the rounds of the agreement."""
        return [
            each.raw for each in self.said if each.raw[0] < 0x20 and each.by_dialer == by_dialer
        ]


def taken(stream: bytes) -> tuple[bytes, bytes, bytes]:
    """Returns the first frame's header and body, and the rest of the stream."""
    require(stream[:3] == HEADER and len(stream) >= 5, "a frame's header")
    length = int.from_bytes(stream[3:5], "big")
    require(len(stream) >= 5 + length, "a stream ends within a frame")
    return stream[:5], stream[5 : 5 + length], stream[5 + length :]


def opened(to_acceptor: bytes, to_dialer: bytes, session: Callable[[bytes], Session]) -> Connection:
    """Opens both directions of a connection; `session` finds a session by its id."""
    header, body, to_acceptor = taken(to_acceptor)
    require(len(body) == 16 + 8 + 32 + 32, "the length of an open message")
    found = session(body[:16])
    require(int.from_bytes(body[16:24], "big") == found.step, "the step")
    certificates = (
        hashlib.sha256(found.dialers_certificate).digest()
        + hashlib.sha256(found.acceptors_certificate).digest()
    )
    opening = header + body
    key = hkdf(b"", found.secret, b"sealring 2 session open")
    require(mac(key, certificates + opening[:-32]) == body[-32:], "the tag of an open message")
    header, answered, to_dialer = taken(to_dialer)
    require(len(answered) == 32 + 32, "the length of an answer")
    answer = header + answered
    key = hkdf(b"", found.secret, b"sealring 2 session answer")
    require(mac(key, certificates + opening + answer[:-32]) == answered[-32:], "an answer's tag")
    salt, rest = body[24:56] + answered[:32], certificates + opening + answer
    secret = hkdf(salt, found.secret, b"sealring 2 session connection" + rest)
    following = hkdf(salt, found.secret, b"sealring 2 session next" + rest)
    keys = hkdf(b"", secret, b"sealring 2 set-up keys", 64)
    connection = Connection(secret, following, certificates)
    for by_dialer, stream, one in (
        (True, to_acceptor, keys[:32]),
        (False, to_dialer, keys[32:]),
    ):
        plain = b"".join(frames(stream, one))
        while plain:
            length = int.from_bytes(plain[:4], "big")
            require(len(plain) >= 4 + length, "a message is cut")
            connection.said.append(Said(by_dialer, plain[4 : 4 + length]))
            plain = plain[4 + length :]
    return connection


def mac(key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, "sha256")


def frames(stream: bytes, key: bytes) -> Iterable[bytes]:
    number = 0
    while stream:
        header, sealed, stream = taken(stream)
        require(len(sealed) <= 16400, "a frame's length")
        yield AESGCM(key).decrypt(number.to_bytes(12, "big"), sealed, header)
        number += 1


# ---- section 4 ----------------------------------------------------------------------------------


def message_of(raw: bytes) -> dict[str, Any]:
    require(len(raw) <= 16384, "a set-up message's length")
    message: dict[str, Any] = json.loads(raw.decode("ascii"))
    require(
        raw == json.dumps(message, separators=(",", ":")).encode("ascii"), "a message's spelling"
    )
    kind = message["type"]
    require(kind in FIELDS, "a message's type")
    fields = set(message) - FIELDS[kind]
    require(FIELDS[kind] <= set(message), "its fields")
    if kind == "refusal":
        require(message["error"] in REFUSALS and len(message["text"]) <= 600, "a refusal")
        if message["error"] == "handshake.group_ended":
            require(fields == {"failure", "about", "by", "collective"}, "its fields")
            require(message["failure"] in FAILURES, "a failure")
        else:
            require(message.get("misdirected", True) is True, "misdirected")
            require(type(message.get("about", 0)) is int, "about")
            require(fields <= {"misdirected", "about"}, "its fields")
    else:
        require(not fields, "its fields")
    if kind == "hello":
        require(message["version"] == 3 and "AES-256-GCM" in message["suites"], "a hello")
        require(len(bytes.fromhex(message["instance"])) == 16, "an instance")
        require(len(message["settings"]) <= 32, "settings")
        purposes = ("collectives", "messages") if message["transcript"] else ("form",)
        require(message["purpose"] in purposes, "a purpose")
        most = 63 if message["purpose"] == "collectives" else 0
        require(0 <= message["lane"] <= most, "a lane")
    if kind in ("accept", "link") and message["shm"] is not None:
        require(set(message["shm"]) == {"socket", "token"}, "an offer")
        require(all(len(bytes.fromhex(each)) == 32 for each in message["shm"].values()), "an offer")
    if kind == "transport":
        require(message["transport"] in ("shm", "tcp"), "a transport")
    return message


def bundle_of(raw: bytes) -> tuple[int, bytes, dict[int, bytes]]:
    """Returns a round's message as its kind, its transcript (in the last round) and its entries."""
    kind, raw = raw[0], raw[1:]
    require(kind in (UP, DOWN, AGREED), "the kind of a round's message")
    transcript, raw = (raw[:32], raw[32:]) if kind == AGREED else (b"", raw)
    entries: dict[int, bytes] = {}
    while raw:
        rank, length = int.from_bytes(raw[:4], "big"), int.from_bytes(raw[4:8], "big")
        require(length <= 65536 and len(raw) >= 8 + length, "an entry's length")
        require(not entries or rank > max(entries), "the order of entries")
        entries[rank], raw = raw[8 : 8 + length], raw[8 + length :]
    return kind, transcript, entries


@dataclass(frozen=True)
class Statement:
    fields: list[bytes]

    @classmethod
    def parse(cls, raw: bytes) -> Statement:
        fields = []
        while raw:
            length = int.from_bytes(raw[:4], "big")
            require(len(raw) >= 4 + length, "a statement is cut")
            fields.append(raw[4 : 4 + length])
            raw = raw[4 + length :]
        require(len(fields) == 7, "the fields of a statement")
        require([len(fields[at]) for at in (0, 1, 5, 6)] == [8, 32, 32, 32], "their lengths")
        return cls(fields)

    @property
    def rank(self) -> int:
        return int.from_bytes(self.fields[0], "big")

    @property
    def instance(self) -> str:
        return self.fields[1].decode("ascii")

    @property
    def addresses(self) -> bytes:
        return self.fields[3]

    @property
    def certificate(self) -> x509.Certificate:
        return x509.load_der_x509_certificate(self.fields[4])

    @property
    def commitment(self) -> bytes:
        return self.fields[5]

    @property
    def contribution(self) -> bytes:
        return self.fields[6]

    @property
    def in_transcript(self) -> list[bytes]:
        certificate, contribution = (hashlib.sha256(self.fields[at]).digest() for at in (4, 6))
        return [*self.fields[:4], certificate, self.commitment, contribution]


def group_fields(hello: Mapping[str, Any], members: Iterable[int]) -> list[bytes]:
    ranks = b"".join(map(integer, members))
    require(digest(ranks).hex() == hello["members"], "the digest of the members")
    names = [hello[name].encode() for name in ("job", "group", "epoch")]
    return [integer(3), b"AES-256-GCM", *names, integer(hello["world"]), ranks]


def transcript_of(
    hello: Mapping[str, Any], members: list[int], statements: Mapping[int, Statement]
) -> bytes:
    settings = json.dumps(hello["settings"], sort_keys=True, separators=(",", ":")).encode()
    said = [part for rank in members for part in statements[rank].in_transcript]
    fields = group_fields(hello, members)
    return digest(b"sealring 2 transcript", *fields, settings, *said)


def check_signature(statement: Statement, signature: bytes, transcript: bytes) -> None:
    key = statement.certificate.public_key()
    assert isinstance(key, Ed25519PublicKey)
    key.verify(signature, b" " * 64 + b"sealring 2, group transcript\0" + transcript)


def check_confirmation(statement: Statement, value: bytes) -> None:
    require(len(value) == 32, "a value's length")
    require(digest(b"sealring 2 confirmation", value) == statement.commitment, "a commitment")


# ---- sections 2 and 5 ---------------------------------------------------------------------------


def group_keys(
    transcript: bytes, members: list[int], statements: Mapping[int, Statement]
) -> dict[int, bytes]:
    contributions = b"".join(statements[rank].contribution for rank in members)
    secret = hkdf(transcript, contributions, b"sealring 2 group secret")
    return {rank: hkdf(b"", secret, b"sealring 2 group key" + integer(rank)) for rank in members}


def link_keys(connection: Connection, members: Iterable[int]) -> tuple[bytes, bytes]:
    """Returns the keys from dialer to acceptor and from acceptor to dialer."""
    hellos = {each.by_dialer: each for each in connection.of("hello")}
    dialers, acceptors = hellos[True], hellos[False]
    context = digest(
        *group_fields(dialers.words, members),
        integer(dialers.words["sender"]),
        integer(acceptors.words["sender"]),
        connection.certificates[:32],
        connection.certificates[32:],
        dialers.raw,
        acceptors.raw,
    )
    keys = connection.exported(b"EXPORTER-sealring-2-link", context, 64)
    return keys[:32], keys[32:]
