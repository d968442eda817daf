"""The one place where a kind of evidence, a kind of device and an attester are registered.

A kind of evidence has a verifier, a table of its own in the policy, and a description. An attester
is a value of SEALRING_ATTESTER: what makes evidence, and of which kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sealring.attest.evidence import attesters, az_vtpm, intel, policy_tables, simulated, snp
from sealring.attest.evidence import nvidia as nvidia
from sealring.attest.evidence.attesters import Attester, Wanted
from sealring.attest.evidence.evidence import Challenge, DeviceEvidence, Evidence
from sealring.attest.evidence.intel_collateral import SGX, TDX
from sealring.attest.evidence.policy import KindRules, Policy
from sealring.attest.evidence.policy_tables import Reader
from sealring.attest.evidence.tpm import verify as tpm
from sealring.attest.evidence.trust import Trust
from sealring.attest.evidence.worker import AttestedDevice, Claims
from sealring.errors import ConfigurationError

Verifier = Callable[[Evidence, Challenge | None, Trust], Claims]
DeviceVerifier = Callable[[DeviceEvidence, bytes | None, Trust], AttestedDevice]
OpenAttester = Callable[[Mapping[str, str], Wanted], Attester]
"""From the environment, and what the evidence is to show."""


@dataclass(frozen=True, slots=True)
class Kind:
    description: str
    verify: Verifier
    rules: Callable[[Reader, str], KindRules]
    """Reads the policy's table for this kind."""
    hole: bool = False
    """Such a worker's memory is open to somebody whom the policy does not name."""


KINDS: Final[Mapping[str, Kind]] = {
    snp.KIND: Kind("an AMD SEV-SNP guest", snp.verify_snp, policy_tables.snp_rules),
    az_vtpm.SNP_KIND: Kind(
        "an Azure guest whose virtual TPM an SEV-SNP report vouches for",
        az_vtpm.verify_az_snp_vtpm,
        policy_tables.az_snp_vtpm_rules,
    ),
    az_vtpm.TDX_KIND: Kind(
        "an Azure guest whose virtual TPM a TDX quote vouches for",
        az_vtpm.verify_az_tdx_vtpm,
        policy_tables.az_tdx_vtpm_rules,
    ),
    TDX: Kind("an Intel TDX guest", intel.verify_intel, policy_tables.tdx_rules),
    SGX: Kind("an Intel SGX enclave", intel.verify_intel, policy_tables.sgx_rules),
    tpm.KIND: Kind(
        "a machine with a TPM 2.0, whose owner can read its memory",
        tpm.verify_tpm,
        policy_tables.tpm_rules,
        hole=True,
    ),
    simulated.KIND: Kind(
        "SIMULATED evidence, which proves nothing",
        simulated.verify_simulated,
        policy_tables.simulated_rules,
        hole=True,
    ),
}
DEVICE_KINDS: Final[Mapping[str, DeviceVerifier]] = {nvidia.KIND: nvidia.verify_nvidia}

ATTESTERS: Final[Mapping[str, OpenAttester]] = {
    "tsm": attesters.tsm_attester,
    "azure": attesters.azure_attester,
    "tpm": attesters.tpm_attester,
    "tpm-ak": attesters.certified_tpm_attester,
    "coco": attesters.coco_attester,
}
DEFAULT_ATTESTER: Final = "tsm"


def find_attester(environ: Mapping[str, str], policy: Policy, *, ima: bool = False) -> Attester:
    """What this worker attests itself with, as SEALRING_ATTESTER names it.

    It shows the kernel's list of measured files if the policy asks for it, or `ima`.
    """
    source = environ.get("SEALRING_ATTESTER") or DEFAULT_ATTESTER
    if source in ATTESTERS:
        ima = ima or any(rules.ima is not None for rules in policy.kinds.values())
        return ATTESTERS[source](environ, Wanted(gpus=policy.devices is not None, ima=ima))
    name, _, directory = source.partition(":")
    if name == simulated.KIND and directory:
        return attesters.open_simulator(Path(directory))
    raise ConfigurationError(
        f"SEALRING_ATTESTER is {source!r}; set it to {', '.join(ATTESTERS)} or {simulated.KIND}:DIR"
    )
