"""Sealed names and values: what a store sees of a key and of its value. No I/O.

    name    HMAC-SHA256 under the store's name key, in hex
    value   one or more parts, each:

     0        2        3       4          8         24        32       64              64 + length
     | magic  | version| kind  | length   | writer  | number  | salt   | encrypted     | tag     |

Every part has its own key, HKDF(value key, salt, what the part is and where it belongs), which is
used once. So writers need not coordinate. A forked child has none of the keys.
"""

from __future__ import annotations

import enum
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from sealring import _native
from sealring.errors import StoreError
from sealring.limits import KEY_BYTES, STORED_VERSION, TAG_BYTES

_SALT: Final = b"sealring-1 store"
_MAGIC: Final = b"SV"
_HEADER: Final = struct.Struct(">2sBBI16sQ32s")
_NONCE: Final = bytes(12)
"""A part's key seals that part and nothing else, so its nonce need not vary."""

PART_OVERHEAD: Final = _HEADER.size + TAG_BYTES
MAX_VALUE_BYTES: Final = 1 << 30
WRITER_BYTES: Final = 16


def tampered(problem: str) -> StoreError:
    return StoreError(problem, code="store.tampered_value")


class Kind(enum.IntEnum):
    VALUE = 1
    """Written by set(): the first part, or the only one."""
    APPENDED = 2
    """Added by append()."""
    COUNTER = 3
    """An empty part, which says that the key is a counter. Its number has another name."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part as it is in the store, not yet opened."""

    kind: Kind
    writer: bytes
    number: int
    """The part's number among the writer's parts, from 1 in the order of writing."""
    salt: bytes
    header: bytes
    sealed: bytes

    @property
    def size(self) -> int:
        return len(self.header) + len(self.sealed)


@dataclass(frozen=True, slots=True)
class StoreKeys:
    """The keys derived from one key for one job, run and restart. Printing it is safe."""

    name_key: _native.Secret = field(repr=False)
    counter_key: _native.Secret = field(repr=False)
    value_key: _native.Secret = field(repr=False)

    @staticmethod
    def derive(key: _native.Secret, context: Iterable[str]) -> StoreKeys:
        """Derives the keys. `context` names their use: another context gives unrelated keys."""
        if len(key) != KEY_BYTES:
            raise ValueError(f"a store's key has {KEY_BYTES} bytes, not {len(key)}")
        bound = _fields(text.encode() for text in context)

        def derived(purpose: bytes) -> _native.Secret:
            return key.derive(_SALT, _fields([purpose, bound]), KEY_BYTES)

        return StoreKeys(derived(b"names"), derived(b"counters"), derived(b"values"))

    def value_name(self, key: str) -> str:
        return self.name_key.hmac_sha256(key.encode()).hex()

    def counter_name(self, key: str) -> str:
        """The name of a counter's number. It differs from the value's name, so that an unsealed
        number is never taken for a value."""
        return self.counter_key.hmac_sha256(key.encode()).hex()

    def seal(self, kind: Kind, name: str, writer: bytes, number: int, value: bytes) -> bytes:
        if len(value) > MAX_VALUE_BYTES:
            raise ValueError(f"a sealed value has at most {MAX_VALUE_BYTES} bytes")
        salt = os.urandom(32)
        header = _HEADER.pack(_MAGIC, STORED_VERSION, kind, len(value), writer, number, salt)
        return header + self._part_key(salt, name).seal(_NONCE, value, header)

    def open(self, part: Part, name: str) -> bytes:
        value = self._part_key(part.salt, name).open(_NONCE, part.sealed, part.header)
        if value is None:
            raise tampered(
                "the store holds a value that no worker of this job put there under this key"
            )
        return value

    def _part_key(self, salt: bytes, name: str) -> _native.Secret:
        info = _fields([b"sealring-1 store value", name.encode()])
        return self.value_key.derive(salt, info, KEY_BYTES)


def parse_parts(raw: bytes) -> tuple[Part, ...]:
    """Parses a value into its parts, without opening them; raises store.tampered_value."""
    rest = memoryview(raw)
    parts = [_parse_part(rest)]
    while rest := rest[parts[-1].size :]:
        parts.append(_parse_part(rest))
    first, *others = (part.kind for part in parts)
    appended = all(kind is Kind.APPENDED for kind in others)
    if not appended or (first is Kind.COUNTER and others):
        raise tampered(
            "the store holds parts that do not make one value: somebody joined them, or a worker "
            "appended to a counter"
        )
    return tuple(parts)


def _parse_part(raw: memoryview) -> Part:
    if len(raw) < PART_OVERHEAD:
        raise tampered(f"the store holds {len(raw)} bytes where a sealed value has more")
    header = bytes(raw[: _HEADER.size])
    magic, version, kind, length, writer, number, salt = _HEADER.unpack(header)
    if magic != _MAGIC or version != STORED_VERSION or kind not in list(Kind):
        raise tampered("the store holds a value that is not sealed")
    if length > MAX_VALUE_BYTES or len(raw) < PART_OVERHEAD + length:
        raise tampered("the store holds a value that is cut short")
    sealed = bytes(raw[_HEADER.size : PART_OVERHEAD + length])
    return Part(Kind(kind), writer, number, salt, header, sealed)


def _fields(fields: Iterable[bytes]) -> bytes:
    """Joins the fields, each with its length, so that different lists never give equal bytes."""
    return b"".join(len(value).to_bytes(4, "big") + value for value in fields)
