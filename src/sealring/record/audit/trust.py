"""Whom an auditor believes. Nothing of it is taken from the run's folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from sealring.formats.log.broker_entries import log_of_broker
from sealring.formats.log.checkpoints import SignedCheckpoint
from sealring.formats.log.policy import LogPolicy


@dataclass(frozen=True, slots=True)
class AuditTrust:
    authorities: Sequence[x509.Certificate]
    """They issue workers' certificates."""
    log: LogPolicy
    """The run's log, its witnesses, and how many of them must have cosigned."""
    owners: Sequence[Ed25519PublicKey] = ()
    """They sign what is made outside of a job."""
    job: str | None = None
    """The job that the run must be of; None: the one that `run.json` names, which is not signed. An
    authority may serve several jobs."""
    seen: Sequence[SignedCheckpoint] = ()
    """Checkpoints of the run's log, or of a broker's, that were seen earlier or elsewhere."""
    brokers: LogPolicy | None = None
    """The logs of the authorities' brokers, where `Question.broker_logs` names some."""
    vendors: object = None
    """Vendors' lists, collateral and references, for evidence: what read_cache gives."""

    @property
    def broker_origins(self) -> frozenset[str]:
        """The names that the logs of these authorities' brokers have."""
        return frozenset(map(log_of_broker, self.authorities))
