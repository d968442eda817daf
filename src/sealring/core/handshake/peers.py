"""dial: from a socket to a verified peer with keys. Also the checks that accept (incoming.py) uses.

    dialer                                acceptor
      | <- TLS 1.3, both certificates; or the session that an earlier TLS connection made ->
      |  verify                        verify  |
      | -- Hello ----------------------------> |  check, admit
      | <---------------------------- Hello -- |
      |  check                                 |
      | -- Accept, with an offer ------------> |
      | <------------------------- evidence -- |  only where the policy has peers show it
      | -- evidence -------------------------> |

At each arrow a Refusal may come instead. Both sides then raise the same error. After TLS both ends
keep a session for later connections.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from typing import Final

from cryptography import x509

from sealring.core.handshake.channel import (
    SecureChannel,
    export_link_keys,
    pair_context,
    receive_message,
    refusing,
    send_message,
)
from sealring.core.handshake.connection import Connection, address_of
from sealring.core.handshake.messages import (
    Hello,
    Message,
    encode_message,
    hello_of,
    parse_message,
    write_hello,
)
from sealring.core.handshake.refusals import error_of
from sealring.core.handshake.resumption import SessionConnection
from sealring.core.handshake.sessions import EXPORTED_BYTES, EXPORTER_LABEL, Session, SessionTable
from sealring.core.handshake.terms import Terms, members_digest
from sealring.core.handshake.tls import TlsConnection
from sealring.core.identity.credentials import Credentials, JudgedPeer
from sealring.core.identity.names import WorkerName
from sealring.core.identity.verification import (
    KnownCertificates,
    SignedCertificate,
    VerifiedPeer,
    admit,
    signed_certificate,
)
from sealring.errors import (
    DuplicateRank,
    HandshakeError,
    MalformedSetup,
    PeerIncompatible,
    SealringError,
    WrongPeer,
)
from sealring.limits import SUITE

_ANSWER_SECONDS: Final = 10.0
"""How long a dialed server may take for TLS: a silent server must not delay the next try."""

Offer = Callable[[VerifiedPeer, Hello], Message | None]
"""The dialer's last check, called with a checked hello. It raises an error to refuse the peer, or
returns what the dialer's Accept offers for the transport."""
ACCEPT: Final = frozenset({"type", "shm"})


def dial(
    sock: socket.socket,
    credentials: Credentials,
    terms: Terms,
    peer_rank: int,
    deadline: float,
    sessions: SessionTable | None = None,
    offer: Offer = lambda *_: None,
) -> SecureChannel:
    """Sets up the link to `peer_rank` on a connected socket, by `deadline` (time.monotonic()).

    If the table has a session with this rank, there is no TLS handshake; a TLS handshake adds a
    session to the table. On an error the socket is closed; after success the channel owns it.
    """
    sessions = sessions or SessionTable()
    connection = _dialed(sock, credentials, terms, peer_rank, deadline, sessions)
    with refusing(connection):
        connection.deadline = min(deadline, time.monotonic() + _ANSWER_SECONDS)
        certificate = connection.handshake()
        connection.deadline = deadline
        known = sessions.certificates
        peer, judged = admitted_peer(connection, certificate, credentials, terms, peer_rank, known)
        own = write_hello(terms, peer.rank)
        send_message(connection, own)
        theirs, hello = understood_hello(bytes(receive_message(connection)), connection, peer)
        check_hello(hello, terms, peer, connection.who)
        offered = offer(peer, hello)
        context = pair_context(connection, terms, peer, own, theirs, dialer=True)
        keys = export_link_keys(connection, context, dialer=True)
        send_message(connection, encode_message({"type": "accept", "shm": offered}))
        if judged is not None and judged.admission.evidence_limit:
            # The dialer sends its own evidence last: after that it refuses nothing more.
            shown = bytes(receive_message(connection, judged.admission.evidence_limit))
            check_evidence(shown, connection, judged, peer)
            send_message(connection, judged.admission.evidence)
        if isinstance(connection, TlsConnection):
            keep_session(sessions, connection, credentials, certificate, peer, context, dialer=True)
    return SecureChannel(connection, peer, hello, keys)


