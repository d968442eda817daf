"""A vault's header: its id, its grants, and the MAC that keeps others from adding a grant.

Everything in the header is public. The MAC is computed with the vault's key. Without it, an
attacker could add a grant, which would get the vault's next key too.
"""

from __future__ import annotations

import dataclasses
import hmac
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from sealring import _native
from sealring.errors import (
    ConfigurationError,
    NotAVault,
    VaultError,
)
from sealring.formats.strict import read_json, strictly
from sealring.vault.keys import KEY_BYTES, Grant, Opener, Presented, SymmetricKey
from sealring.vault.sealed import ID_BYTES, check_version

FORMAT: Final = "sealring vault"
VERSION: Final = 1
_SALT: Final = b"sealring vault 1"


@dataclass(frozen=True, slots=True)
class OlderKey:
    """An older key, wrapped under the newest. Some objects' keys are still wrapped under it."""

    number: int
    wrapped: str


@dataclass(frozen=True, slots=True)
class Header:
    format: str
    version: int
    id: str
    suite: str
    generation: int
    """The number of changes of the header so far."""
    key: int
    """The number of the vault's key."""
    names: str
    """The key that makes objects' ids from their names, wrapped under the vault's key."""
    older: list[OlderKey]
    grants: list[Grant]
    mac: str

    @property
    def vault(self) -> bytes:
        return bytes.fromhex(self.id)


@dataclass(frozen=True, slots=True)
class KeyRing:
    """The vault's keys, once an opener has opened its header."""

    newest: int
    keys: dict[int, _native.Secret] = field(repr=False)
    names: _native.Secret = field(repr=False)

    @property
    def key(self) -> _native.Secret:
        return self.keys[self.newest]

    def wipe(self) -> None:
        for key in (*self.keys.values(), self.names):
            key.wipe()


def new_header(suite: str) -> tuple[Header, KeyRing]:
    """Makes the header and the keys of a new vault that has no grants yet."""
    ring = KeyRing(1, {1: _native.Secret.random(KEY_BYTES)}, _native.Secret.random(KEY_BYTES))
    vault = bytes(_native.Secret.random(ID_BYTES)).hex()
    names = _native.wrap_key(ring.key, ring.names).hex()
    return Header(FORMAT, VERSION, vault, suite, 0, 1, names, [], [], ""), ring


def changed(header: Header, ring: KeyRing, **changes: Any) -> Header:
    """The header's next generation, with its MAC."""
    made = replace(header, **changes, generation=header.generation + 1)
    return replace(made, mac=_mac(made, ring.key))


def next_key(
    header: Header, ring: KeyRing, presented: Sequence[Presented]
) -> tuple[Header, KeyRing]:
    """The header under a new key of the vault, which unwraps all older keys.

    The presented holders get the new key. Other grants are left out.
    """
    number, key = ring.newest + 1, _native.Secret.random(KEY_BYTES)
    made = KeyRing(number, {**ring.keys, number: key}, ring.names)
    grants = []
    for grant in header.grants:
        for holder in presented:
            if holder.has(grant, header.vault, ring.newest, ring.key):
                grants.append(holder.grant(grant.name, header.vault, number, key))
                break
    if not any(grant.kind != "person" for grant in grants):
        raise ConfigurationError(
            "this would take away the last key that can write to this vault: grant another one "
            "first, and present its secret with the change"
        )
    older = [
        OlderKey(one, _native.wrap_key(key, ring.keys[one]).hex()) for one in sorted(ring.keys)
    ]
    names = _native.wrap_key(key, ring.names).hex()
    return changed(header, made, key=number, names=names, older=older, grants=grants), made


def without_older_keys(header: Header, ring: KeyRing) -> tuple[Header, KeyRing]:
    """When no object is wrapped under them any more."""
    made = KeyRing(ring.newest, {ring.newest: ring.key}, ring.names)
    return changed(header, made, older=[]), made


