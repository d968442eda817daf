"""Evidence as a worker makes it. The kernel and NVML are stand-ins, the TPM is a software one."""

from __future__ import annotations

import base64
import ctypes
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from sealring.attest.evidence import parse_evidence, verify_evidence
from sealring.attest.evidence.chains import load_certificate
from sealring.attest.evidence.guest import (
    AK,
    HCL_REPORT,
    AzureMachine,
    TsmMachine,
    ask,
    certificates_of,
)
from sealring.attest.evidence.nvidia import GpuCertificate, GpuReport, collect_gpus, verify_nvidia
from sealring.attest.evidence.tpm.commands import OWNER, PASSWORD, Tpm
from sealring.errors import AttestationUnavailable, TpmFailed
from tests.attest.evidence.answering import answering
from tests.attest.evidence.swtpm import needs_swtpm, running, store
from tests.attest.minting import CHALLENGE, pem
from tests.attest.minting.amd import Amd
from tests.attest.minting.intel import Intel, tdx_body
from tests.attest.minting.nvidia import Nvidia
from tests.attest.minting.tpm import AzureGuest, Measured, event_log

AMD, INTEL, GPU = Amd(), Intel(), Nvidia()


VCEK_NAME, VLEK_NAME = "63da758de6644564adc5f4b93be8accd", "a8074bc2a25a483eaae639c045a0b8a1"


def table(chain: tuple[bytes, ...], leaf: str = VCEK_NAME) -> bytes:
    """A table of certificates as the host's firmware gives it."""
    names = [
        leaf,
        "4ab7b379bbac4fe4a02f05aef327c782",
        "c0b406a4a803495297433fb6014cd0ae",
    ]
    head, body, at = b"", b"", 24 * (len(chain) + 1)
    for name, certificate in zip(names, chain, strict=False):
        head += bytes.fromhex(name) + at.to_bytes(4, "little")
        head += len(certificate).to_bytes(4, "little")
        body, at = body + certificate, at + len(certificate)
    return head + bytes(24) + body


