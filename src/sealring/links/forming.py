"""How the members of a group agree, along a tree over the links there are: three rounds.

    round 1   every member's statement (handshake/statements.py) reaches every member
    round 2   every member's signature over the transcript of all statements does
    round 3   every member shows that it has verified all signatures of round 2

In each round a member collects what its subtree says and sends it up; the root sends all of it
down. A member has at most log2(n) + 1 neighbours in the tree, and exchanges two messages with each
in a round. No member believes another about a third: each verifies every certificate and every
signature itself. A group exists for a member after round 3, so a member that refuses in round 1 or
2 keeps the group from existing for any member, also where its neighbours do not pass its error on.

In round 3 a member shows the random value whose digest is in its statement. It is as good as a
second signature over the transcript, and cheaper: a member signs one transcript in an attempt, so
what it shows after it has verified everything is about the transcript with its signature.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from sealring import _native
from sealring.errors import DuplicateRank, HandshakeError, MalformedSetup, WrongGroup
from sealring.handshake.peers import admitted
from sealring.handshake.secrets import Erased
from sealring.handshake.statements import (
    MAX_STATEMENT_BYTES,
    Stated,
    Statement,
    Statements,
    commitment_to,
    encode_bundle,
    group_keys,
    parse_bundle,
    sign_transcript,
    wrong_signer,
)
from sealring.handshake.terms import Terms
from sealring.identity.credentials import Credentials
from sealring.identity.verification import (
    KnownCertificates,
    Reading,
    SignedCertificate,
    read_all,
    require_signed,
)
from sealring.limits import KEY_BYTES
from sealring.links.rendezvous import Address, parse_addresses

_UP: Final = 1
_DOWN: Final = 2
MOST_LINKED_AT_ONCE: Final = 8
"""In a group of up to so many, all pairs are linked when it forms: later would cost more."""

Conversation = Generator[bytes | bytearray, Mapping[int, bytearray], "Agreed"]
"""Yields this member's message of a round; is sent all members' messages of it, by rank."""


@dataclass(frozen=True, slots=True)
class Proven:
    """What a member proved on its link with this worker."""

    instance: str
    key: str
    """SHA-256 of its public key."""


@dataclass(frozen=True, slots=True)
class Member:
    host: str
    key: str
    """SHA-256 of its public key, by which a broker would take it out of the job."""
    addresses: tuple[Address, ...]
    """Where it takes further links."""
    instance: str
    certificate: bytes
    """SHA-256 of it."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all members have agreed on, each having verified all others."""

    transcript: bytes
    members: Mapping[int, Member]
    """By rank in the job, this worker included."""
    _secret: _native.Secret = field(repr=False)

    def group_key(self, rank: int) -> _native.Secret:
        return self.group_keys([rank])[rank]

    def group_keys(self, ranks: Sequence[int]) -> dict[int, _native.Secret]:
        return dict(zip(ranks, group_keys(self._secret, ranks), strict=True))

    def wipe(self) -> None:
        self._secret.wipe()


@dataclass(frozen=True, slots=True)
class Place:
    """A member's place in the tree over the group's ranks in ascending order."""

    parent: int | None
    children: tuple[int, ...]
    subtrees: Mapping[int, frozenset[int]]
    """The members below each child, itself included."""


def place_in_tree(members: Sequence[int], rank: int) -> Place:
    """A binomial tree: a member's parent has its lowest set bit cleared. So a parent is lower."""
    ordered = sorted(members)
    at = ordered.index(rank)
    reach = at & -at if at else 1 << len(ordered).bit_length()
    steps = [1 << bit for bit in range(reach.bit_length() - 1) if at + (1 << bit) < len(ordered)]
    subtrees = {ordered[at + step]: frozenset(ordered[at + step : at + 2 * step]) for step in steps}
    return Place(ordered[at - reach] if at else None, tuple(subtrees), subtrees)


def first_links(members: Sequence[int], rank: int, *, everybody: bool) -> set[int]:
    """The members that this one is linked with when the group forms."""
    if everybody or len(members) <= MOST_LINKED_AT_ONCE:
        return set(members) - {rank}
    place = place_in_tree(members, rank)
    return {*place.children, *([] if place.parent is None else [place.parent])}


