"""A second reader of records, written from docs/spec.md alone (sections 5, 7, 8, 9, 14 and 18).

It imports nothing of sealring. With the keys of a group it opens what was recorded on the links
into one rank, and refuses whatever the specification does not allow.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

PAIR, GROUP, ALERT, BYE, ANNOUNCE, ACCEPT, DATA, STATUS, FETCHED = range(1, 10)
EVERYONE: Final = 0xFFFFFFFF
FURTHER_LANES: Final = range(2, 65)
FIRST_WIRE_LANE: Final = 256
LONGEST: Final = 1 << 20
LONGEST_OF_A_GPU: Final = 262144
_FORMAT: Final = struct.Struct("<2sBBIQIIIIQBBBBIIIQ")
_FIELDS: Final = (
    "magic", "version", "kind", "length", "count", "lane", "generation", "sender", "receiver",
    "collective", "operation", "dtype", "reduction", "algorithm", "message", "segment", "root",
    "total",
)  # fmt: skip
ALERTS: Final = {
    1: "TamperedRecord", 2: "MissingRecord", 3: "ReplayedRecord", 4: "OutOfStep", 5: "PeerLost",
    6: "PeerSilent", 7: "GroupClosed", 8: "NoLongerAdmitted",
}  # fmt: skip


class NotTheSpecification(Exception):
    pass


def require(condition: bool, what: str) -> None:
    if not condition:
        raise NotTheSpecification(what)


def derived(key: bytes, info: bytes) -> bytes:
    return HKDFExpand(SHA256(), 32, info).derive(key)


@dataclass
class Ratchet:
    """One key and its generations. Each suite that uses a key has its own ratchet."""

    key: bytes
    generation: int = 0
    counts: list[int] = field(default_factory=list)

    def at(self, generation: int) -> bytes:
        key = self.key
        for _ in range(generation):
            key = derived(key, b"sealring 1 ratchet")
        return key


class Keys:
    """A link key or a group key, with the one that GPUs use and those of further lanes."""

    def __init__(self, key: bytes) -> None:
        self.cpu = Ratchet(key)
        self.gpu = Ratchet(derived(key, b"sealring 1 gpu"))
        lanes = derived(key, b"sealring 1 lanes")
        self.further = {
            lane: Ratchet(derived(lanes, b"sealring 1 lane" + struct.pack("<I", lane)))
            for lane in FURTHER_LANES
        }

    def of(self, lane: int) -> Ratchet:
        if lane in self.further:
            return self.further[lane]
        return self.gpu if lane else self.cpu

    def all(self) -> list[Ratchet]:
        return [self.cpu, self.gpu, *self.further.values()]


def by_gpu(lane: int) -> bool:
    return lane != 0 and lane not in FURTHER_LANES


@dataclass(frozen=True)
class Opened:
    fields: dict[str, int]
    plain: bytes

    def __getattr__(self, name: str) -> int:
        return self.fields[name]


def parse_header(raw: bytes) -> dict[str, int]:
    values = dict(zip(_FIELDS, _FORMAT.unpack(raw), strict=True))
    require(values.pop("magic") == b"SR", "magic")
    require(values.pop("version") == 1, "version")
    kind, lane = values["kind"], values["lane"]
    require(PAIR <= kind <= FETCHED, "kind")
    require(values["length"] <= (LONGEST_OF_A_GPU if by_gpu(lane) else LONGEST), "length")
    if lane == 1:
        require(kind in (PAIR, GROUP, DATA), "lane 1 of another kind")
    elif lane in FURTHER_LANES:
        require(kind in (PAIR, GROUP, ALERT, BYE, STATUS), "a further lane of another kind")
    elif lane:
        require(kind in (PAIR, GROUP) and FIRST_WIRE_LANE <= lane < 1 << 31, "lane")
    return values


@dataclass(frozen=True)
class Alert:
    error: str
    about: int
    seen_by: int
    collective: int
    text: str

    @classmethod
    def parse(cls, plain: bytes) -> Alert:
        require(17 <= len(plain) <= 17 + 512, "an alert's length")
        code, about, seen_by, collective = struct.unpack_from("<BiiQ", plain)
        return cls(ALERTS[code], about, seen_by, collective, plain[17:].decode("ascii"))


class Inbox:
    """Decodes all records that reach one rank of a group."""

    def __init__(self, rank: int, context: bytes, group_keys: dict[int, bytes]) -> None:
        self.rank = rank
        self._context = context
        self._groups = {sender: Keys(key) for sender, key in group_keys.items()}

    def decode(
        self,
        stream: bytes,
        sender: int,
        link_key: bytes,
        slots: Callable[[int], bytes] | None = None,
        lane: int = 0,
    ) -> list[Opened]:
        """Every record of one pipe in this direction, whose lane is 0 or a further one.

        `slots` gives what the n-th run's slot held.
        """
        link, opened, at = Keys(link_key), [], 0
        runs = 0
        while at < len(stream):
            require(len(stream) - at >= 80, "a stream ends within a header")
            sealed, fields = stream[at : at + 80], parse_header(stream[at : at + 64])
            at += 80
            here = fields["lane"]
            require(here == lane if lane else here not in FURTHER_LANES, "lane")
            in_group = fields["kind"] == GROUP
            require(fields["receiver"] == (EVERYONE if in_group else self.rank), "receiver")
            require(in_group or fields["sender"] == sender, "sender")
            keys = self._groups[fields["sender"]] if in_group else link
            if fields["lane"] >= FIRST_WIRE_LANE:
                require(slots is not None, "a record in a slot")
                assert slots is not None
                opened += self._run(keys, sealed, slots(runs))
                runs += 1
                continue
            payload = stream[at : at + fields["length"] + 16]
            at += len(payload)
            opened.append(self._open(keys, sealed, payload, next_in_order=not in_group))
        return opened

    def finish(self) -> None:
        """Checks that each rank's group records arrived exactly once, over any of the links."""
        for keys in self._groups.values():
            for ratchet in keys.all():
                counts = sorted(ratchet.counts)
                require(counts == list(range(len(counts))), "a group key's counts have a gap")

    def _run(self, keys: Keys, first: bytes, slot: bytes) -> list[Opened]:
        """The records that follow each other in a slot; the link carried the first one's header."""
        require(slot[:80] == first, "the slot begins with another header")
        opened, at, expected = [], 0, parse_header(first[:64])
        while True:
            fields = parse_header(slot[at : at + 64])
            require({**fields, "length": 0} == {**expected, "length": 0}, "a run's next header")
            end = at + 96 + fields["length"]
            one = self._open(keys, slot[at : at + 80], slot[at + 80 : end], next_in_order=False)
            opened.append(one)
            expected = {**fields, "count": fields["count"] + 1, "segment": fields["segment"] + 1}
            at = end
            if fields["length"] < LONGEST_OF_A_GPU or not self._follows(keys, slot[at:], expected):
                return opened

    def _follows(self, keys: Keys, rest: bytes, expected: dict[str, int]) -> bool:
        """Whether the run has another record; bytes left over from an earlier run have other
        counts."""
        try:
            fields = parse_header(rest[:64])
            self._check_header(keys, rest[:80], fields)
        except (NotTheSpecification, InvalidTag, struct.error):
            return False
        return fields["count"] == expected["count"]

    def _check_header(self, keys: Keys, sealed: bytes, fields: dict[str, int]) -> bytes:
        key = keys.of(fields["lane"]).at(fields["generation"])
        self._aead(fields, key, fields["lane"] | 1 << 31, sealed[:64], sealed[64:])
        return key

    def _open(self, keys: Keys, sealed: bytes, payload: bytes, *, next_in_order: bool) -> Opened:
        fields = parse_header(sealed[:64])
        require(len(payload) == fields["length"] + 16, "a stream ends within a payload")
        ratchet = keys.of(fields["lane"])
        if next_in_order:
            require(fields["count"] == len(ratchet.counts), "count")
            require(fields["generation"] - ratchet.generation in (0, 1), "generation")
            ratchet.generation = fields["generation"]
        ratchet.counts.append(fields["count"])
        key = self._check_header(keys, sealed, fields)
        return Opened(fields, self._aead(fields, key, fields["lane"], sealed[:64], payload))

    def _aead(
        self, fields: dict[str, int], key: bytes, lane: int, header: bytes, sealed: bytes
    ) -> bytes:
        nonce = struct.pack("<IQ", lane, fields["count"])
        suite = ChaCha20Poly1305(key) if by_gpu(fields["lane"]) else AESGCM(key)
        return suite.decrypt(nonce, sealed, header + self._context)
