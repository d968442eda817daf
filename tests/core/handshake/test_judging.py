"""Peers judge each other's attestation by their own policies, besides the authority's signature."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from sealring.attest.evidence import Challenge, Policy, Trust, parse_policy, verify_evidence
from sealring.attest.evidence.admission import PolicyAdmission, key_digest
from sealring.attest.evidence.simulated import Simulator
from sealring.attest.evidence.worker import claims_in, encode_claims, parse_claims
from sealring.core.handshake import SecureChannel
from sealring.core.identity import Credentials, WorkerName
from sealring.core.identity.certificates import issue
from sealring.core.identity.kept_key import KeptKey
from sealring.errors import HandshakeError, PeerUnreachable, named
from tests.codes import coded
from tests.core.handshake.meeting import meeting, terms
from tests.core.handshake.test_sessions import Pair
from tests.core.identity.issuing import Issuer

NONCE = bytes(range(32))
GOOD, OTHER = b"good", b"other"
SIMULATOR, FOREIGN = (Simulator.create(datetime.now(UTC)) for _ in range(2))
ISSUER = Issuer()


def policy(*measurements: bytes, evidence: bool = False) -> Policy:
    admitted = [one.hex() for one in measurements or (GOOD,)]
    return parse_policy(
        f'version = 1\n[simulated]\nroots = ["{SIMULATOR.fingerprint}"]\n'
        f"measurements = {admitted}\n[peers]\nevidence = {str(evidence).lower()}\n"
    )


def trust(*roots: Simulator) -> Trust:
    return Trust(
        datetime.now(UTC), simulated=frozenset(root.fingerprint for root in roots or (SIMULATOR,))
    )


@dataclass(frozen=True)
class Worker:
    key: Ed25519PrivateKey
    evidence: bytes
    claims: bytes


def attest(
    measurement: bytes = GOOD,
    simulator: Simulator = SIMULATOR,
    key: Ed25519PrivateKey | None = None,
) -> Worker:
    key = key or Ed25519PrivateKey.generate()
    public = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    evidence = simulator.attest(Challenge(NONCE, public), measurement)
    worker = verify_evidence(evidence, Challenge(NONCE, public), trust(simulator))
    digest = hashlib.sha256(evidence.encode()).hexdigest()
    return Worker(key, evidence.encode(), encode_claims(worker, digest, "00" * 32))


def credentials(rank: int, worker: Worker, judging: Policy, **changes: Any) -> Credentials:
    certificate = issue(
        ISSUER.certificate,
        ISSUER.key,
        worker.key.public_key(),
        WorkerName("job", rank),
        4,
        timedelta(hours=1),
        attestation=worker.claims or None,
    )
    admission = PolicyAdmission(judging, trust, evidence=worker.evidence)
    admission = replace(admission, **changes)
    key = KeptKey.of(worker.key)
    return Credentials("job", rank, certificate, (ISSUER.certificate,), key, admission)


def end(rank: int, worker: Worker, judging: Policy, **changes: Any) -> Any:
    who = credentials(rank, worker, judging, **changes)
    return who, terms(rank, settings=who.settings)


def assert_refused(dialer: Any, acceptor: Any, error: str, about: int) -> str:
    """Asserts that one side refuses and the other gets the reason; returns the text."""
    with meeting(dialer, acceptor) as met:
        # The dialer shows its evidence last, and then listens.
        if isinstance(met.dialer, SecureChannel):
            with pytest.raises(HandshakeError, check=coded(error)):
                met.dialer.receive()
        else:
            assert named(met.dialer) == error, met.dialer
        assert named(met.acceptor) == error, met.acceptor
    judging = met.acceptor if about == dialer[1].rank else met.dialer
    assert isinstance(judging, HandshakeError)
    assert (judging.peer, judging.proven) == (about, False), "it is not admitted"
    return str(judging)


@pytest.mark.parametrize("evidence", [False, True])
def test_two_attested_workers_meet(evidence: bool) -> None:
    rules = policy(evidence=evidence)
    with meeting(end(1, attest(), rules), end(0, attest(), rules)) as met:
        dialed, accepted = met.channels()
        assert dialed.link_keys.send == accepted.link_keys.receive


@pytest.mark.parametrize("renewed", [0, 1])
def test_a_worker_that_has_renewed_its_certificate_meets_its_peers_again(renewed: int) -> None:
    """The evidence is new but the key is the same, so the old session could have been used."""
    rules, pair, workers = policy(GOOD, OTHER, evidence=True), Pair(), [attest(), attest()]
    first = [end(rank, worker, rules) for rank, worker in enumerate(workers)]
    then = list(first)
    then[renewed] = end(renewed, attest(OTHER, key=workers[renewed].key), rules)
    for zero, one in (first, first):
        pair.meet(one=one, zero=zero)
    if renewed == 0:  # the dialer's first attempt fails; its next one uses TLS
        with pytest.raises(PeerUnreachable, match="no session with this worker any more"):
            pair.meet(one=then[1], zero=then[0])
    for zero, one in (then, then):
        pair.meet(one=one, zero=zero)
    assert pair.counts == (2, 2)


@pytest.mark.threat("B25")
def test_a_certificate_of_the_authority_without_an_attestation() -> None:
    bare = Worker(Ed25519PrivateKey.generate(), b"", b"")
    dialer, acceptor = end(1, bare, policy()), end(0, attest(), policy())
    assert "says nothing of an attestation" in assert_refused(
        dialer, acceptor, "handshake.not_attested", 1
    )


@pytest.mark.threat("B25")
def test_a_claim_that_cannot_be_read() -> None:
    odd = replace(attest(), claims=b'{"version": 2}')
    assert_refused(end(1, odd, policy()), end(0, attest(), policy()), "handshake.not_attested", 1)


@pytest.mark.threat("B25")
def test_each_worker_judges_by_its_own_policy() -> None:
    """The broker's own policy admits more measurements."""
    wide = policy(GOOD, OTHER)
    said = assert_refused(
        end(1, attest(OTHER), wide), end(0, attest(), policy()), "handshake.peer_not_admitted", 1
    )
    assert "policy.measurement_not_allowed" in said
    assert "SIMULATED" in said
    assert_refused(
        end(1, attest(), policy()), end(0, attest(OTHER), wide), "handshake.peer_not_admitted", 0
    )


