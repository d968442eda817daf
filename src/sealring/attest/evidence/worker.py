"""AttestedWorker: proof that evidence was verified. Only verify.py can make it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field, fields
from datetime import UTC, datetime
from functools import cache
from typing import Any, Final, NoReturn, get_args, get_origin, get_type_hints

from cryptography import x509

from sealring.attest.evidence.chains import ListSeen
from sealring.attest.evidence.evidence import Challenge
from sealring.core.identity.certificates import ATTESTATION_OID
from sealring.formats.strict import read_json

SEAL: Final = object()
"""Only verify.py may use this. A test checks that nothing else imports it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """What one verifier read from evidence with valid signatures. It proves nothing yet."""

    product: str
    """Milan, Genoa, Turin; TDX; SIMULATED."""
    machine: str = ""
    """A name that is the same in all evidence of one machine. Empty if the hardware has none."""
    also_known_as: tuple[str, ...] = ()
    """Other names that the machine has proved: those of a TPM's other endorsement keys."""
    measurement: str = ""
    signer: str = ""
    """The digest of the key that signed the image. Empty if none did."""
    registers: Mapping[str, str] = field(default_factory=dict)
    """What was measured after the launch, for example pcr4 or rtmr2."""
    events: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What each register was extended with, for registers whose log in the evidence replays."""
    ima_entries: int = 0
    """The length of the kernel's list of measured files, if the evidence has one that replays."""
    ima_violations: int = 0
    ima_files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The digests that each path was measured with. A certificate does not hold them."""
    ima_rules: str = ""
    """In a certificate: the digest of the rules by which its broker admitted the files."""
    tcb: Mapping[str, int] = field(default_factory=dict)
    launch_tcb: Mapping[str, int] = field(default_factory=dict)
    """The TCB under which the guest was launched, if the hardware tells it."""
    tcb_status: str = ""
    """The vendor's status of that TCB, if it has one: UpToDate, OutOfDate."""
    advisories: tuple[str, ...] = ()
    debug: bool = False
    guest: Mapping[str, int] = field(default_factory=dict)
    """Further facts of the launch that a policy may limit."""
    lists: tuple[ListSeen, ...] = ()
    unlisted: tuple[str, ...] = ()
    not_after: datetime
    """The end of the chain. No certificate for the worker may live longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttestedDevice:
    """A GPU or switch whose evidence was verified together with its machine's."""

    kind: str
    model: str
    """GH100, GB100, LS_10."""
    is_switch: bool
    identity: str
    firmware: Mapping[str, str]
    """Versions of the driver and the VBIOS."""
    reference: tuple[str, ...]
    """The vendor's signed references that its measurements were compared with."""
    unreferenced: tuple[str, ...]
    """The firmware for which there was no reference."""
    mismatches: tuple[int, ...]
    """The measurements that differ from those references."""
    protected_pcie: bool
    """The GPU's box shares NVLinks without encryption, so its switches must be shown too."""
    switches: tuple[str, ...]
    """The switches that a GPU is linked to. For a switch, its own identity."""
    gpus: tuple[str, ...]
    """The GPUs that a switch is linked to. A GPU's own report does not hold these identities."""
    lists: tuple[ListSeen, ...]
    unlisted: tuple[str, ...]
    not_after: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedWorker(Claims):
    """What a policy judges: an AttestedWorker, or a certificate's claims of one."""

    kind: str
    devices: tuple[AttestedDevice, ...]
    verified_at: datetime

    @property
    def simulated(self) -> bool:
        return self.kind == "simulated"

    @property
    def label(self) -> str:
        """The name in tables, logs and certificates. Simulated evidence is always named so."""
        return "SIMULATED" if self.simulated else f"{self.kind} {self.product}"

    def as_json(self) -> dict[str, Any]:
        """All fields, as in certificates, but only the number of measured files."""
        files = len(self.ima_files)
        return {"label": self.label, "simulated": self.simulated, **self.told(), "ima_files": files}

    def told(self) -> dict[str, Any]:
        """Each field in a form that JSON can hold."""
        return {one.name: _plain(getattr(self, one.name)) for one in fields(DescribedWorker)}


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