class TreeExchange:
    """Carries a conversation's rounds up and down the tree. One thread uses it."""

    def __init__(
        self,
        members: Sequence[int],
        rank: int,
        conversation: Conversation,
        send: Callable[[int, bytearray], None],
    ) -> None:
        """`send` takes a rank and a message for it, which is overwritten afterwards."""
        self._members = frozenset(members)
        self._rank = rank
        self._place = place_in_tree(members, rank)
        self._conversation = conversation
        self._send = send
        self._collected: dict[int, bytes | bytearray] = {}
        self._awaited: set[int] = set()
        self._sent_up = False
        self.result: Agreed | None = None
        """What the conversation came to, once it is done."""

    @property
    def neighbours(self) -> frozenset[int]:
        parent = self._place.parent
        return frozenset([*self._place.children, *([] if parent is None else [parent])])

    def awaited(self) -> list[int]:
        """The neighbours without whose message this member cannot go on."""
        parent = self._place.parent
        return sorted(self._awaited) or ([] if parent is None else [parent])

    def farness(self) -> float:
        """From 0 to 1: how many members may be between this one and the one that all wait for.

        It is 0 for a member that waits for a leaf of the tree. Those that wait for their parents
        come after all that wait for their children, from the root's children on downwards.
        """
        height = max(1, (len(self._members) - 1).bit_length())
        if self._awaited:
            below = max(len(self._place.subtrees[child]) for child in self._awaited)
            return (below - 1).bit_length() / (2 * height)
        above = sorted(self._members).index(self._rank).bit_count()
        return (height + above) / (2 * height)

    def start(self) -> None:
        self._begin(next(self._conversation))

    def take(self, sender: int, raw: bytearray) -> None:
        """A message of a neighbour in the tree, which is overwritten."""
        with Erased(raw):
            kind, entries = raw[0], parse_bundle(raw, 1)
        if kind == _UP and sender in self._awaited:
            if entries.keys() != self._place.subtrees[sender]:
                raise _malformed(sender, "spoke for other members than those below it")
            self._awaited.remove(sender)
            self._collected.update(entries)
            self._go_on()
        elif kind == _DOWN and sender == self._place.parent and self._sent_up:
            if entries.keys() != self._members:
                raise _malformed(sender, "did not pass on every member's message")
            self._finish_round(entries)
        else:
            raise _malformed(sender, "is out of step in set-up")

    def _begin(self, own: bytes | bytearray) -> None:
        self._collected = {self._rank: own}
        self._awaited = set(self._place.children)
        self._sent_up = False
        self._go_on()

    def _go_on(self) -> None:
        if self._awaited:
            return
        if self._place.parent is None:
            everything = {rank: bytearray(entry) for rank, entry in self._collected.items()}
            self._finish_round(everything)
        else:
            self._sent_up = True
            self._send(self._place.parent, _message(_UP, self._collected))

    def _finish_round(self, entries: dict[int, bytearray]) -> None:
        collected = self._collected
        if entries[self._rank] != collected[self._rank]:
            raise _malformed(self._place.parent, "changed what this worker had said")
        for child in self._place.children:
            self._send(child, _message(_DOWN, entries))
        try:
            following = self._conversation.send(entries)
        except StopIteration as ended:
            self.result = ended.value
        else:
            self._begin(following)
        finally:
            for entry in (*entries.values(), *collected.values()):
                if isinstance(entry, bytearray):
                    _native.erase(entry)


def agree(
    credentials: Credentials,
    terms: Terms,
    addresses: bytes,
    linked: Mapping[int, Proven],
    known: KnownCertificates | None = None,
) -> Conversation:
    """The three rounds. `linked` has what the members proved that this one is linked with.

    `known` are the certificates whose signature this worker has verified for earlier groups.
    """
    confirmation = _native.Secret.random(KEY_BYTES)
    own = Statement(
        terms.rank,
        terms.instance,
        terms.host,
        addresses,
        credentials.certificate.public_bytes(Encoding.DER),
        commitment_to(confirmation),
        _native.Secret.random(KEY_BYTES),
    )
    encoded = own.encode()
    own.contribution.wipe()
    said = yield encoded
    statements = Statements(said[rank] for rank in terms.members)
    _check_statements(statements, terms)
    readings = _read_certificates(statements, credentials, known)
    members: dict[int, Member] = {}
    certificates: dict[int, SignedCertificate] = {}
    for each, reading in zip(statements.members, readings, strict=True):
        members[each.rank], certificates[each.rank] = _verified_member(
            each, reading, credentials, terms, known
        )
    _check_linked(members, linked)
    transcript = statements.transcript(terms)
    signature = sign_transcript(credentials.private_key, transcript)
    signatures = yield signature
    made = {rank: bytes(signatures[rank]) for rank in terms.members}
    if made[terms.rank] == signature:
        del made[terms.rank]
    if (liar := wrong_signer(certificates, made, transcript)) is not None:
        raise _not_as_told(terms, liar, "did not sign what")
    shown = yield bytearray(confirmation)
    place = statements.wrong_value(shown[rank] for rank in terms.members)
    if place is not None:
        liar = terms.members[place]
        raise _not_as_told(terms, liar, "did not confirm that every member signed what")
    return Agreed(transcript, members, statements.group_secret(transcript))