def _dialed(
    sock: socket.socket,
    credentials: Credentials,
    terms: Terms,
    rank: int,
    deadline: float,
    sessions: SessionTable,
) -> Connection:
    address = address_of(sock)
    who = f"the peer at {address} (to be rank {rank})"
    session = sessions.with_rank(rank)
    try:
        if session is not None:
            if may_go_on(session, credentials, terms, rank, address, sessions.certificates):
                return SessionConnection(
                    sock, sessions, session=session, who=who, deadline=deadline
                )
            # The attempt goes on with TLS: another process may have this rank by now.
            sessions.discard(session)
        return TlsConnection(sock, credentials, dialer=True, who=who, deadline=deadline)
    except BaseException:
        sock.close()
        raise


def keep_session(
    sessions: SessionTable,
    connection: TlsConnection,
    credentials: Credentials,
    certificate: x509.Certificate,
    peer: VerifiedPeer,
    context: bytes,
    *,
    dialer: bool,
) -> None:
    material = connection.export(EXPORTER_LABEL, EXPORTED_BYTES, context)
    sessions.add(
        Session.exported(material, peer.rank, credentials.certificate, certificate, dialer=dialer)
    )


def admitted_peer(
    connection: Connection,
    certificate: x509.Certificate,
    credentials: Credentials,
    terms: Terms,
    rank: int | None,
    known: KnownCertificates,
) -> tuple[VerifiedPeer, JudgedPeer | None]:
    address = connection.address
    peer, judged = verified(certificate, credentials, terms, rank, address, known)
    connection.admitted_rank = peer.rank
    connection.who = f"rank {peer.rank} at {address}"
    connection.check_negotiated()
    return peer, judged


def may_go_on(
    session: Session,
    credentials: Credentials,
    terms: Terms,
    rank: int | None,
    address: str,
    known: KnownCertificates,
) -> bool:
    """Whether TLS would now prove the same two keys and the peer would be admitted.

    If this worker shows evidence, its certificate must also be the one that the peer has of it,
    because the evidence belongs to that certificate.
    """
    own, admission = credentials.certificate, credentials.admission
    if session.own_certificate != own:
        shows_evidence = admission is not None and admission.evidence_limit
        if shows_evidence or session.own_certificate.public_key() != own.public_key():
            return False
    try:
        verified(session.peer_certificate, credentials, terms, rank, address, known)
    except SealringError:
        return False
    return True


def verified(
    certificate: x509.Certificate,
    credentials: Credentials,
    terms: Terms,
    rank: int | None,
    address: str,
    known: KnownCertificates,
) -> tuple[VerifiedPeer, JudgedPeer | None]:
    signed = signed_certificate(certificate, credentials.authorities, address, known)
    return admitted(signed, lambda: certificate, credentials, terms, rank, address)


def admitted(
    signed: SignedCertificate,
    certificate: Callable[[], x509.Certificate],
    credentials: Credentials,
    terms: Terms,
    rank: int | None,
    address: str,
) -> tuple[VerifiedPeer, JudgedPeer | None]:
    """Checks the name and dates of a signed certificate, and the policy if there is one.

    `certificate` gives the certificate itself, and is called only for a policy. Without a policy,
    the dates of certificates with which the group was formed are not checked again: an existing
    group does not end when its members' certificates expire. With a policy the dates always count,
    because a broker renews the certificates of the members that it still admits.
    """
    admission = credentials.admission
    if admission is None:
        dates = signed.fingerprint not in terms.certificates
        return admit(
            signed, job=terms.job, world=terms.world, rank=rank, where=address, judge_dates=dates
        ), None
    judged: JudgedPeer | None = None

    def judge(name: WorkerName) -> None:
        nonlocal judged
        who = f"rank {name.rank} at {address}"
        try:
            judged = admission.check_certificate(certificate(), name, who)
        except HandshakeError as error:
            error.peer = name.rank
            raise

    peer = admit(signed, job=terms.job, world=terms.world, rank=rank, where=address, judge=judge)
    return peer, judged


def understood_hello(raw: bytes, connection: Connection, peer: VerifiedPeer) -> tuple[bytes, Hello]:
    try:
        message = parse_message(raw)
        if message["type"] == "refusal":
            raise error_of(message, connection.who, peer.rank)
        hello = hello_of(message)
    except (MalformedSetup, PeerIncompatible) as error:
        # The parser does not know the peer: add its name.
        raise type(error)(f"{connection.who}: {error}", code=error.code) from None
    return raw, hello


