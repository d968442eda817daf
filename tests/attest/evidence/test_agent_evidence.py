"""Evidence as guest-components' clients send it: real files from Azure's guests, and odd ones."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from sealring.attest.evidence import Trust, describe_evidence
from sealring.attest.evidence.agent_evidence import devices_of, evidence_of
from sealring.attest.evidence.chains import load_certificate
from sealring.attest.evidence.nvidia import verify_nvidia
from sealring.errors import AttestationUnavailable, MalformedEvidence
from tests.attest.evidence.test_az_vtpm import THEN
from tests.attest.evidence.vectors import vectors
from tests.attest.minting import CHALLENGE
from tests.attest.minting.nvidia import Nvidia
from tests.codes import coded


def shown(name: str) -> dict[str, Any]:
    return json.loads((vectors("vtpm-snp") / name).read_bytes())


def issuers() -> list[bytes]:
    found = x509.load_pem_x509_certificates((vectors("snp") / "milan.testcer").read_bytes())[:2]
    return [one.public_bytes(Encoding.DER) for one in found]


def test_a_real_azure_guests_evidence_is_judged_as_it_was_sent() -> None:
    given = shown("az-snp-vtpm_evidence-v2.json")
    evidence = evidence_of("az-snp-vtpm", given, CHALLENGE, (), issuers())
    worker = describe_evidence(evidence, Trust(THEN))
    assert (worker.label, worker.debug) == ("az-snp-vtpm Milan", False)
    assert worker.registers["pcr7"] == given["tpm_quote"]["pcrs"][7]


def test_without_amds_issuers_it_has_no_chain() -> None:
    with pytest.raises(AttestationUnavailable, match="missing"):
        evidence_of("az-snp-vtpm", shown("az-snp-vtpm_evidence-v2.json"), CHALLENGE)
    # The form of older clients, before it had versions.
    with pytest.raises(MalformedEvidence):
        evidence_of("az-snp-vtpm", shown("az-snp-vtpm_evidence-genoa.json"), CHALLENGE)


def test_forms_that_are_not_known() -> None:
    odd: list[Any] = [{}, [], None, 7, "x", {"quote": 7}, {"quote": "\u00e9"}, {"version": 2}]
    for kind in ("snp", "tdx", "sgx", "az-snp-vtpm", "az-tdx-vtpm"):
        for given in odd:
            with pytest.raises(MalformedEvidence):
                evidence_of(kind, given, CHALLENGE)
    for kind in ("sample", "tpm", "cca", "se", ""):
        with pytest.raises(
            MalformedEvidence, match="cannot be judged", check=coded("evidence.unknown_evidence")
        ):
            evidence_of(kind, {}, CHALLENGE)
    with pytest.raises(
        MalformedEvidence, match="version 3", check=coded("evidence.unknown_evidence")
    ):
        evidence_of("az-snp-vtpm", {"version": 3}, CHALLENGE)


def test_a_gpus_report_that_ends_in_zeros_is_cut_where_it_ends() -> None:
    gpu = Nvidia()
    nonce = CHALLENGE.device_nonce("snp")
    good = gpu.evidence(nonce)
    chain = b"".join(load_certificate(one).public_bytes(Encoding.PEM) for one in good.chain)

    def shown(report: bytes) -> str:
        device = {"evidence": report.hex(), "certificate": base64.b64encode(chain).decode()}
        return json.dumps({"nvidia": {"device_evidence_list": [device]}})

    for filling in (b"", b"\0", bytes(100)):
        (device,) = devices_of(shown(good.parts["report"] + filling))
        assert device == good
        assert verify_nvidia(device, nonce, gpu.trust()).model == "GH100"
    with pytest.raises(MalformedEvidence, match="goes on behind its signature"):
        devices_of(shown(good.parts["report"] + b"\0\1"))
    # A worker sends the report without zeros, because evidence has one spelling.
    padded = replace(good, parts={"report": good.parts["report"] + b"\0"})
    with pytest.raises(MalformedEvidence, match="not in its one spelling"):
        verify_nvidia(padded, nonce, gpu.trust())


def test_devices_of_other_forms() -> None:
    assert devices_of("") == devices_of("{}") == ()
    for text in ("[]", "x", "7", '{"nvidia": 7}', '{"nvidia": {"device_evidence_list": 7}}',
                 '{"nvidia": {"device_evidence_list": [7]}}', "[" * 100_000):  # fmt: skip
        with pytest.raises(MalformedEvidence):
            devices_of(text)
    many = json.dumps({"nvidia": {"device_evidence_list": [{}] * 25}})
    with pytest.raises(MalformedEvidence, match="at most 24"):
        devices_of(many)
    with pytest.raises(
        MalformedEvidence, match="sampledevice", check=coded("evidence.unknown_evidence")
    ):
        devices_of('{"sampledevice": {}}')