class Kernel:
    """Fills a new folder as configfs does, and answers the last write to it."""

    def __init__(self, provider: str, answer: Callable[[bytes], bytes], aux: bytes = b"") -> None:
        self.provider, self.answer, self.aux, self.asked = provider, answer, aux, b""

    def install(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        made, write, read = Path.mkdir, Path.write_bytes, Path.read_bytes

        def mkdir(path: Path, *rest: Any, **more: Any) -> None:
            made(path, *rest, **more)
            if path.parent == folder:
                (path / "provider").write_text(self.provider + "\n")
                (path / "generation").write_text("0\n")
                if self.aux:
                    write(path / "auxblob", self.aux)

        def write_bytes(path: Path, data: bytes) -> int:
            if path.name == "inblob":
                self.asked = data
            return write(path, data)

        def read_bytes(path: Path) -> bytes:
            return self.answer(self.asked) if path.name == "outblob" else read(path)

        def rmdir(path: Path) -> None:
            for one in path.iterdir():
                one.unlink()
            path.rename(path.with_name("gone"))

        for name, part in (
            ("mkdir", mkdir),
            ("write_bytes", write_bytes),
            ("read_bytes", read_bytes),
            ("rmdir", rmdir),
        ):
            monkeypatch.setattr(Path, name, part)
        return folder


def test_an_snp_guest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel("sev_guest", lambda data: AMD.report(report_data=data), table(AMD.chain))
    machine = TsmMachine(reports=kernel.install(tmp_path, monkeypatch))
    assert machine.kind == "snp"
    devices = (GPU.evidence(CHALLENGE.device_nonce("snp")),)
    evidence = machine.attest(CHALLENGE.nonce, CHALLENGE.public_key, devices)
    assert kernel.asked == CHALLENGE.report_data("snp", devices)
    trust = AMD.trust()
    plain = machine.attest(CHALLENGE.nonce, CHALLENGE.public_key)
    assert verify_evidence(parse_evidence(plain.encode()), CHALLENGE, trust).product == "Milan"
    assert evidence.devices == devices


def test_a_host_that_hands_out_no_certificates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel("sev_guest", lambda data: AMD.report(report_data=data))
    reports = kernel.install(tmp_path, monkeypatch)
    with pytest.raises(AttestationUnavailable, match="no certificate of SEV-VCEK"):
        TsmMachine(reports=reports).attest(CHALLENGE.nonce, CHALLENGE.public_key)
    given = TsmMachine(AMD.chain, reports).attest(CHALLENGE.nonce, CHALLENGE.public_key)
    assert given.chain == AMD.chain
    assert certificates_of(table(AMD.chain)) == AMD.chain
    assert certificates_of(table(AMD.chain[:1])) == AMD.chain[:1]
    with pytest.raises(AttestationUnavailable, match="CN=ARK-Milan is missing"):
        TsmMachine(AMD.chain[:2], reports).attest(CHALLENGE.nonce, CHALLENGE.public_key)


PEM = tuple(load_certificate(one).public_bytes(Encoding.PEM) for one in AMD.chain)


@pytest.mark.parametrize(
    "handed",
    [
        PEM,
        tuple(one.replace(b"\n", b"\r\n") for one in PEM),
        (PEM[0], PEM[1] + PEM[2]),
        (PEM[0], *AMD.chain[1:]),
    ],
)
def test_a_host_that_hands_out_certificates_as_pem(
    handed: tuple[bytes, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel("sev_guest", lambda data: AMD.report(report_data=data), table(handed))
    machine = TsmMachine(reports=kernel.install(tmp_path, monkeypatch))
    evidence = machine.attest(CHALLENGE.nonce, CHALLENGE.public_key)
    assert evidence.chain == AMD.chain
    assert verify_evidence(evidence, CHALLENGE, AMD.trust()).product == "Milan"


def test_a_host_that_hands_out_only_its_providers_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vlek = Amd(vlek=True)
    handed = table(vlek.chain[:1], VLEK_NAME)
    kernel = Kernel("sev_guest", lambda data: vlek.report(report_data=data), handed)
    reports = kernel.install(tmp_path, monkeypatch)
    with pytest.raises(AttestationUnavailable, match="CN=SEV-VLEK-Milan is missing"):
        TsmMachine(reports=reports).attest(CHALLENGE.nonce, CHALLENGE.public_key)
    # The operator gives AMD's certificates, perhaps with those for chips' own keys too.
    given = (*vlek.chain[1:], *AMD.chain, b"unreadable")
    evidence = TsmMachine(given, reports).attest(CHALLENGE.nonce, CHALLENGE.public_key)
    assert evidence.chain == vlek.chain
    assert verify_evidence(evidence, CHALLENGE, vlek.trust()).guest["vlek"] == 1


def test_a_tdx_guest_whose_kernel_fills_the_buffer_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel("tdx_guest", lambda data: INTEL.quote(tdx_body(data, rtmrs=held)) + bytes(99))
    measured = (Measured(2, 13, b"kernel"),)
    digest = hashlib.sha384(b"kernel").digest()
    held = {1: hashlib.sha384(bytes(48) + digest).digest()}
    log = tmp_path / "CCEL"
    log.write_bytes(event_log(measured, ((12, 48),)) + b"\xff" * 100)
    machine = TsmMachine(reports=kernel.install(tmp_path, monkeypatch), event_log=log)
    evidence = machine.attest(CHALLENGE.nonce, CHALLENGE.public_key)
    worker = verify_evidence(evidence, CHALLENGE, INTEL.trust())
    assert (worker.kind, worker.events) == ("tdx", {"rtmr1": (digest.hex(),)})


def test_a_machine_that_is_no_guest_and_one_of_an_unknown_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AttestationUnavailable, match=r"no reports .* SEALRING_ATTESTER"):
        TsmMachine(reports=tmp_path / "none")
    kernel = Kernel("cca_guest", lambda data: data)
    with pytest.raises(AttestationUnavailable, match="cca_guest"):
        ask(bytes(64), kernel.install(tmp_path, monkeypatch))


# The template of a restricted RSA signing key, for CreatePrimary.
RSA_AK = bytes.fromhex("0001000b00050472000000100014000b0800000000000000")


@needs_swtpm
def test_a_guest_of_azures_with_a_real_virtual_tpm() -> None:
    with running() as address, Tpm.open(address) as tpm:
        with pytest.raises(AttestationUnavailable, match="not one of Azure's"):
            AzureMachine(tpm, ())
        with tpm.primary(RSA_AK) as (handle, public):
            tpm.call("EvictControl", 0x120, (OWNER, handle), (PASSWORD,), AK.to_bytes(4, "big"))
        guest = AzureGuest(AMD, modulus=int.from_bytes(public[-256:], "big"))
        store(tpm, HCL_REPORT, guest.hcl_report(version=2, pad=16))
        machine = AzureMachine(tpm, AMD.chain)
        evidence = machine.attest(CHALLENGE.nonce, CHALLENGE.public_key)
        worker = verify_evidence(parse_evidence(evidence.encode()), CHALLENGE, AMD.trust())
    assert worker.label == "az-snp-vtpm Milan"
    assert worker.registers["pcr17"] == "ff" * 32


@needs_swtpm
def test_a_tdx_guest_of_azures_has_its_report_quoted_by_the_metadata_service() -> None:
    asked = []

    def metadata(path: str, body: bytes) -> tuple[int, bytes]:
        asked.append((path, json.loads(body)["report"]))
        quote = base64.urlsafe_b64encode(guest.td_quote + bytes(70)).decode().rstrip("=")
        return (200, json.dumps({"quote": quote}).encode()) if len(asked) == 1 else (500, b"{}")

    with running() as address, Tpm.open(address) as tpm, answering(metadata) as service:
        with tpm.primary(RSA_AK) as (handle, public):
            tpm.call("EvictControl", 0x120, (OWNER, handle), (PASSWORD,), AK.to_bytes(4, "big"))
        guest = AzureGuest(INTEL, modulus=int.from_bytes(public[-256:], "big"))
        guest.report = b"TDREPORT".ljust(1184, b"\0")
        store(tpm, HCL_REPORT, guest.hcl_report(version=2, pad=16))
        machine = AzureMachine(tpm, (), service)
        evidence = machine.attest(CHALLENGE.nonce, CHALLENGE.public_key)
        worker = verify_evidence(parse_evidence(evidence.encode()), CHALLENGE, INTEL.trust())
        with pytest.raises(AttestationUnavailable, match="status 500"):
            machine.attest(CHALLENGE.nonce, CHALLENGE.public_key)
        gone = AzureMachine(tpm, (), ("127.0.0.1", 1))
        with pytest.raises(AttestationUnavailable, match="does not answer"):
            gone.attest(CHALLENGE.nonce, CHALLENGE.public_key)
    assert worker.label == "az-tdx-vtpm TDX"
    report = base64.urlsafe_b64encode(guest.report[:1024]).decode().rstrip("=")
    assert asked[0] == ("/acc/tdquote", report)


def written(out: Any, kind: Any) -> Any:
    """The object behind a pointer that the caller passed to a C function."""
    return ctypes.cast(out, ctypes.POINTER(kind)).contents


class Nvml:
    """A stand-in for NVIDIA's library, with one GPU. `outcome` answers requests for a report."""

    def __init__(self, outcome: int = 0) -> None:
        self.outcome, self.open = outcome, 0

    def nvmlInit_v2(self) -> int:
        self.open += 1
        return 0

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        written(count, ctypes.c_uint).value = 1
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: ctypes.c_uint, device: Any) -> int:
        written(device, ctypes.c_void_p).value = 1 + index.value
        return 0

    def nvmlDeviceGetConfComputeGpuCertificate(self, device: Any, certificate: Any) -> int:
        filled = written(certificate, GpuCertificate)
        text = pem(GPU.device, GPU.boot, GPU.provisioner, GPU.identity, GPU.root).encode()
        ctypes.memmove(filled.attestation_chain, text, len(text))
        filled.attestation_chain_size = len(text)
        return 0

    def nvmlDeviceGetConfComputeGpuAttestationReport(self, device: Any, report: Any) -> int:
        filled = written(report, GpuReport)
        made = GPU.report(bytes(filled.nonce))
        ctypes.memmove(filled.report, made, len(made))
        filled.size = len(made)
        return self.outcome


def test_gpus_are_asked_with_the_machines_nonce() -> None:
    nonce = CHALLENGE.device_nonce("tdx")
    nvml = Nvml()
    (evidence,) = collect_gpus(nonce, nvml)
    assert verify_nvidia(evidence, nonce, GPU.trust()).model == "GH100"
    assert nvml.open == 0
    assert ctypes.sizeof(GpuReport) == 12 + 32 + 0x2000 + 0x1000
    assert ctypes.sizeof(GpuCertificate) == 8 + 0x1000 + 0x1400


def test_a_gpu_that_is_not_in_confidential_mode() -> None:
    nvml = Nvml(outcome=3)
    with pytest.raises(AttestationUnavailable, match="confidential-computing mode"):
        collect_gpus(bytes(32), nvml)
    assert nvml.open == 0
    assert issubclass(TpmFailed, AttestationUnavailable)
