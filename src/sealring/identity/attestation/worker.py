"""AttestedWorker: the value that says evidence was verified, and that only a verifier can make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from datetime import datetime
from typing import Any, Final, NoReturn, Protocol

from sealring.identity.attestation.chains import ListSeen
from sealring.identity.attestation.evidence import Challenge

SEAL: Final = object()
"""For the verifiers of this package. Nothing else imports it; a test looks."""


class Described(Protocol):
    """What a policy judges: an AttestedWorker, or a certificate's word on one (claims.py)."""

    @property
    def kind(self) -> str: ...
    @property
    def product(self) -> str: ...
    @property
    def measurement(self) -> str: ...
    @property
    def signer(self) -> str: ...
    @property
    def tcb(self) -> Mapping[str, int]: ...
    @property
    def debug(self) -> bool: ...
    @property
    def guest(self) -> Mapping[str, int]: ...
    @property
    def lists(self) -> tuple[ListSeen, ...]: ...
    @property
    def verified_at(self) -> datetime: ...
    @property
    def simulated(self) -> bool: ...
    @property
    def label(self) -> str: ...


@dataclass(frozen=True, slots=True)
class AttestedWorker:
    """What hardware signed about a worker, for one nonce and one public key."""

    kind: str
    product: str
    """Milan, Genoa, Turin; SIMULATED."""
    challenge: Challenge
    machine: str
    """The same for all evidence of one machine; empty where the hardware does not tell."""
    measurement: str
    signer: str
    """Digest of the key that signed the image; empty if none did."""
    tcb: Mapping[str, int]
    debug: bool
    guest: Mapping[str, int]
    """Further facts of the launch that a policy may limit."""
    lists: tuple[ListSeen, ...]
    unlisted: tuple[str, ...]
    verified_at: datetime
    not_after: datetime
    """The chain's end: no certificate for the worker may outlive it."""
    seal: InitVar[object]

    def __post_init__(self, seal: object) -> None:
        if seal is not SEAL:
            raise TypeError("an AttestedWorker comes from verify_evidence only")

    def __reduce__(self) -> NoReturn:
        raise TypeError("an AttestedWorker cannot be copied or unpickled: verify the evidence")

    @property
    def simulated(self) -> bool:
        return self.kind == "simulated"

    @property
    def label(self) -> str:
        """For tables, logs and certificates. The word is there wherever it was simulated."""
        return "SIMULATED" if self.simulated else f"{self.kind} {self.product}"

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": self.label if self.simulated else self.kind,
            "product": self.product,
            "simulated": self.simulated,
            "machine": self.machine,
            "measurement": self.measurement,
            "signer": self.signer,
            "tcb": dict(self.tcb),
            "debug": self.debug,
            "guest": dict(self.guest),
            "verified_at": self.verified_at.isoformat(),
            "not_after": self.not_after.isoformat(),
            "revocation_lists": [
                {"issuer": one.issuer, "age_days": (self.verified_at - one.made).days}
                for one in self.lists
            ],
            "without_revocation_list": list(self.unlisted),
        }
