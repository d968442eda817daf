"""Workers of a made run whose certificates carry SIMULATED evidence, as a broker issues them."""

from __future__ import annotations

import hashlib
from datetime import datetime, timedelta

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from sealring.attest.evidence.evidence import Challenge, Evidence
from sealring.attest.evidence.policy import Policy, parse_policy
from sealring.attest.evidence.simulated import Simulator
from sealring.attest.evidence.trust import Trust
from sealring.attest.evidence.verify import verify_evidence
from sealring.attest.evidence.worker import encode_claims
from sealring.core.identity.credentials import Credentials
from tests.record.audit.made_runs import NOW, MadeRun, sha

MEASUREMENT = bytes(range(32))
SIMULATOR = Simulator.create(NOW - timedelta(days=1))


def policy(measurement: bytes = MEASUREMENT, peers: bool = True) -> Policy:
    return parse_policy(
        f"version = 1\n[peers]\nevidence = {str(peers).lower()}\n[simulated]\n"
        f'roots = ["{SIMULATOR.fingerprint}"]\nmeasurements = ["{measurement.hex()}"]\n'
    )


def attested(
    made: MadeRun, rank: int, measurement: bytes = MEASUREMENT, other: Evidence | None = None,
    when: datetime = NOW,
) -> tuple[Credentials, Evidence]:  # fmt: skip
    """Return a worker's credentials and its evidence. `other` is evidence that the worker's
    certificate names in place of its own.

    The certificate says that the evidence was verified at `when`.
    """
    key = Ed25519PrivateKey.generate()
    public = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    challenge = Challenge(hashlib.sha256(b"%d" % rank).digest(), public)
    evidence = SIMULATOR.attest(challenge, measurement)
    trust = Trust(when, simulated=frozenset({SIMULATOR.fingerprint}))
    worker = verify_evidence(evidence, challenge, trust)
    shown = other or evidence
    digest = hashlib.sha256(shown.encode()).hexdigest()
    claims = encode_claims(worker, digest, sha("policy"))
    return made.authority.worker(rank, made.world, attestation=claims, key=key), shown


def attested_run(world: int, count: int) -> MadeRun:
    made = MadeRun(world, count)
    for rank in range(made.world):
        made.workers[rank], evidence = attested(made, rank)
        made.evidence.append(evidence.encode())
    return made


def with_other_measurement(made: MadeRun, rank: int) -> None:
    made.workers[rank], evidence = attested(made, rank, bytes(32))
    made.evidence[rank] = evidence.encode()


def with_evidence_of_another_day(made: MadeRun, rank: int, hours: int = -12) -> None:
    """Evidence that passes at that time: nothing was revoked yet, and its chain had not expired.

    The authority's key is all that this takes.
    """
    made.workers[rank], evidence = attested(made, rank, when=NOW + timedelta(hours=hours))
    made.evidence[rank] = evidence.encode()


def with_evidence_of_another(made: MadeRun, rank: int) -> None:
    """The broker's operator issues a certificate naming evidence that was made for another key."""
    _, other = attested(made, rank)
    made.workers[rank], _ = attested(made, rank, other=other)
    made.evidence[rank] = other.encode()
