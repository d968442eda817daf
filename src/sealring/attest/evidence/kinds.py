"""The one place where a kind of evidence and a kind of device are registered.

Each has a verifier, and a table of its own in the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from sealring.attest.evidence import az_vtpm, intel, nvidia, simulated, snp
from sealring.attest.evidence.evidence import Challenge, DeviceEvidence, Evidence
from sealring.attest.evidence.intel_collateral import SGX, TDX
from sealring.attest.evidence.rules import Form
from sealring.attest.evidence.tpm import verify as tpm
from sealring.attest.evidence.trust import Trust
from sealring.attest.evidence.worker import AttestedDevice, Claims

Verifier = Callable[[Evidence, Challenge | None, Trust], Claims]
DeviceVerifier = Callable[[DeviceEvidence, bytes | None, Trust], AttestedDevice]


@dataclass(frozen=True, slots=True)
class Kind:
    description: str
    verify: Verifier
    form: Form
    """Of the policy's table for this kind."""
    hole: bool = False
    """Such a worker's memory is open to somebody whom the policy does not name."""


@dataclass(frozen=True, slots=True)
class DeviceKind:
    verify: DeviceVerifier
    form: Form


KINDS: Final[Mapping[str, Kind]] = {
    snp.KIND: Kind("an AMD SEV-SNP guest", snp.verify_snp, snp.snp_form()),
    az_vtpm.SNP_KIND: Kind(
        "an Azure guest whose virtual TPM an SEV-SNP report vouches for",
        az_vtpm.verify_az_snp_vtpm,
        az_vtpm.SNP_FORM,
    ),
    az_vtpm.TDX_KIND: Kind(
        "an Azure guest whose virtual TPM a TDX quote vouches for",
        az_vtpm.verify_az_tdx_vtpm,
        az_vtpm.TDX_FORM,
    ),
    TDX: Kind("an Intel TDX guest", intel.verify_intel, intel.TDX_FORM),
    SGX: Kind("an Intel SGX enclave", intel.verify_intel, intel.SGX_FORM),
    tpm.KIND: Kind(
        "a machine with a TPM 2.0, whose owner can read its memory",
        tpm.verify_tpm,
        tpm.TPM_FORM,
        hole=True,
    ),
    simulated.KIND: Kind(
        "SIMULATED evidence, which proves nothing",
        simulated.verify_simulated,
        simulated.SIMULATED_FORM,
        hole=True,
    ),
}
DEVICE_KINDS: Final[Mapping[str, DeviceKind]] = {
    nvidia.KIND: DeviceKind(nvidia.verify_nvidia, nvidia.NVIDIA_FORM)
}