@pytest.mark.threat("B18")
def test_a_worker_that_the_broker_took_out() -> None:
    dialer = end(1, attest(), policy())
    out = frozenset({key_digest(dialer[0].certificate)})
    assert_refused(
        dialer, end(0, attest(), policy(), keys_out=out), "handshake.certificate_revoked", 1
    )


@pytest.mark.threat("B24")
def test_a_stolen_authority_key_is_not_enough_where_evidence_is_demanded() -> None:
    """The thief signs any claim, but for a key of its own."""
    rules, honest, thief = policy(evidence=True), attest(), Ed25519PrivateKey.generate()
    stolen = replace(honest, key=thief)
    acceptor = end(0, attest(), rules)
    said = assert_refused(end(1, stolen, rules), acceptor, "handshake.not_attested", 1)
    assert "evidence.not_bound" in said
    # Without required evidence, the authority's signature is all that is checked.
    with meeting(end(1, stolen, policy()), end(0, attest(), policy())) as met:
        met.channels()


@pytest.mark.threat("B24")
def test_evidence_that_is_not_the_certificates_or_not_believed() -> None:
    rules = policy(evidence=True)
    acceptor = end(0, attest(), rules)
    swapped = replace(attest(), evidence=attest().evidence)
    said = assert_refused(end(1, swapped, rules), acceptor, "handshake.not_attested", 1)
    assert "other evidence than its certificate names" in said
    foreign = end(1, attest(simulator=FOREIGN), rules)
    assert "evidence.untrusted_chain" in assert_refused(
        foreign, acceptor, "handshake.not_attested", 1
    )
    nothing = replace(attest(), evidence=b"")
    assert_refused(end(1, nothing, rules), acceptor, "handshake.not_attested", 1)


def test_an_acceptor_whose_evidence_does_not_pass_has_no_link() -> None:
    """Otherwise the acceptor would read the dialer's refusal as a record."""
    rules = policy(evidence=True)
    swapped = replace(attest(), evidence=attest().evidence)
    said = assert_refused(
        end(1, attest(), rules), end(0, swapped, rules), "handshake.not_attested", 0
    )
    assert "other evidence than its certificate names" in said


def test_all_members_agree_on_showing_evidence() -> None:
    dialer, acceptor = end(1, attest(), policy(evidence=True)), end(0, attest(), policy())
    with meeting(dialer, acceptor) as met:
        assert named(met.dialer) == named(met.acceptor) == "handshake.settings_mismatch"


def test_claims_are_read_as_they_were_written_and_nothing_else_is() -> None:
    worker = attest()
    parsed = parse_claims(worker.claims)
    assert (parsed.nonce, parsed.label) == (NONCE, "SIMULATED")
    certificate = credentials(0, worker, policy()).certificate
    assert claims_in(certificate) == parsed
    for old, new in (
        (b'"debug":false', b'"debug":0'),
        (b'"tcb":{"simulated":1}', b'"tcb":{"simulated":"1"}'),
        (b'"tcb":{"simulated":1}', b'"tcb":[]'),
        (b'"devices":[]', b'"devices":{}'),
        (b'"devices":[]', b'"devices":[{}]'),
        (b'"kind":"simulated"', b'"kind":"simulated","more":1'),
        (b'"lists":[]', b'"lists":[["a", "b"]]'),
        (b'"version":1', b'"version":true'),
        (b'"nonce":"', b'"nonce":"x'),
        (b'"evidence":"', b'"evidence":"x'),
    ):
        assert old in worker.claims, old
        with pytest.raises(ValueError, match="cannot be read"):
            parse_claims(worker.claims.replace(old, new))
    for data in (b"", b"[]", b"null", b"\xff", b"[" * 40_000, worker.claims[:-1]):
        with pytest.raises(ValueError, match="cannot be read"):
            parse_claims(data)
    with pytest.raises(ValueError, match="more than"):
        parse_claims(b" " * (49 << 10))
