"""Evidence in guest-components' JSON form, made under roots of the tests or quoted by swtpm."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cryptography.hazmat.primitives.serialization import Encoding

from sealring.attest.evidence import Trust
from sealring.attest.evidence.tpm.commands import Tpm
from tests.attest.broker.kbs_client import Prove
from tests.attest.evidence.test_coco import fields_of
from tests.attest.minting import tpm
from tests.attest.minting.amd import MEASUREMENT, Amd
from tests.attest.minting.intel import MRENCLAVE, MRTD, Intel, sgx_body, tdx_body
from tests.attest.minting.nvidia import Nvidia
from tests.attest.minting.tpm import AzureGuest

AMD, INTEL, GPU = Amd(), Intel(), Nvidia()
AZURE, AZURE_TDX = AzureGuest(AMD), AzureGuest(INTEL)
PCR4 = tpm.pcr_values(tpm.BOOT)[4].hex()
EVERY_PCR = tpm.pcr_values(tpm.BOOT)


def padded(digest: bytes) -> bytes:
    return digest.ljust(64, b"\0")


def snp(digest: bytes, *, amd: Amd = AMD, chain: int = 3, **changes: Any) -> dict[str, Any]:
    report = amd.report(report_data=padded(digest), version=3, **changes)
    names = ("VCEK", "ASK", "ARK")
    entries = [
        {"cert_type": name, "data": list(one)}
        for name, one in zip(names, amd.chain[:chain], strict=False)
    ]
    return {"attestation_report": fields_of(report), "cert_chain": entries or None}


def tdx(digest: bytes) -> dict[str, Any]:
    quote = INTEL.quote(tdx_body(padded(digest)))
    return {"quote": base64.b64encode(quote).decode(), "cc_eventlog": None}


def sgx(digest: bytes) -> dict[str, Any]:
    quote = INTEL.quote(sgx_body(padded(digest)))
    return {"quote": base64.b64encode(quote).decode()}


Quoted = Callable[[bytes], tuple[bytes, bytes, bytes]]
"""A quote over all PCRs, its TPMT_SIGNATURE, and the PCRs' values."""


def azure(guest: AzureGuest, quoted: Quoted) -> Prove:
    def prove(digest: bytes) -> dict[str, Any]:
        message, signature, values = quoted(digest)
        pcrs = [values[at : at + 32].hex() for at in range(0, len(values), 32)]
        form = {
            "version": 2,
            "tpm_quote": {
                "signature": signature[6:].hex(),
                "message": message.hex(),
                "pcrs": pcrs,
            },
            "hcl_report": url_text(guest.hcl_report()),
        }
        if guest.td_quote:
            return form | {"td_quote": url_text(guest.td_quote)}
        return form | {"vcek": url_text(AMD.chain[0])}

    return prove


def minted(guest: AzureGuest) -> Quoted:
    def quoted(digest: bytes) -> tuple[bytes, bytes, bytes]:
        message = tpm.quote(EVERY_PCR, digest)
        values = b"".join(EVERY_PCR[pcr] for pcr in range(24))
        return message, tpm.sign(guest.key, message), values

    return quoted


def by_tpm(real: Tpm, key: int) -> Quoted:
    every = tuple(range(24))
    return lambda digest: (*real.quote(key, digest, every), real.read_pcrs(every))


def gpus(device_digest: bytes) -> str:
    evidence = GPU.evidence(device_digest[:32])
    holders = (GPU.device, GPU.boot, GPU.provisioner, GPU.identity, GPU.root)
    pem = b"".join(one.certificate.public_bytes(Encoding.PEM) for one in holders)
    one = {
        "arch": "HOPPER",
        "uuid": "unknown",
        "evidence": base64.b64encode(evidence.parts["report"]).decode(),
        "certificate": base64.b64encode(pem).decode(),
    }
    return json.dumps({"nvidia": {"device_evidence_list": [one]}})


def url_text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode()


ISSUERS = AMD.chain[1:]
"""The certificates that Azure's clients do not send."""
SNP = (
    f'[snp]\nmeasurements = ["{MEASUREMENT.hex()}"]\nunchecked = ["minimum_tcb", "platform_info"]\n'
)
AZ_SNP = (
    f'[az-snp-vtpm]\nmeasurements = ["{MEASUREMENT.hex()}"]\npcrs = {{4 = ["{PCR4}"]}}\n'
    'unchecked = ["minimum_tcb", "platform_info", "pcr7", "ima"]\n'
)
CASES: dict[str, tuple[str, Prove, Trust, str]] = {
    "snp": ("snp", snp, AMD.trust(), SNP),
    "snp without issuers": (
        "snp", lambda digest: snp(digest, chain=1), replace(AMD.trust(), issuers=ISSUERS), SNP,
    ),
    "tdx": (
        "tdx", tdx, INTEL.trust(),
        f'[tdx]\nmeasurements = ["{MRTD.hex()}"]\nunchecked = ["rtmr0", "rtmr1", "rtmr2"]\n',
    ),
    "sgx": (
        "sgx", sgx, INTEL.trust(INTEL.collateral("sgx")),
        f'[sgx]\nmeasurements = ["{MRENCLAVE.hex()}"]\n',
    ),
    "azure": (
        "az-snp-vtpm", azure(AZURE, minted(AZURE)), replace(AMD.trust(), issuers=ISSUERS), AZ_SNP,
    ),
    "azure, older spelling": (
        "azsnpvtpm", azure(AZURE, minted(AZURE)), replace(AMD.trust(), issuers=ISSUERS), AZ_SNP,
    ),
    "azure tdx": (
        "az-tdx-vtpm", azure(AZURE_TDX, minted(AZURE_TDX)), INTEL.trust(),
        f'[az-tdx-vtpm]\nmeasurements = ["{MRTD.hex()}"]\npcrs = {{4 = ["{PCR4}"]}}\n'
        'unchecked = ["pcr7", "ima"]\n',
    ),
}  # fmt: skip