def shown(
    claims: Claims, kind: str, devices: tuple[AttestedDevice, ...], verified_at: datetime
) -> dict[str, Any]:
    """The fields of a DescribedWorker: the claims, valid until the first of the chains ends."""
    told = {one.name: getattr(claims, one.name) for one in fields(Claims)}
    told["not_after"] = min([claims.not_after, *(device.not_after for device in devices)])
    return {**told, "kind": kind, "devices": devices, "verified_at": verified_at}


VERSION: Final = 1
MAX_CLAIM_BYTES: Final = 48 << 10
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_MAX_TEXT: Final = 1024
_YEAR_10000: Final = 253402300800
_PLAIN: Final = (str, int, bool)
_NESTED: Final = (ListSeen, AttestedDevice)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedWorker(DescribedWorker):
    """What a certificate claims. The caller must have checked that its issuer may claim it."""

    nonce: bytes
    evidence_digest: str
    policy_digest: str
    """SHA-256 of the policy by which the issuer admitted the worker."""


def encode_claims(
    worker: AttestedWorker, evidence_digest: str, policy_digest: str, ima_rules: str = ""
) -> bytes:
    """Claims for a certificate. `ima_rules`: digest of the rules that admitted measured files."""
    told = worker.told()
    claims = {
        "version": VERSION,
        # At the front, so that every dump of the certificate shows it.
        "label": worker.label,
        "evidence": evidence_digest,
        "nonce": worker.challenge.nonce.hex(),
        "policy": policy_digest,
        "worker": told | {"ima_files": {}, "ima_rules": ima_rules},
    }
    return json.dumps(claims, separators=(",", ":")).encode()


def claims_in(certificate: x509.Certificate) -> ClaimedWorker | None:
    """The attestation that a certificate claims. None if it has none. ValueError: unreadable."""
    try:
        extension = certificate.extensions.get_extension_for_oid(ATTESTATION_OID).value
    except x509.ExtensionNotFound:
        return None
    return parse_claims(extension.public_bytes())


def parse_claims(data: bytes) -> ClaimedWorker:
    if len(data) > MAX_CLAIM_BYTES:
        raise ValueError(f"its attestation has more than {MAX_CLAIM_BYTES} bytes")
    try:
        claims = read_json(data)
        digest, policy = claims["evidence"], claims["policy"]
        nonce = bytes.fromhex(claims["nonce"])
        if type(claims["version"]) is not int or claims["version"] != VERSION:
            raise ValueError
        if _DIGEST.fullmatch(digest) is None or _DIGEST.fullmatch(policy) is None:
            raise ValueError
        described = _fields_of(claims["worker"], DescribedWorker)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise ValueError("its attestation cannot be read") from None
    return ClaimedWorker(**described, nonce=nonce, evidence_digest=digest, policy_digest=policy)


def _plain(value: Any) -> Any:
    """The value in a form that JSON can hold."""
    if isinstance(value, datetime):
        return value.timestamp()
    if isinstance(value, _NESTED):
        return {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if isinstance(value, _PLAIN):
        return value
    return {name: _plain(one) for name, one in value.items()}


def _typed(value: Any, kind: Any) -> Any:
    """The value, checked against the field's type. ValueError if it has another: no conversions."""
    if kind in _PLAIN:
        if type(value) is not kind or (kind is str and len(value) > _MAX_TEXT):
            raise ValueError
        return value
    if kind is datetime:
        if type(value) not in (int, float) or not 0 <= value < _YEAR_10000:
            raise ValueError
        return datetime.fromtimestamp(value, UTC)
    if kind in _NESTED:
        return kind(**_fields_of(value, kind))
    (*_, inner) = [one for one in get_args(kind) if one is not Ellipsis]
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise ValueError
        return tuple(_typed(one, inner) for one in value)
    return {_typed(name, str): _typed(one, inner) for name, one in value.items()}


def _fields_of(value: Any, kind: type) -> dict[str, Any]:
    types = _types_of(kind)
    if not isinstance(value, dict) or set(value) != set(types):
        raise ValueError
    return {name: _typed(value[name], types[name]) for name in types}


@cache
def _types_of(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {one.name: hints[one.name] for one in fields(kind)}