def with_grant(header: Header, ring: KeyRing, grant: Grant) -> Header:
    if not grant.name or len(grant.name) > 100 or not grant.name.isprintable():
        raise ConfigurationError("a grant's name has 1 to 100 printable characters")
    if any(one.name == grant.name for one in header.grants):
        raise ConfigurationError(
            f"the vault has a grant named {grant.name!r}: choose another name, or revoke that one"
        )
    return changed(header, ring, grants=[*header.grants, grant])


def without_grant(header: Header, ring: KeyRing, name: str) -> Header:
    left = [grant for grant in header.grants if grant.name != name]
    if len(left) == len(header.grants):
        names = ", ".join(grant.name for grant in header.grants)
        unfinished = (
            ". An earlier change of keys is not finished: run `sealring vault rotate --keys-only`"
            if header.older
            else ""
        )
        raise ConfigurationError(
            f"the vault has no grant named {name!r}; it has {names}{unfinished}"
        )
    return changed(header, ring, grants=left)


def write_header(header: Header) -> bytes:
    return json.dumps(dataclasses.asdict(header), indent=1).encode() + b"\n"


def read_header(content: bytes, where: str) -> Header:
    """Parses a header. It is well-formed but not authenticated: `open_header` does that."""
    try:
        document = read_json(content)
    except ValueError:
        raise NotAVault(f"{where} is not a vault's header") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise NotAVault(f"{where} is not a vault's header")
    check_version(document, VERSION, where)
    try:
        header: Header = strictly(Header, document, where, "vault")
        if len(header.vault) != ID_BYTES or not 1 <= header.key < 1 << 63:
            raise ValueError
        # A holder could add a key of its own here, under the number of the next key.
        numbers = [one.number for one in header.older]
        if len(set(numbers)) < len(numbers) or not all(0 < one < header.key for one in numbers):
            raise ValueError("its older keys are not older than its key")
        for text in (header.names, header.mac, *(one.wrapped for one in header.older)):
            bytes.fromhex(text)
        for grant in header.grants:
            bytes.fromhex(grant.wrapped)
            # Errors show these texts before they are authenticated, so they must not contain
            # control characters for a terminal.
            if not all(text.isprintable() for text in (grant.name, grant.kind, grant.resource)):
                raise ValueError("a grant has characters that cannot be printed")
    except (ConfigurationError, ValueError) as problem:
        raise NotAVault(f"{where} cannot be read as a vault's header: {problem}") from None
    return header


def open_header(header: Header, opener: Opener, where: str) -> KeyRing:
    """Unwraps the vault's keys, and checks that a holder of the newest one wrote the header."""
    for grant in header.grants:
        key = opener.unwrap(header.vault, header.key, grant)
        if key is not None and len(key) == KEY_BYTES:
            break
    else:
        what = (
            opener.resource or "this key file"
            if isinstance(opener, SymmetricKey)
            else "this identity"
        )
        raise VaultError(
            f"{where} is not open to {what}; it is to "
            f"{', '.join(f'{grant.name} ({grant.kind})' for grant in header.grants) or 'no key'}",
            code="vault.not_granted",
        )
    if not hmac.compare_digest(_mac(header, key), header.mac):
        raise VaultError(
            f"the header of {where} was changed by something without the vault's key: restore it "
            "from a copy, and look at who can write there",
            code="vault.tampered_header",
        )
    keys = {header.key: key}
    for older in header.older:
        keys[older.number] = _unwrapped(key, older.wrapped, where)
    return KeyRing(header.key, keys, _unwrapped(key, header.names, where))


def _unwrapped(key: _native.Secret, wrapped: str, where: str) -> _native.Secret:
    opened = _native.unwrap_key(key, bytes.fromhex(wrapped))
    if opened is None:
        raise VaultError(
            f"a key in the header of {where} does not open", code="vault.tampered_header"
        )
    return opened


def _mac(header: Header, key: _native.Secret) -> str:
    document = dataclasses.asdict(header)
    del document["mac"]
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return key.derive(_SALT, b"header", KEY_BYTES).hmac_sha256(text.encode()).hex()
