"""How the members of a group agree, along a tree over the links there are: three rounds.

    round 1   every member's statement (core/handshake/statements.py) reaches every member
    round 2   every member's signature over the transcript of all statements does
    round 3   every member shows that it has verified all signatures of round 2

In each round messages go up the tree and down again (tree.py). A member has at most log2(n) + 1
neighbours in the tree, and exchanges two messages with each in a round. No member believes another
about a third: each verifies every certificate and every signature itself. A group exists for a
member after round 3, so a member that refuses in round 1 or 2 keeps the group from existing for any
member, also where its neighbours do not pass its error on.

In round 3 a member shows the random value whose digest is in its statement. It is as good as a
second signature over the transcript, and cheaper: a member signs one transcript in an attempt, so
what it shows after it has verified everything is about the transcript with its signature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from cryptography.hazmat.primitives.serialization import Encoding

from sealring import _native, limits
from sealring.core.handshake.peers import admitted
from sealring.core.handshake.statements import (
    Stated,
    Statement,
    Statements,
    commitment_to,
    group_keys,
    sign_transcript,
    wrong_signer,
)
from sealring.core.handshake.terms import Terms
from sealring.core.identity.credentials import PEER_EVIDENCE, Credentials
from sealring.core.identity.loading import certificate_from_der
from sealring.core.identity.verification import (
    KnownCertificates,
    Reading,
    SignedCertificate,
    read_all,
    require_signed,
)
from sealring.core.links.rendezvous import Address, parse_addresses
from sealring.core.links.tree import LastRound, Rounds, TreeExchange, place_in_tree
from sealring.errors import DuplicateRank, HandshakeError, MalformedSetup, WrongPeer
from sealring.limits import KEY_BYTES


@dataclass(frozen=True, slots=True)
class Proven:
    """What a member proved on its link with this worker."""

    instance: str
    key: str
    """SHA-256 of its public key."""


class Member(NamedTuple):
    host: str
    key: str
    """SHA-256 of its public key, by which a broker would take it out of the job."""
    stated_addresses: bytes
    instance: str
    certificate: bytes
    """SHA-256 of it."""

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Where it takes further links. Read when it is dialed: most pairs never link.

        MalformedSetup, about this member alone, where it has stated something else.
        """
        return parse_addresses(self.stated_addresses)


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


def first_links(members: Sequence[int], rank: int, *, everybody: bool) -> set[int]:
    """The members that this one is linked with when the group forms."""
    if everybody or len(members) <= limits.MOST_LINKED_AT_ONCE:
        return set(members) - {rank}
    place = place_in_tree(members, rank)
    return {*place.children, *([] if place.parent is None else [place.parent])}


Conversation: TypeAlias = Rounds[Agreed]


def agree(
    current: Callable[[], Credentials],
    terms: Terms,
    addresses: bytes,
    linked: Mapping[int, Proven],
    known: KnownCertificates | None = None,
    *,
    sparse: bool,
) -> Conversation:
    """The three rounds, and before them one in which all say that they have come, where a broker
    gives certificates and not all pairs are linked.

    `linked` has what the members proved that this one is linked with.

    `current` gives this worker's credentials, whose certificate may be renewed while it waits.
    `known` are the certificates whose signature this worker has verified for earlier groups.
    """
    if sparse and PEER_EVIDENCE in terms.settings:
        # A broker's certificates live for minutes, and in a tree members speak before all have
        # come: they state their certificates when all have.
        yield b""
    confirmation = _native.Secret.random(KEY_BYTES)
    credentials = current()
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
    credentials = current()
    statements = _read_statements(said, terms)
    _check_statements(statements, terms)
    readings = read_certificates(statements, credentials, known)
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
        # Not proven, even of a neighbour: another member may have told it something else.
        raise _not_as_told(terms, liar, "did not sign what", proven=False)
    shown = yield LastRound(bytearray(confirmation), transcript)
    place = statements.wrong_value(shown[rank] for rank in terms.members)
    if place is not None:
        liar = terms.members[place]
        what = "did not confirm that every member signed what"
        raise _not_as_told(terms, liar, what, proven=True)
    return Agreed(transcript, members, statements.group_secret(transcript))


def agreed_alone(credentials: Credentials, terms: Terms) -> Agreed:
    """A group of one agrees with itself."""
    conversation = agree(lambda: credentials, terms, b"", {}, sparse=False)
    exchange = TreeExchange(terms.members, terms.rank, conversation, lambda *_: None)
    exchange.start()
    assert exchange.result is not None
    return exchange.result


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


def _read_statements(said: Mapping[int, bytearray], terms: Terms) -> Statements:
    try:
        return Statements(said[rank] for rank in terms.members)
    except MalformedSetup:
        for rank in terms.members:
            try:
                Statements([said[rank]])
            except MalformedSetup as error:
                raise MalformedSetup(f"rank {rank}: {error}", peer=rank, proven=True) from None
        raise


def _check_statements(statements: Statements, terms: Terms) -> None:
    for rank, each in zip(terms.members, statements.members, strict=True):
        if each.rank != rank:
            raise MalformedSetup(
                f"a statement of rank {each.rank} came as that of rank {rank}",
                peer=rank,
                proven=True,
            )
        if not each.contributes:
            raise MalformedSetup(f"rank {rank} contributed no randomness", peer=rank, proven=True)


def read_certificates(
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
            raise MalformedSetup(
                f"rank {each.rank}'s certificate is none", peer=each.rank, proven=True
            )
    return readings


def _verified_member(
    statement: Stated,
    reading: Reading,
    credentials: Credentials,
    terms: Terms,
    known: KnownCertificates | None,
) -> tuple[Member, SignedCertificate]:
    where = f"{statement.host}, as another member passed it on"
    try:
        signed = require_signed(reading, credentials.authorities, where, known)
        peer, _ = admitted(
            signed,
            lambda: certificate_from_der(
                statement.certificate,
                MalformedSetup(f"rank {statement.rank}'s certificate is none"),
            ),
            credentials,
            terms,
            statement.rank,
            where,
        )
    except HandshakeError as error:
        # About the member that stated it, also where the certificate is another's.
        error.peer, error.misdirected = statement.rank, False
        raise
    member = Member(
        statement.host, peer.key, statement.addresses, statement.instance, peer.fingerprint
    )
    return member, signed


def _not_as_told(terms: Terms, rank: int, what: str, *, proven: bool) -> WrongPeer:
    return WrongPeer(
        f"rank {rank} {what} rank {terms.rank} was told about group {terms.group!r}: a member "
        "between them changed what it passed on, or they do not mean the same group",
        peer=rank,
        proven=proven,
        code="handshake.wrong_group",
    )