def check_evidence(
    raw: bytes, connection: Connection, judged: JudgedPeer, peer: VerifiedPeer
) -> None:
    try:
        message = parse_message(raw)
    except MalformedSetup:
        message = {"type": "evidence"}  # evidence is not one of our JSON messages
    if message["type"] == "refusal":
        raise error_of(message, connection.who, peer.rank)
    # If its evidence does not pass, a peer is not admitted, whatever its certificate says.
    connection.admitted_rank = None
    try:
        judged.check_evidence(raw, connection.who)
    except HandshakeError as error:
        error.peer = peer.rank
        raise
    connection.admitted_rank = peer.rank


def check_hello(hello: Hello, terms: Terms, peer: VerifiedPeer, who: str) -> None:
    if SUITE not in hello.suites:
        raise PeerIncompatible(
            f"{who} offers {', '.join(hello.suites)[:200]} and not {SUITE}: install one version of "
            "sealring everywhere",
            code="handshake.suite_mismatch",
        )
    if hello.job != terms.job:
        raise WrongPeer(
            f"{who} is of job {terms.job} by its certificate and {hello.job} by its hello",
            code="handshake.wrong_job",
        )
    if hello.sender != peer.rank:
        raise WrongPeer(
            f"{who} calls itself rank {hello.sender}, against its certificate",
            code="handshake.wrong_rank",
        )
    # Checked before all else that depends on the group: a worker of another group differs there
    # too, and should get this error.
    if (hello.group, hello.epoch) != (terms.group, terms.epoch):
        raise WrongPeer(
            f"{who} is in group {hello.group!r}, epoch {hello.epoch!r}, and rank {terms.rank} in "
            f"group {terms.group!r}, epoch {terms.epoch!r}: an earlier run is still alive, or the "
            "ranks make their groups in different orders",
            misdirected=True,
            code="handshake.wrong_group",
        )
    if peer.rank == terms.rank and hello.instance != terms.instance:
        raise DuplicateRank(
            f"{who} ({hello.host}) and the worker at {terms.host} both hold rank {terms.rank}: two "
            "workers were started with one RANK, or an earlier run is still alive"
        )
    if hello.receiver != terms.rank:
        raise WrongPeer(
            f"{who} meant to reach rank {hello.receiver} and reached rank {terms.rank}: the "
            "rendezvous store is wrong",
            misdirected=True,
            code="handshake.wrong_rank",
        )
    if hello.world != terms.world:
        raise PeerIncompatible(
            f"{who} counts {hello.world} workers and rank {terms.rank} counts {terms.world}: start "
            "all workers with one WORLD_SIZE",
            code="handshake.wrong_world_size",
        )
    if hello.members != members_digest(terms.members) or peer.rank not in terms.members:
        raise WrongPeer(
            f"{who} and rank {terms.rank} list different members of group {terms.group!r}: call "
            "new_group with the same ranks everywhere",
            code="handshake.wrong_group",
        )
    if hello.transcript != terms.transcript:
        raise WrongPeer(
            f"{who} and rank {terms.rank} formed group {terms.group!r} with different members or "
            "settings: one of them is of another attempt, or a member told them different things",
            code="handshake.wrong_group",
        )
    if (hello.purpose, hello.lane) != (terms.purpose, terms.lane):
        raise MalformedSetup(
            f"{who} answered for lane {hello.lane} of {hello.purpose}, and was asked for lane "
            f"{terms.lane} of {terms.purpose}"
        )
    if hello.settings != dict(terms.settings):
        raise PeerIncompatible(
            f"{who} runs with {_listed(hello.settings, terms.settings)} and rank {terms.rank} with "
            f"{_listed(terms.settings, hello.settings)}: set them alike everywhere",
            code="handshake.settings_mismatch",
        )


def _listed(settings: Mapping[str, int], others: Mapping[str, int]) -> str:
    """The settings that differ from the other side's, and those that only the other side has."""
    apart = sorted(settings.items() - others.items())
    missing = sorted(f"no {name}" for name in others.keys() - settings.keys())
    return ", ".join([*(f"{name}={value}" for name, value in apart), *missing])[:200]
