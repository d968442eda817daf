"""Each member's statement when a group forms, the transcript over all statements, and signatures.

Other members pass a statement on, so it proves nothing by itself. Its author proves it by signing
the transcript, which covers every statement. If a member changes, drops or adds a statement, the
others get another transcript, and it cannot make their signatures. A statement also has a
commitment: the digest of a random value. Its author shows the value after it has verified every
member's signature; no other process can show it before. No I/O: bytes in, value out.
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
"""Large enough for a certificate with an attestation of up to 48 KiB in it."""
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
    """Where the member can be reached for further links, encoded as in the store; may be empty."""
    certificate: bytes
    """The certificate's DER encoding."""
    commitment: bytes
    """The commitment to the value that the member shows in the last round (`commitment_to`)."""
    contribution: _native.Secret = field(repr=False)
    """Fresh random bytes for the group's secret."""

    def encode(self) -> bytearray:
        """The statement as bytes. The caller overwrites them: they hold the contribution."""
        public = (
            integer_field(self.rank),
            self.instance.encode(),
            self.host.encode(),
            self.addresses,
            self.certificate,
            self.commitment,
        )
        head = framed(public) + KEY_BYTES.to_bytes(4, "big")
        # Allocated at its final size: a growing buffer leaves copies of its content behind.
        out = bytearray(len(head) + KEY_BYTES)
        with memoryview(out) as view, memoryview(self.contribution) as secret:
            view[: len(head)] = head
            view[len(head) :] = secret
        return out


class Stated(NamedTuple):
    """The public fields of a member's statement, as others read them."""

    rank: int
    instance: str
    host: str
    addresses: bytes
    certificate: bytes
    fingerprint: bytes
    """SHA-256 of the certificate."""
    contributes: bool
    """Whether the contribution is not all zeros."""


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
        """A digest of 32 bytes over everything that the members agree on."""
        settings = json.dumps(dict(terms.settings), sort_keys=True, separators=(",", ":"))
        before = framed([_TRANSCRIPT]) + framed_group(terms) + framed([settings.encode()])
        return self._native.transcript(before)

    def wrong_value(self, shown: Iterable[bytes | bytearray]) -> int | None:
        """The place of the first member whose value differs from its commitment; else None."""
        place = self._native.first_wrong_value(framed([_CONFIRMS]), tuple(shown))
        return None if place < 0 else place

    def group_secret(self, transcript: bytes) -> _native.Secret:
        """Derives the group's secret from all contributions, and wipes them."""
        return self._native.group_secret(transcript, _SECRET, KEY_BYTES)


def encode_bundle(entries: Mapping[int, bytes | bytearray], head: bytes = b"") -> bytearray:
    """Encodes `head`, then each member's rank and bytes, in the order of the ranks."""
    return _native.encode_bundle(entries, head)


def parse_bundle(raw: bytes | bytearray, start: int = 0) -> dict[int, bytearray]:
    """Parses a bundle into each member's bytes, by rank. The caller overwrites them and `raw`."""
    try:
        return _native.parse_bundle(raw, start)
    except ValueError:
        raise MalformedSetup("a bundle of members' messages is not one") from None


def group_keys(secret: _native.Secret, ranks: Iterable[int]) -> list[_native.Secret]:
    """The key of each of these members, with which it seals records that others forward."""
    infos = tuple([_GROUP_KEY + integer_field(rank) for rank in ranks])
    return secret.derive_each(b"", infos, KEY_BYTES)


def commitment_to(value: _native.Secret | bytearray) -> bytes:
    """The commitment of the first round to the value that a member shows in the last round."""
    with memoryview(value) as shown:
        digest = hashlib.sha256(framed([_CONFIRMS]) + len(shown).to_bytes(4, "big"))
        digest.update(shown)  # without a copy: the value may still be secret
    return digest.digest()


def sign_transcript(key: PrivateKey, transcript: bytes) -> bytes:
    return sign(key, _signed(transcript))


def wrong_signer(
    certificates: Mapping[int, SignedCertificate],
    signatures: Mapping[int, bytes],
    transcript: bytes,
) -> int | None:
    """The first rank whose signature its certificate's key did not make; None if all are right.

    One native call verifies all signatures, without Python's lock.
    """
    ranks = list(signatures)
    wrong = _native.wrong_signatures(
        tuple([certificates[rank].read for rank in ranks]),
        tuple(signatures.values()),
        _signed(transcript),
    )
    return ranks[wrong[0]] if wrong else None


def _signed(transcript: bytes) -> bytes:
    """The signed bytes, as in TLS 1.3 (RFC 8446, 4.4.3): a signature is valid for one purpose."""
    return b" " * 64 + _AGREES + b"\0" + transcript
