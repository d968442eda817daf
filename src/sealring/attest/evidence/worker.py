"""AttestedWorker: the value that says evidence was verified, and that only verify.py can make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field, fields
from datetime import datetime
from typing import Any, Final, NoReturn

from sealring.attest.evidence.evidence import Challenge
from sealring.attest.evidence.revocation import ListSeen

SEAL: Final = object()
"""For verify.py. Nothing else imports it; a test looks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """What one verifier read out of evidence whose signatures hold. Not yet proof of anything."""

    product: str
    """Milan, Genoa, Turin; TDX; SIMULATED."""
    machine: str = ""
    """The same for all evidence of one machine; empty where the hardware does not tell."""
    also_known_as: tuple[str, ...] = ()
    """Its other names that it has proved: those of a TPM's other endorsement keys."""
    measurement: str = ""
    signer: str = ""
    """Digest of the key that signed the image; empty if none did."""
    registers: Mapping[str, str] = field(default_factory=dict)
    """What was measured later: pcr4, rtmr2."""
    events: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What a register was extended with, where a log that replays to it came along."""
    ima_entries: int = 0
    """Of the kernel's list of measured files, where one that replays came along."""
    ima_violations: int = 0
    ima_files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The digests that each path was measured with. A certificate does not hold them."""
    ima_rules: str = ""
    """In a certificate: the digest of the rules by which its broker admitted the files."""
    tcb: Mapping[str, int] = field(default_factory=dict)
    launch_tcb: Mapping[str, int] = field(default_factory=dict)
    """The TCB under which the guest was launched, where the hardware tells it."""
    tcb_status: str = ""
    """The vendor's word on that TCB, where it has one: UpToDate, OutOfDate."""
    advisories: tuple[str, ...] = ()
    debug: bool = False
    guest: Mapping[str, int] = field(default_factory=dict)
    """Further facts of the launch that a policy may limit."""
    lists: tuple[ListSeen, ...] = ()
    unlisted: tuple[str, ...] = ()
    not_after: datetime
    """The chain's end: no certificate for the worker may outlive it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttestedDevice:
    """A GPU or switch whose evidence was verified together with its machine's."""

    kind: str
    model: str
    """GH100, GB100, LS_10."""
    is_switch: bool
    identity: str
    firmware: Mapping[str, str]
    """Versions: driver, vbios."""
    reference: tuple[str, ...]
    """The vendor's signed references that its measurements were held against."""
    unreferenced: tuple[str, ...]
    """The firmware for which there was no reference."""
    mismatches: tuple[int, ...]
    """The measurements that are not what those say."""
    protected_pcie: bool
    """A GPU of a box whose NVLinks are shared and in the clear: its switches must be shown too."""
    switches: tuple[str, ...]
    """The switches that a GPU is linked to; a switch's own identity."""
    gpus: tuple[str, ...]
    """The GPUs that a switch is linked to, by identities that the GPUs' own reports do not hold."""
    lists: tuple[ListSeen, ...]
    unlisted: tuple[str, ...]
    not_after: datetime

    def as_json(self, now: datetime) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "model": self.model,
            "switch": self.is_switch,
            "identity": self.identity,
            "firmware": dict(self.firmware),
            "references": list(self.reference),
            "without_reference": list(self.unreferenced),
            "mismatches": list(self.mismatches),
            "protected_pcie": self.protected_pcie,
            "not_after": self.not_after.isoformat(),
            **lists_as_json(self.lists, self.unlisted, now),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedWorker(Claims):
    """What a policy judges: an AttestedWorker, or a certificate's word on one (claims.py)."""

    kind: str
    devices: tuple[AttestedDevice, ...]
    verified_at: datetime

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
            "also_known_as": list(self.also_known_as),
            "measurement": self.measurement,
            "signer": self.signer,
            "registers": dict(self.registers),
            "ima": {
                "entries": self.ima_entries,
                "violations": self.ima_violations,
                "files": len(self.ima_files),
            },
            "tcb": dict(self.tcb),
            "launch_tcb": dict(self.launch_tcb),
            "tcb_status": self.tcb_status,
            "advisories": list(self.advisories),
            "debug": self.debug,
            "guest": dict(self.guest),
            "devices": [device.as_json(self.verified_at) for device in self.devices],
            "verified_at": self.verified_at.isoformat(),
            "not_after": self.not_after.isoformat(),
            **lists_as_json(self.lists, self.unlisted, self.verified_at),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class AttestedWorker(DescribedWorker):
    """What hardware signed about a worker, for one nonce and one public key."""

    challenge: Challenge
    seal: InitVar[object]

    def __post_init__(self, seal: object) -> None:
        if seal is not SEAL:
            raise TypeError("an AttestedWorker comes from verify_evidence only")

    def __reduce__(self) -> NoReturn:
        raise TypeError("an AttestedWorker cannot be copied or unpickled: verify the evidence")


def attested(
    claims: Claims,
    *,
    kind: str,
    challenge: Challenge,
    devices: tuple[AttestedDevice, ...],
    verified_at: datetime,
    seal: object,
) -> AttestedWorker:
    """The claims with what they were verified for, until the first of the chains ends."""
    return AttestedWorker(
        **_shown(claims, devices),
        kind=kind,
        challenge=challenge,
        devices=devices,
        verified_at=verified_at,
        seal=seal,
    )


def described(
    claims: Claims, *, kind: str, devices: tuple[AttestedDevice, ...], verified_at: datetime
) -> DescribedWorker:
    shown = _shown(claims, devices)
    return DescribedWorker(**shown, kind=kind, devices=devices, verified_at=verified_at)


def _shown(claims: Claims, devices: tuple[AttestedDevice, ...]) -> dict[str, Any]:
    shown = {one.name: getattr(claims, one.name) for one in fields(Claims)}
    shown["not_after"] = min([claims.not_after, *(device.not_after for device in devices)])
    return shown


def lists_as_json(
    lists: tuple[ListSeen, ...], unlisted: tuple[str, ...], now: datetime
) -> dict[str, Any]:
    return {
        "revocation_lists": [
            {"issuer": one.issuer, "age_days": (now - one.made).days} for one in lists
        ],
        "without_revocation_list": list(unlisted),
    }
