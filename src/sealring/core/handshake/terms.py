"""What two workers must agree on before they share keys, and the digests that bind it into keys.

Every digest is SHA-256 over fields, each with its length before it. So different lists of fields
never have the same bytes.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import socket
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, Literal, NamedTuple, get_args

from sealring.core.identity.names import check_job
from sealring.errors import ConfigurationError
from sealring.limits import MAX_WORLD, PROTOCOL_VERSION, SUITE

Purpose = Literal["form", "collectives", "messages"]
"""The use of a pipe. A "form" pipe first forms its group and then carries collectives. Pipes with
the other purposes are opened later."""
PURPOSES: Final[tuple[Purpose, ...]] = get_args(Purpose)


class PipeName(NamedTuple):
    """A pipe between this worker and another one, in one epoch of a group."""

    peer: int
    """The other worker's rank in the job."""
    purpose: Purpose = "form"
    lane: int = 0
    """The number of one of several pipes for collectives, from 0 on."""


MAX_NAME = 255
_INSTANCE = re.compile(r"[0-9a-f]{32}", re.ASCII)


def is_name(text: str) -> bool:
    """Whether a text can name a group, an epoch or a host: short and printable."""
    return 1 <= len(text) <= MAX_NAME and text.isprintable()


def is_instance(text: str) -> bool:
    return _INSTANCE.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class Terms:
    """One worker's view of the group it is about to join."""

    job: str
    group: str
    epoch: str
    world: int
    """How many workers the job has, in this group or not."""
    members: tuple[int, ...]
    """The job's ranks that are in this group, in the group's order."""
    rank: int
    """This worker's rank in the job."""
    settings: Mapping[str, int]
    """The settings that must be equal on all members."""
    instance: str = field(default_factory=lambda: secrets.token_hex(16))
    """Random for each attempt. It distinguishes a worker that reconnects from a second worker with
    the same rank."""
    transcript: str = ""
    """The formed group's transcript in hexadecimal, for links that are made afterwards."""
    purpose: Purpose = "form"
    lane: int = 0
    certificates: frozenset[bytes] = frozenset()
    """SHA-256 of the certificates with which the group was formed, for links made afterwards."""
    host: str = field(default_factory=lambda: socket.gethostname() or "unnamed")
    """The host's name. People read it, and it shows which ranks share a host."""

    def __post_init__(self) -> None:
        check_job(self.job)
        for what, text in (("group", self.group), ("epoch", self.epoch), ("host", self.host)):
            if not is_name(text):
                raise ConfigurationError(
                    f"the {what} {text[:80]!r} must have 1 to {MAX_NAME} printable characters"
                )
        if not 1 <= self.world <= MAX_WORLD:
            raise ConfigurationError(f"a world of {self.world} is not between 1 and {MAX_WORLD}")
        members = set(self.members)
        inside = not members or (min(members) >= 0 and max(members) < self.world)
        if len(members) != len(self.members) or not inside:
            raise ConfigurationError(
                f"the group's members are not different ranks of a world of {self.world}"
            )
        if self.rank not in members:
            raise ConfigurationError(f"rank {self.rank} is not a member of group {self.group}")
        if not is_instance(self.instance):
            raise ConfigurationError("an instance is 16 bytes in lower-case hexadecimal")


@lru_cache(maxsize=64)
def members_digest(members: tuple[int, ...]) -> str:
    return digest_of([_ranks(members)]).hex()


def group_context(terms: Terms) -> bytes:
    """32 bytes that every member computes alike. They are part of records' associated data."""
    return hashlib.sha256(framed_group(terms)).digest()


def link_context(
    terms: Terms,
    *,
    dialer: int,
    acceptor: int,
    dialer_fingerprint: bytes,
    acceptor_fingerprint: bytes,
    dialer_hello: bytes,
    acceptor_hello: bytes,
) -> bytes:
    """32 bytes that both ends of a connection compute alike, used as the exporter's context."""
    ends = [
        integer_field(dialer),
        integer_field(acceptor),
        dialer_fingerprint,
        acceptor_fingerprint,
        dialer_hello,
        acceptor_hello,
    ]
    return hashlib.sha256(framed_group(terms) + framed(ends)).digest()


def framed_group(terms: Terms) -> bytes:
    """The fields that name the group, each with its length."""
    return _framed_group(terms.job, terms.group, terms.epoch, terms.world, terms.members)


@lru_cache(maxsize=64)
def _framed_group(job: str, group: str, epoch: str, world: int, members: tuple[int, ...]) -> bytes:
    """Cached: every link of a group needs this, and so do its transcript and its records."""
    fields = [
        integer_field(PROTOCOL_VERSION),
        SUITE.encode(),
        job.encode(),
        group.encode(),
        epoch.encode(),
        integer_field(world),
        _ranks(members),
    ]
    return framed(fields)


def digest_of(fields: Iterable[bytes]) -> bytes:
    return hashlib.sha256(framed(fields)).digest()


def framed(fields: Iterable[bytes]) -> bytes:
    """Each field with its length before it."""
    return b"".join([part for value in fields for part in (len(value).to_bytes(4, "big"), value)])


def _ranks(members: tuple[int, ...]) -> bytes:
    return struct.pack(f">{len(members)}Q", *members)


def integer_field(value: int) -> bytes:
    return value.to_bytes(8, "big")