def agreed_alone(credentials: Credentials, terms: Terms) -> Agreed:
    """A group of one agrees with itself."""
    conversation = agree(credentials, terms, b"", {})
    exchange = TreeExchange(terms.members, terms.rank, conversation, lambda *_: None)
    exchange.start()
    assert exchange.result is not None
    return exchange.result


def confirm(agreed: Agreed, linked: Mapping[int, Proven]) -> Conversation:
    """One round in which every member says that it has got so far."""
    _check_linked(agreed.members, linked)
    yield b""
    return agreed


def _check_linked(members: Mapping[int, Member], linked: Mapping[int, Proven]) -> None:
    """The key in a member's statement is the one that a broker revokes; a link must show it too."""
    for rank, proven in linked.items():
        if (members[rank].instance, members[rank].key) != (proven.instance, proven.key):
            raise DuplicateRank(
                f"the members do not agree which process is rank {rank}, or it shows one key on "
                "its links and another in its statement: two workers were started with one RANK, "
                "or an earlier run is still alive",
                peer=rank,
                proven=True,
            )


def _check_statements(statements: Statements, terms: Terms) -> None:
    for rank, each in zip(terms.members, statements.members, strict=True):
        if each.rank != rank:
            raise MalformedSetup(f"a statement of rank {each.rank} came as that of rank {rank}")
        if not each.contributes:
            raise MalformedSetup(f"rank {rank} contributed no randomness", peer=rank, proven=True)


def _read_certificates(
    statements: Statements, credentials: Credentials, known: KnownCertificates | None
) -> list[Reading]:
    """Every member's, in the order of the statements."""
    readings = read_all(
        [each.certificate for each in statements.members],
        [each.fingerprint for each in statements.members],
        credentials.authorities,
        known,
    )
    for each, reading in zip(statements.members, readings, strict=True):
        if isinstance(reading, _native.ReadCertificate) and not reading.readable:
            raise MalformedSetup(f"rank {each.rank}'s certificate is none")
    return readings


def _verified_member(
    statement: Stated,
    reading: Reading,
    credentials: Credentials,
    terms: Terms,
    known: KnownCertificates | None,
) -> tuple[Member, SignedCertificate]:
    where = f"{statement.host}, as another member passed it on"
    signed = require_signed(reading, credentials.authorities, where, known)
    peer, _ = admitted(
        signed,
        lambda: x509.load_der_x509_certificate(statement.certificate),
        credentials,
        terms,
        statement.rank,
        where,
    )
    addresses = parse_addresses(statement.addresses) if statement.addresses else ()
    member = Member(statement.host, peer.key, addresses, statement.instance, peer.fingerprint)
    return member, signed


def _message(kind: int, entries: Mapping[int, bytes | bytearray]) -> bytearray:
    return encode_bundle(entries, bytes([kind]))


def most_bytes(members: int) -> int:
    """A message of a round is no longer than this."""
    return 1 + members * (MAX_STATEMENT_BYTES + 8)


def _not_as_told(terms: Terms, rank: int, what: str) -> WrongGroup:
    return WrongGroup(
        f"rank {rank} {what} rank {terms.rank} was told about group {terms.group!r}: a member "
        "between them changed what it passed on, or they do not mean the same group",
        peer=rank,
        proven=True,
    )


def _malformed(sender: int | None, what: str) -> HandshakeError:
    return MalformedSetup(f"rank {sender} {what}", peer=sender, proven=True)
