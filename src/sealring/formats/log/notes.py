"""Signed notes (c2sp.org/signed-note) and cosignatures (c2sp.org/tlog-cosignature), Ed25519.

A note is text, an empty line, and signature lines. (name, key id) identifies a key; signatures of
unknown keys are ignored. If a signature of a known key does not verify, the whole note is refused.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from sealring.errors import ForgedStatement, MalformedStatement
from sealring.formats.strict import decode_base64, encode_base64

MAX_NOTE_BYTES: Final = 1 << 17
MAX_SIGNATURES: Final = 64
MAX_NAME_BYTES: Final = 255
_DASH: Final = "\N{EM DASH} "
_PRIVATE: Final = "PRIVATE+KEY+"
_TIME: Final = struct.Struct(">Q")


class SignatureKind(IntEnum):
    """The signature types of c2sp.org/signed-note that are used here."""

    NOTE = 0x01
    """Ed25519 over the text, as a log signs."""
    COSIGNATURE = 0x04
    """Ed25519 over a time and the text, as a witness signs."""


@dataclass(frozen=True, slots=True)
class SignatureLine:
    name: str
    key_id: bytes
    signature: bytes

    def encode(self) -> str:
        return f"{_DASH}{self.name} {encode_base64(self.key_id + self.signature)}\n"


@dataclass(frozen=True, slots=True)
class Note:
    """A note as read. Its signatures are not checked yet."""

    text: str
    lines: tuple[SignatureLine, ...]

    def encode(self) -> bytes:
        return (self.text + "\n" + "".join(line.encode() for line in self.lines)).encode()


@dataclass(frozen=True, slots=True)
class Verifier:
    """A public key with a name."""

    name: str
    kind: SignatureKind
    public: bytes

    def __post_init__(self) -> None:
        check_name(self.name)
        if len(self.public) != 32:
            raise malformed_note(f"the key of {self.name} is not an Ed25519 key: it has 32 bytes")

    @property
    def key_id(self) -> bytes:
        named = self.name.encode() + b"\n" + bytes([self.kind]) + self.public
        return hashlib.sha256(named).digest()[:4]

    def encode(self) -> str:
        """The key as a vkey."""
        public = encode_base64(bytes([self.kind]) + self.public)
        return f"{self.name}+{self.key_id.hex()}+{public}"

    @classmethod
    def parse(cls, text: str) -> Verifier:
        name, kind, key_id, public = _parse_key(text, "verifier key")
        found = cls(name, kind, public)
        if found.key_id != key_id:
            raise malformed_note(f"the verifier key of {name} has another key's id: copy it again")
        return found

    def signed(self, line: SignatureLine) -> bool:
        """Whether the line names this key."""
        return line.name == self.name and line.key_id == self.key_id

    def check(self, text: str, line: SignatureLine) -> int:
        """Checks one signature of this key. Returns its time, or 0 for a kind without one."""
        signature, time = line.signature, 0
        message = text.encode()
        if self.kind is SignatureKind.COSIGNATURE:
            if len(signature) != _TIME.size + 64:
                raise ForgedStatement(
                    f"the cosignature of {self.name} is cut or extended", code="log.forged_note"
                )
            (time,) = _TIME.unpack(signature[: _TIME.size])
            if time >= 1 << 63:
                raise ForgedStatement(
                    f"the cosignature of {self.name} has no possible time", code="log.forged_note"
                )
            signature = signature[_TIME.size :]
            message = _cosigned(text, time)
        try:
            Ed25519PublicKey.from_public_bytes(self.public).verify(signature, message)
        except (InvalidSignature, ValueError):
            raise ForgedStatement(
                f"the signature of {self.name} is not over this text", code="log.forged_note"
            ) from None
        return time


@dataclass(frozen=True, slots=True)
class Signer:
    """A private key with a name. The repr leaves out the key."""

    name: str
    kind: SignatureKind
    key: Ed25519PrivateKey = field(repr=False)

    def __post_init__(self) -> None:
        check_name(self.name)

    @classmethod
    def generate(cls, name: str, kind: SignatureKind) -> Signer:
        return cls(name, kind, Ed25519PrivateKey.generate())

    @property
    def verifier(self) -> Verifier:
        return Verifier(self.name, self.kind, self.key.public_key().public_bytes_raw())

    def encode(self) -> str:
        """The key with its name, as golang.org/x/mod/sumdb/note writes it."""
        private = encode_base64(bytes([self.kind]) + self.key.private_bytes_raw())
        return f"{_PRIVATE}{self.name}+{self.verifier.key_id.hex()}+{private}"

    @classmethod
    def parse(cls, text: str) -> Signer:
        if not text.startswith(_PRIVATE):
            raise malformed_note(f"that is not a signer key, which begins with {_PRIVATE}")
        try:
            name, kind, key_id, private = _parse_key(text.removeprefix(_PRIVATE), "signer key")
        except MalformedStatement:
            # The reason is left out, since it would quote a part of the key.
            raise malformed_note(
                f"that is not a signer key, which is {_PRIVATE}NAME+ID+KEY for an Ed25519 key of "
                f"type {SignatureKind.NOTE:#04x} or {SignatureKind.COSIGNATURE:#04x}"
            ) from None
        if len(private) != 32:
            raise malformed_note("the signer key is not an Ed25519 key, which has 32 bytes")
        found = cls(name, kind, Ed25519PrivateKey.from_private_bytes(private))
        if found.verifier.key_id != key_id:
            raise malformed_note("the signer key has another key's id: copy it again")
        return found

    def sign(self, text: str, time: int = 0) -> SignatureLine:
        """Signs a text. `time` is a cosignature's, in seconds since 1970."""
        if self.kind is SignatureKind.COSIGNATURE:
            signature = _TIME.pack(time) + self.key.sign(_cosigned(text, time))
        else:
            signature = self.key.sign(text.encode())
        return SignatureLine(self.name, self.verifier.key_id, signature)


