"""What each member says of itself when a group forms; the transcript over all of it; signatures.

A statement passes through other members on its way, so it proves nothing by itself. What proves it
is its author's signature over the transcript, which has every statement in it: a member that
changes, drops or adds one ends with another transcript than the others, whose signatures it cannot
make. A statement also has a commitment: the digest of a random value that its author shows when it
has verified every member's signature, and that no other process can show before. Pure: bytes in,
value out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from sealring import _native
from sealring.core.handshake.terms import (
    Terms,
    framed,
    framed_group,
    integer_field,
    is_name,
)
from sealring.core.identity.kept_key import PrivateKey
from sealring.core.identity.verification import SignedCertificate
from sealring.errors import MalformedSetup
from sealring.formats.signed import sign
from sealring.limits import KEY_BYTES

MAX_STATEMENT_BYTES: Final = _native.MAX_STATEMENT_BYTES
"""A certificate may have an attestation of up to 48 KiB in it."""
_TRANSCRIPT: Final = b"sealring 2 transcript"
_SECRET: Final = b"sealring 2 group secret"
_GROUP_KEY: Final = b"sealring 2 group key"
_AGREES: Final = b"sealring 2, group transcript"
_CONFIRMS: Final = b"sealring 2 confirmation"


@dataclass(frozen=True, slots=True)
class Statement:
    rank: int
    instance: str
    host: str
    addresses: bytes
    """Where the member can be reached for further links, as in the store; nothing if nowhere."""
    certificate: bytes
    """Its DER encoding."""
    commitment: bytes
    """To the value that the member shows in the last round (`commitment_to`)."""
    contribution: _native.Secret = field(repr=False)
    """Fresh random bytes, towards the group's secret."""

    def encode(self) -> bytearray:
        """For the caller to overwrite: the contribution is in it."""
        public = (
            integer_field(self.rank),
            self.instance.encode(),
            self.host.encode(),
            self.addresses,
            self.certificate,
            self.commitment,
        )
        head = framed(public) + KEY_BYTES.to_bytes(4, "big")
        # Of its final size at once: a buffer that grows leaves copies of its content behind.
        out = bytearray(len(head) + KEY_BYTES)
        with memoryview(out) as view, memoryview(self.contribution) as secret:
            view[: len(head)] = head
            view[len(head) :] = secret
        return out


class Stated(NamedTuple):
    """What others read in a member's statement, and what is public of it."""

    rank: int
    instance: str
    host: str
    addresses: bytes
    certificate: bytes
    fingerprint: bytes
    """SHA-256 of the certificate."""
    contributes: bool
    """Its contribution is not all zeros."""


class Statements:
    """All members' statements, in the group's order. Contributions stay in the native core."""

    def __init__(self, encoded: Iterable[bytes | bytearray]) -> None:
        try:
            self._native = _native.Statements(tuple(encoded))
            self.members = [
                Stated(rank, instance, host.decode(), addresses, certificate, fingerprint, given)
                for rank, instance, host, addresses, certificate, fingerprint, given in (
                    self._native.rows()
                )
            ]
        except UnicodeDecodeError:
            raise MalformedSetup("a statement's names are not text") from None
        except ValueError as problem:
            raise MalformedSetup(str(problem)) from None
        if not all(map(is_name, {each.host for each in self.members})):
            raise MalformedSetup("a statement's instance, host or addresses are none")

    def transcript(self, terms: Terms) -> bytes:
        """32 bytes over all that the members agree on."""
        settings = json.dumps(dict(terms.settings), sort_keys=True, separators=(",", ":"))
        before = framed([_TRANSCRIPT]) + framed_group(terms) + framed([settings.encode()])
        return self._native.transcript(before)

    def wrong_value(self, shown: Iterable[bytes | bytearray]) -> int | None:
        """The place of the first member that has shown another value than it committed to."""
        place = self._native.first_wrong_value(framed([_CONFIRMS]), tuple(shown))
        return None if place < 0 else place

    def group_secret(self, transcript: bytes) -> _native.Secret:
        """From every member's contribution; they are wiped."""
        return self._native.group_secret(transcript, _SECRET, KEY_BYTES)


def encode_bundle(entries: Mapping[int, bytes | bytearray], head: bytes = b"") -> bytearray:
    """Each member's bytes with its rank, in the order of the ranks; `head` before all of it."""
    return _native.encode_bundle(entries, head)


def parse_bundle(raw: bytes | bytearray, start: int = 0) -> dict[int, bytearray]:
    """For the caller to overwrite, as `raw` is."""
    try:
        return _native.parse_bundle(raw, start)
    except ValueError:
        raise MalformedSetup("a bundle of members' messages is not one") from None


def group_keys(secret: _native.Secret, ranks: Iterable[int]) -> list[_native.Secret]:
    """What each of these members seals with that others pass on."""
    infos = tuple([_GROUP_KEY + integer_field(rank) for rank in ranks])
    return secret.derive_each(b"", infos, KEY_BYTES)


def commitment_to(value: _native.Secret | bytearray) -> bytes:
    """What a member states in the first round of the value that it shows in the last one."""
    with memoryview(value) as shown:
        digest = hashlib.sha256(framed([_CONFIRMS]) + len(shown).to_bytes(4, "big"))
        digest.update(shown)  # no copy of it, for it may not have been shown yet
    return digest.digest()


def sign_transcript(key: PrivateKey, transcript: bytes) -> bytes:
    return sign(key, _signed(transcript))


def wrong_signer(
    certificates: Mapping[int, SignedCertificate],
    signatures: Mapping[int, bytes],
    transcript: bytes,
) -> int | None:
    """The first of these ranks whose signature its certificate's key did not make.

    All of them are verified in one call, without the interpreter.
    """
    ranks = list(signatures)
    wrong = _native.wrong_signatures(
        tuple([certificates[rank].read for rank in ranks]),
        tuple(signatures.values()),
        _signed(transcript),
    )
    return ranks[wrong[0]] if wrong else None


def _signed(transcript: bytes) -> bytes:
    """As in TLS 1.3 (RFC 8446, 4.4.3): no signature for one purpose is valid for another."""
    return b" " * 64 + _AGREES + b"\0" + transcript
