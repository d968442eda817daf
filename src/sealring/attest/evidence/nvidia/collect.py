"""Evidence of this machine's GPUs, asked of NVIDIA's management library (NVML).

Only GPUs in confidential-computing mode give it. Not yet run on one: tests play the library's part.
NVSwitches speak through another library (NSCQ), which is not spoken to here.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

from cryptography.hazmat.primitives.serialization import Encoding

from sealring.attest.evidence.evidence import DeviceEvidence
from sealring.attest.evidence.nvidia.device import KIND
from sealring.attest.evidence.nvidia.spdm import canonical_report
from sealring.core.identity.loading import certificates_from_pem
from sealring.errors import AttestationUnavailable

LIBRARY: Final = "libnvidia-ml.so.1"
NONCE_BYTES: Final = 32


class GpuCertificate(ctypes.Structure):
    _fields_ = (
        ("chain_size", ctypes.c_uint),
        ("attestation_chain_size", ctypes.c_uint),
        ("chain", ctypes.c_ubyte * 0x1000),
        ("attestation_chain", ctypes.c_ubyte * 0x1400),
    )


class GpuReport(ctypes.Structure):
    _fields_ = (
        ("has_second_report", ctypes.c_uint),
        ("size", ctypes.c_uint),
        ("second_size", ctypes.c_uint),
        ("nonce", ctypes.c_ubyte * NONCE_BYTES),
        ("report", ctypes.c_ubyte * 0x2000),
        ("second_report", ctypes.c_ubyte * 0x1000),
    )


def collect_gpus(nonce: bytes, library: Any = None) -> tuple[DeviceEvidence, ...]:
    """Of every GPU that NVML shows. `nonce` is `Challenge.device_nonce` of the machine's kind."""
    nvml = library or _load()
    _check("nvmlInit_v2", nvml.nvmlInit_v2())
    try:
        count = ctypes.c_uint()
        _check("nvmlDeviceGetCount_v2", nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)))
        return tuple(_one(nvml, index, nonce) for index in range(count.value))
    finally:
        nvml.nvmlShutdown()


def _one(nvml: Any, index: int, nonce: bytes) -> DeviceEvidence:
    device = ctypes.c_void_p()
    found = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device))
    _check("nvmlDeviceGetHandleByIndex_v2", found)
    certificate, report = GpuCertificate(), GpuReport()
    name = "nvmlDeviceGetConfComputeGpuCertificate"
    _check(name, getattr(nvml, name)(device, ctypes.byref(certificate)))
    ctypes.memmove(report.nonce, nonce, NONCE_BYTES)
    name = "nvmlDeviceGetConfComputeGpuAttestationReport"
    _check(name, getattr(nvml, name)(device, ctypes.byref(report)))
    pem = bytes(certificate.attestation_chain)[: certificate.attestation_chain_size]
    chain = certificates_from_pem(pem, AttestationUnavailable(f"GPU {index} gives no certificates"))
    return DeviceEvidence(
        KIND,
        {"report": canonical_report(bytes(report.report)[: report.size])},
        tuple(one.public_bytes(Encoding.DER) for one in chain),
    )


def _load() -> Any:
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError:
        raise AttestationUnavailable(
            f"{LIBRARY} is not here: install NVIDIA's driver, or show no GPUs"
        ) from None


def _check(name: str, outcome: int) -> None:
    if outcome:
        raise AttestationUnavailable(
            f"{name} answers with error {outcome}: is the GPU in confidential-computing mode?"
        )
