"""Reads certificates with the package `cryptography`, to compare with the native reader.

It also mutates certificates, but keeps the lengths and the authority's signature valid, so that a
mutation reaches the code behind those checks.
"""

from __future__ import annotations

import hashlib
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from sealring.core.identity.certificates import WORLD_SIZE_OID
from sealring.core.identity.names import WorkerName
from sealring.limits import MAX_WORLD

Outcome = str | tuple[str, int | None, str, int, int]
"""What is wrong, or the worker's URI, world and key, and when the certificate starts and ends."""

NONE: Final = "no certificate"
UNSIGNED: Final = "not signed by the authority"
NO_WORKER: Final = "not a worker's"
_LATER_FIELDS: Final = {0x81, 0x82, 0xA3}
"""Fields of version 3 only; `cryptography` accepts them in version 1, too."""


def judged(der: bytes, authority: x509.Certificate) -> Outcome:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            certificate = x509.load_der_x509_certificate(der)
        except (ValueError, x509.InvalidVersion):
            return NONE
        if certificate.version is x509.Version.v1 and _LATER_FIELDS & _tags(certificate):
            return NONE
        try:
            certificate.verify_directly_issued_by(authority)
        except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
            return UNSIGNED
        return _claims(certificate)


def _tags(certificate: x509.Certificate) -> set[int]:
    return {part.tag for part in parse(certificate.tbs_certificate_bytes)[0].parts or []}


def _claims(certificate: x509.Certificate) -> Outcome:
    try:
        extensions = certificate.extensions
        names = list(extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
        constraints = extensions.get_extension_for_class(x509.BasicConstraints).value
        key = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    except (
        ValueError,
        TypeError,
        UnsupportedAlgorithm,
        x509.DuplicateExtension,
        x509.ExtensionNotFound,
        x509.UnsupportedGeneralNameType,
    ):
        return NO_WORKER
    if len(names) != 1 or not isinstance(names[0], x509.UniformResourceIdentifier):
        return NO_WORKER
    if WorkerName.parse(names[0].value) is None or constraints.ca:
        return NO_WORKER
    try:
        stated = extensions.get_extension_for_oid(WORLD_SIZE_OID).value.public_bytes()
        world = int.from_bytes(stated[2:], "big")
        shortest = world.to_bytes(world.bit_length() // 8 + 1, "big")
        if stated != bytes((2, len(shortest))) + shortest or not 1 <= world <= MAX_WORLD:
            return NO_WORKER
    except x509.ExtensionNotFound:
        world = None
    starts, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return (
        names[0].value,
        world,
        hashlib.sha256(key).hexdigest(),
        int(starts.timestamp()),
        int(ends.timestamp()),
    )


@dataclass
class Node:
    """A DER value that can be changed; `parts` has the values in it, if they are DER."""

    tag: int
    content: bytes = b""
    parts: list[Node] | None = None
    prefix: bytes = b""
    """Bytes before the parts: a bit string's number of unused bits."""

    def encode(self) -> bytes:
        if self.parts is not None:
            self.content = self.prefix + b"".join(part.encode() for part in self.parts)
        size = len(self.content)
        if size < 0x80:
            return bytes((self.tag, size)) + self.content
        length = size.to_bytes((size.bit_length() + 7) // 8, "big")
        return bytes((self.tag, 0x80 | len(length))) + length + self.content

    def all(self) -> list[Node]:
        return [self, *(below for part in self.parts or [] for below in part.all())]


def parse(data: bytes) -> list[Node]:
    """Parses DER values; raises ValueError for anything else."""
    nodes = []
    while data:
        if len(data) < 2 or data[0] & 0x1F == 0x1F:
            raise ValueError
        tag, length, head = data[0], data[1], 2
        if length >= 0x80:
            size = length & 0x7F
            length, head = int.from_bytes(data[2 : 2 + size], "big"), 2 + size
        content = data[head : head + length]
        if len(content) != length:
            raise ValueError
        nodes.append(_node(tag, content))
        data = data[head + length :]
    return nodes


def _node(tag: int, content: bytes) -> Node:
    if tag & 0x20:
        return Node(tag, parts=parse(content))
    if tag == 0x04:  # an extension's value
        try:
            return Node(tag, content, parse(content) or None)
        except ValueError:
            pass
    return Node(tag, content)


def mutated(content: bytes, choose: random.Random) -> bytes:
    """Returns a certificate's signed content with one to three changes and correct lengths."""
    (root,) = parse(content)
    for _ in range(choose.choice([1, 1, 1, 2, 3])):
        choose.choice(_CHANGES)(choose.choice(root.all()), root, choose)
    return root.encode()


def _flip(node: Node, _: Node, choose: random.Random) -> None:
    if node.content and node.parts is None:
        changed = bytearray(node.content)
        changed[choose.randrange(len(changed))] ^= 1 << choose.randrange(8)
        node.content = bytes(changed)


def _set_byte(node: Node, _: Node, choose: random.Random) -> None:
    if node.content and node.parts is None:
        changed = bytearray(node.content)
        changed[choose.randrange(len(changed))] = choose.choice([0, 1, 2, 0x30, 0x7F, 0x80, 0xFF])
        node.content = bytes(changed)


def _retag(node: Node, _: Node, choose: random.Random) -> None:
    node.tag = choose.choice(
        [1, 2, 3, 4, 5, 6, 12, 19, 22, 23, 24, 0x30, 0x31, 0x80, 0x81, 0x82, 0x86, 0xA0, 0xA3]
    )


def _grow(node: Node, _: Node, choose: random.Random) -> None:
    added = choose.choice([b"\0", b"\x05\0", b"\xff", b"\x02\x01\x00"])
    if node.parts is None:
        node.content = choose.choice([added + node.content, node.content + added])
    else:
        node.parts.append(Node(added[0], added[2:]))


def _cut(node: Node, _: Node, choose: random.Random) -> None:
    if node.parts:
        node.parts.pop(choose.randrange(len(node.parts)))
    elif node.content:
        node.content = choose.choice([node.content[1:], node.content[:-1], b""])


def _repeat(node: Node, _: Node, choose: random.Random) -> None:
    if node.parts:
        at = choose.randrange(len(node.parts))
        node.parts.insert(at, node.parts[at])


def _swap(node: Node, _: Node, choose: random.Random) -> None:
    if node.parts and len(node.parts) > 1:
        at = choose.randrange(len(node.parts) - 1)
        node.parts[at : at + 2] = reversed(node.parts[at : at + 2])


def _copy(node: Node, root: Node, choose: random.Random) -> None:
    other = choose.choice(root.all())
    if root not in (node, other) and node not in other.all():
        node.tag, node.content, node.parts, node.prefix = (
            other.tag, other.content, other.parts and list(other.parts), other.prefix,
        )  # fmt: skip


_CHANGES: Final[list[Callable[[Node, Node, random.Random], None]]] = [
    _flip, _flip, _set_byte, _retag, _grow, _cut, _repeat, _swap, _copy,
]  # fmt: skip