def parse_note(data: bytes) -> Note:
    if len(data) > MAX_NOTE_BYTES:
        raise malformed_note(f"a note has at most {MAX_NOTE_BYTES} bytes")
    try:
        whole = data.decode()
    except UnicodeDecodeError:
        raise malformed_note("a note is UTF-8, and this is not") from None
    if any(ord(character) < 0x20 and character != "\n" for character in whole):
        raise malformed_note("a note has no control characters, and this has one")
    text, empty, signatures = whole.rpartition("\n\n")
    if not empty:
        raise malformed_note("a note has an empty line before its signatures, and this has none")
    return Note(text + "\n", parse_signatures(signatures))


def parse_signatures(text: str) -> tuple[SignatureLine, ...]:
    """Parses signature lines, from the end of a note or from a witness's answer."""
    if not text.endswith("\n"):
        raise malformed_note("a signature line ends with a newline, and the last one does not")
    lines = text[:-1].split("\n")
    if len(lines) > MAX_SIGNATURES:
        raise malformed_note(f"a note has at most {MAX_SIGNATURES} signatures")
    return tuple(_parse_line(line) for line in lines)


def verified(note: Note, verifiers: Iterable[Verifier]) -> dict[Verifier, int]:
    """The keys that signed the note, with the time of each signature (0 if it has none).

    Raises ForgedStatement if one of the keys has a wrong signature. The result may be empty.
    """
    times: dict[Verifier, int] = {}
    for verifier in verifiers:
        for line in note.lines:
            if verifier.signed(line):
                times[verifier] = max(times.get(verifier, 0), verifier.check(note.text, line))
    return times


def with_signatures(note: Note, more: Sequence[SignatureLine]) -> Note:
    """The note with more signatures. A new one replaces an older one of the same key."""
    fresh = {(line.name, line.key_id): line for line in more}
    kept = [line for line in note.lines if (line.name, line.key_id) not in fresh]
    return Note(note.text, (*kept, *fresh.values()))


def check_name(name: str) -> None:
    if (
        not 1 <= len(name.encode()) <= MAX_NAME_BYTES
        or "+" in name
        or any(character.isspace() or ord(character) < 0x20 for character in name)
    ):
        raise malformed_note(
            f"{name[:80]!r} cannot name a key: 1 to {MAX_NAME_BYTES} bytes, no space and no plus"
        )


def malformed_note(problem: str) -> MalformedStatement:
    return MalformedStatement(problem, code="log.malformed_note")


def _cosigned(text: str, time: int) -> bytes:
    return f"cosignature/v1\ntime {time}\n{text}".encode()


def _parse_line(line: str) -> SignatureLine:
    if not line.startswith(_DASH):
        raise malformed_note("a signature line begins with an em dash and a space")
    name, space, encoded = line.removeprefix(_DASH).partition(" ")
    if not space:
        raise malformed_note("a signature line has a name and a signature")
    check_name(name)
    data = decode_base64(encoded, f"the signature of {name!r}", malformed_note)
    if len(data) <= 4:
        raise malformed_note(f"the signature of {name!r} is cut")
    return SignatureLine(name, data[:4], data[4:])


def _parse_key(text: str, what: str) -> tuple[str, SignatureKind, bytes, bytes]:
    parts = text.split("+", 2)  # base64 may contain a plus too
    if len(parts) != 3:
        raise malformed_note(f"a {what} is NAME+ID+KEY, and {text[:40]!r} is not")
    name, hexadecimal, encoded = parts
    check_name(name)
    data = decode_base64(encoded, f"the {what} of {name}", malformed_note)
    if len(hexadecimal) != 8 or hexadecimal.strip("0123456789abcdef"):
        raise malformed_note(f"the {what} of {name} has no key id of eight hexadecimal digits")
    try:
        kind = SignatureKind(data[0])
    except ValueError:
        raise malformed_note(
            f"the {what} of {name} is of type {data[0]:#04x}; {SignatureKind.NOTE:#04x} (Ed25519) "
            f"and {SignatureKind.COSIGNATURE:#04x} (Ed25519 cosignatures) are served"
        ) from None
    return name, kind, bytes.fromhex(hexadecimal), data[1:]
