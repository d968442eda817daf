"""A worker that is no longer admitted tries to keep the others from forming a group.

The worker still has a key and a certificate of the job's authority, so it completes TLS. It can
connect to every listener, and it can write its own address into the store.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sealring.attest.evidence.admission import key_digest
from sealring.core.handshake import Terms, accept, dial
from sealring.core.identity import Credentials, WorkerName
from sealring.core.identity.certificates import issue
from sealring.core.identity.kept_key import KeptKey
from sealring.errors import HandshakeError, PeerNotAdmitted, named
from tests.codes import coded
from tests.core.handshake import test_judging as judging
from tests.core.handshake.meeting import soon, terms
from tests.core.handshake.test_channel import foreign, read_message
from tests.core.identity.issuing import HOUR, NOW, Issuer
from tests.core.links.test_mesh import assert_linked
from tests.core.links.worlds import ISSUER, World, address_key, world

EVICTED = 2


def refusal_by_rank_0(mesh: World, credentials: Credentials, own: Terms) -> HandshakeError:
    """The evicted worker dials rank 0."""
    sock = socket.create_connection(mesh.store.address(0))
    with pytest.raises(HandshakeError) as caught:
        dial(sock, credentials, own, 0, soon())
    return caught.value


@pytest.mark.parametrize(
    ("issued", "error"),
    [
        (NOW - 5 * HOUR, "handshake.certificate_expired"),
        (NOW + 5 * HOUR, "handshake.certificate_not_yet_valid"),
    ],
)
@pytest.mark.threat("J29")
def test_a_certificate_outside_its_dates_does_not_end_the_set_up(issued: Any, error: str) -> None:
    with world(4) as mesh:
        mesh.start(0)
        old = ISSUER.credentials(EVICTED, now=issued)
        assert refusal_by_rank_0(mesh, old, mesh.terms(EVICTED)).code == error
        for rank in (1, 2, 3):
            mesh.start(rank)
        mesh.join()
        assert_linked(mesh)


# ---- revoked by the broker, or refused by the policy -----------------------------------------


def attested(rank: int, **changes: Any) -> Credentials:
    return judging.credentials(rank, judging.attest(), judging.policy(), **changes)


@contextlib.contextmanager
def group_without(*revoked: Credentials) -> Iterator[World]:
    """Rank 0 waits for the others; at the end of the block they come, and the group must form."""
    out = frozenset(key_digest(one.certificate) for one in revoked)
    with world(4) as mesh:

        def start(rank: int) -> None:
            own = attested(rank, keys_out=out)
            mesh.start(rank, credentials=own, own_terms=mesh.terms(rank, settings=own.settings))

        start(0)
        mesh.store.address(0)
        yield mesh
        for rank in (1, 2, 3):
            start(rank)
        mesh.join()
        assert_linked(mesh)


def own_terms(credentials: Credentials, **changes: Any) -> Terms:
    return terms(EVICTED, settings=credentials.settings, **changes)


@pytest.mark.threat("J29")
def test_a_revoked_worker_does_not_end_the_set_up() -> None:
    evicted = attested(EVICTED)
    with group_without(evicted) as mesh:
        refused = refusal_by_rank_0(mesh, evicted, own_terms(evicted))
        assert named(refused) == "handshake.certificate_revoked"


@pytest.mark.threat("J29")
def test_a_worker_that_the_policy_no_longer_lists_does_not_end_the_set_up() -> None:
    old = judging.policy(judging.OTHER)
    evicted = judging.credentials(EVICTED, judging.attest(judging.OTHER), old)
    with group_without() as mesh:
        sock = socket.create_connection(mesh.store.address(0))
        with pytest.raises(PeerNotAdmitted, check=coded("handshake.peer_not_admitted")):
            # Rank 0 does not pass the old policy either, so either end may be the first to refuse.
            dial(sock, evicted, own_terms(evicted), 0, soon())


@pytest.mark.threat("J29")
def test_a_worker_without_attestation_does_not_end_the_set_up() -> None:
    bare = judging.Worker(Ed25519PrivateKey.generate(), b"", b"")
    evicted = judging.credentials(EVICTED, bare, judging.policy())
    with group_without() as mesh:
        assert (
            named(refusal_by_rank_0(mesh, evicted, own_terms(evicted))) == "handshake.not_attested"
        )


@pytest.mark.threat("J29")
def test_a_revoked_worker_gains_nothing_by_another_world_size() -> None:
    """The certificate from an earlier, larger run is refused as revoked, not as a disagreement."""
    evicted = attested(EVICTED)
    worker = judging.attest()
    certificate = issue(
        judging.ISSUER.certificate,
        judging.ISSUER.key,
        worker.key.public_key(),
        WorkerName("job", EVICTED),
        5,
        timedelta(hours=1),
        attestation=worker.claims,
    )
    evicted = replace(evicted, certificate=certificate, key=KeptKey.of(worker.key))
    with group_without(evicted) as mesh:
        larger = own_terms(evicted, world=5, members=tuple(range(5)))
        sock = socket.create_connection(mesh.store.address(0))
        with pytest.raises(HandshakeError):
            dial(sock, evicted, larger, 0, soon())


@pytest.mark.threat("J29")
def test_a_revoked_worker_gains_nothing_by_another_key_exchange(tmp_path: Path) -> None:
    """Rank 0 judges the certificate before it looks at the key exchange that TLS negotiated."""
    evicted = attested(EVICTED)
    with group_without(evicted) as mesh:
        context = foreign(tmp_path, evicted, ssl.PROTOCOL_TLS_CLIENT)
        sock = socket.create_connection(mesh.store.address(0), timeout=10)
        with context.wrap_socket(sock) as tls:
            assert read_message(tls)["error"] == "handshake.certificate_revoked"


# ---- an address in the store that leads to the evicted worker --------------------------------


@contextlib.contextmanager
def listening(answer: Callable[[socket.socket], object]) -> Iterator[tuple[bytes, list[str]]]:
    """Runs a server that calls `answer` with each connection; yields its address and the errors."""
    answered: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    sock, _ = server.accept()
                except OSError:
                    return
                try:
                    answer(sock)
                except HandshakeError as error:
                    answered.append(named(error))

        thread = threading.Thread(target=serve)
        thread.start()
        host, port = server.getsockname()
        try:
            yield f'[["{host}",{port}]]'.encode(), answered
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize(
    ("credentials", "error"),
    [
        (ISSUER.credentials(0, now=NOW - 5 * HOUR), "handshake.certificate_expired"),
        (Issuer("foreign").credentials(0, trusting=(ISSUER,)), "handshake.unknown_authority"),
    ],
    ids=["expired", "foreign"],
)
@pytest.mark.threat("J29")
def test_an_evicted_worker_at_a_false_address_does_not_end_the_set_up(
    credentials: Credentials, error: str
) -> None:
    with (
        world(4) as mesh,
        listening(lambda sock: accept(sock, credentials, terms(0), soon())) as (lie, answered),
    ):
        mesh.store.overlay[address_key(0)] = lie
        mesh.start_all()
        while len(answered) < 4:  # once each by ranks 1 to 3, and a second time by one of them
            assert not mesh.outcomes, mesh.outcomes
            time.sleep(0.01)
        assert set(answered) == {error}
        del mesh.store.overlay[address_key(0)]
        mesh.join()
        assert_linked(mesh)
