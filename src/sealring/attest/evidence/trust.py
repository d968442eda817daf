"""Trust: what the verifiers of evidence rely on, besides the evidence itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from cryptography import x509

from sealring.attest.evidence.chains import (
    AMD_ROOTS,
    INTEL_ROOTS,
    NVIDIA_ROOTS,
    ChainContext,
    ListSeen,
    usual_pem,
)
from sealring.attest.evidence.nvidia_reference import Reference
from sealring.core.identity.loading import revocation_list_from
from sealring.errors import ConfigurationError, MalformedEvidence
from sealring.formats.strict import read_json

TDX, SGX = "tdx", "sgx"
_CHAINS: Final = ("pck_crl_issuer_chain", "tcb_info_issuer_chain", "qe_identity_issuer_chain")


@dataclass(frozen=True, slots=True)
class Collateral:
    """What Intel says about one family of platforms, as fetched."""

    text: str
    """The file without the certificates of the machine that fetched it: quotes bring their own."""
    tee: str
    fmspc: str
    lists: tuple[x509.CertificateRevocationList, ...]
    statements: tuple[ListSeen, ...]
    evaluation: int
    """The number of Intel's evaluation of TCB levels. An older file has a lower number."""
    until: datetime


def parse_collateral(text: str) -> Collateral:
    """Reads a collateral file, which is this verifier's own and not a worker's."""
    try:
        fields = read_json(text)
        # dcap-qvl would use these certificates instead of the quote's own, which we check.
        fields.pop("pck_certificate_chain", None)
        # Line ends differ by who fetched the file, so the text is written again for dcap-qvl.
        for name in _CHAINS:
            fields[name] = usual_pem(fields[name].encode()).decode()
        tcb, qe = read_json(fields["tcb_info"]), read_json(fields["qe_identity"])
        lists = tuple(
            revocation_list_from(bytes.fromhex(fields[name]), ValueError(name))
            for name in ("root_ca_crl", "pck_crl")
        )
        return Collateral(
            text=json.dumps(fields),
            tee=TDX if tcb.get("id") == "TDX" else SGX,
            fmspc=tcb["fmspc"].upper(),
            lists=lists,
            statements=(
                ListSeen("Intel TCB information", _date(tcb["issueDate"])),
                ListSeen("Intel QE identity", _date(qe["issueDate"])),
            ),
            evaluation=int(tcb["tcbEvaluationDataNumber"]),
            until=min(_date(tcb["nextUpdate"]), _date(qe["nextUpdate"])),
        )
    except (MalformedEvidence, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise ConfigurationError(
            "the file is not Intel collateral as dcap-qvl writes it: fetch it again"
        ) from None


def _date(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)


@dataclass(frozen=True, slots=True)
class Trust(ChainContext):
    """Everything that a verifier of evidence may rely on: roots, lists, references, the time."""

    amd: Mapping[str, str] = field(default_factory=lambda: AMD_ROOTS)
    """The product line of each root, by the root's fingerprint."""
    intel: frozenset[str] = INTEL_ROOTS
    nvidia: frozenset[str] = NVIDIA_ROOTS
    tpm: frozenset[str] = frozenset()
    """Fingerprints of TPM makers' roots. Empty unless a policy names some."""
    simulated: frozenset[str] = frozenset()
    """Fingerprints of SIMULATED roots. Empty unless a policy names some."""
    collateral: tuple[Collateral, ...] = ()
    """Intel's statements about its platforms, as fetched."""
    references: tuple[Reference, ...] = ()
    """NVIDIA's reference measurements. Their signatures are verified."""
    issuers: tuple[bytes, ...] = ()
    """Certificates (DER) that complete chains, for guests that do not send them. They are not
    trusted by themselves: a chain must still end at a pinned root."""
