"""A stand-in, on loopback, for a confidential container's agent: its answer becomes evidence."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from sealring.attest.evidence import verify_evidence
from sealring.attest.evidence.agent_evidence import CocoMachine, report_of
from sealring.attest.evidence.snp import verify_report
from sealring.attest.evidence.trust import Trust
from sealring.errors import AttestationUnavailable
from tests.attest.evidence.answering import answering
from tests.attest.evidence.test_real_snp import CASES, THEN, read
from tests.attest.minting import CHALLENGE
from tests.attest.minting.amd import TCB, Amd
from tests.attest.minting.intel import Intel, tdx_body
from tests.attest.minting.tpm import Measured, event_log

AMD, INTEL = Amd(), Intel()


def agent(make: Callable[[bytes], Any]) -> Callable[[str, bytes], tuple[int, bytes]]:
    def answer(path: str, _: bytes) -> tuple[int, bytes]:
        parts = urlsplit(path)
        query = parse_qs(parts.query)
        assert (parts.path, query["encoding"]) == ("/aa/evidence", ["base64"])
        (text,) = query["runtime_data"]
        asked = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        assert len(asked) == 64
        return 200, json.dumps(make(asked)).encode()

    return answer


def fields_of(raw: bytes, *, turin: bool = False) -> dict[str, Any]:
    """A report's fields as the agent writes them."""

    def number(at: int, size: int) -> int:
        return int.from_bytes(raw[at : at + size], "little")

    def tcb(at: int) -> dict[str, Any]:
        eight = raw[at : at + 8]
        if turin:
            names = ("fmc", "bootloader", "tee", "snp")
            return dict(zip(names, eight, strict=False)) | {"microcode": eight[7]}
        return {
            "fmc": None, "bootloader": eight[0], "tee": eight[1], "snp": eight[6],
            "microcode": eight[7],
        }  # fmt: skip

    return {
        "version": number(0, 4), "guest_svn": number(4, 4), "policy": number(8, 8),
        "family_id": list(raw[0x10:0x20]), "image_id": list(raw[0x20:0x30]),
        "vmpl": number(0x30, 4), "sig_algo": number(0x34, 4), "current_tcb": tcb(0x38),
        "plat_info": number(0x40, 8), "key_info": number(0x48, 4),
        "report_data": list(raw[0x50:0x90]), "measurement": list(raw[0x90:0xC0]),
        "host_data": list(raw[0xC0:0xE0]), "id_key_digest": list(raw[0xE0:0x110]),
        "author_key_digest": list(raw[0x110:0x140]), "report_id": list(raw[0x140:0x160]),
        "report_id_ma": list(raw[0x160:0x180]), "reported_tcb": tcb(0x180),
        "cpuid_fam_id": raw[0x188] or None, "cpuid_mod_id": raw[0x189] or None,
        "cpuid_step": raw[0x18A] or None, "chip_id": list(raw[0x1A0:0x1E0]),
        "committed_tcb": tcb(0x1E0),
        "current": {"build": raw[0x1E8], "minor": raw[0x1E9], "major": raw[0x1EA]},
        "committed": {"build": raw[0x1EC], "minor": raw[0x1ED], "major": raw[0x1EE]},
        "launch_tcb": tcb(0x1F0), "launch_mit_vector": None, "current_mit_vector": None,
        "signature": {"r": list(raw[0x2A0:0x2E8]), "s": list(raw[0x2E8:0x330])},
    }  # fmt: skip


def snp_answer(amd: Amd, *, turin: bool = False, chain: int = 3) -> Callable[[bytes], Any]:
    def make(asked: bytes) -> Any:
        report = amd.report(report_data=asked, version=3)
        entries = [{"cert_type": "VCEK", "data": list(one)} for one in amd.chain[:chain]]
        return {"attestation_report": fields_of(report, turin=turin), "cert_chain": entries or None}

    return make


@pytest.mark.parametrize("turin", [False, True])
def test_an_snp_report_that_comes_field_by_field(turin: bool) -> None:
    amd = Amd("Turin", tcb=TCB | {"fmc": 7}) if turin else AMD
    with answering(agent(snp_answer(amd, turin=turin))) as address:
        machine = CocoMachine(agent=address)
        assert machine.kind == "snp"
        evidence = machine.attest(CHALLENGE.nonce, CHALLENGE.public_key)
    assert verify_evidence(evidence, CHALLENGE, amd.trust()).product == amd.product


def test_an_agent_that_gives_the_chips_certificate_alone_or_none() -> None:
    for count, given in ((1, AMD.chain[1:]), (0, AMD.chain)):
        with answering(agent(snp_answer(AMD, chain=count))) as address:
            evidence = CocoMachine(given, address).attest(CHALLENGE.nonce, CHALLENGE.public_key)
            assert evidence.chain == AMD.chain
            with pytest.raises(AttestationUnavailable, match=r"missing|no certificate"):
                CocoMachine((), address).attest(CHALLENGE.nonce, CHALLENGE.public_key)


@pytest.mark.parametrize(("report", "leaf", "chain", "debug"), CASES)
def test_real_reports_survive_the_agents_form(
    report: str, leaf: str, chain: str, debug: bool
) -> None:
    raw, certificates = read(report, leaf, chain)
    for given in (fields_of(raw), list(raw), base64.b64encode(raw).decode()):
        assert report_of(given) == raw
    assert verify_report(report_of(fields_of(raw)), certificates, Trust(THEN))


def test_a_tdx_quote_with_its_log() -> None:
    digest = hashlib.sha384(b"kernel").digest()
    held = {1: hashlib.sha384(bytes(48) + digest).digest()}
    log = event_log((Measured(2, 13, b"kernel"),), ((12, 48),)) + b"\xff" * 50

    def make(asked: bytes) -> Any:
        quote = INTEL.quote(tdx_body(asked, rtmrs=held)) + bytes(70)
        coded = (base64.b64encode(one).decode() for one in (quote, log))
        return dict(zip(("quote", "cc_eventlog"), coded, strict=True))

    with answering(agent(make)) as address:
        machine = CocoMachine(agent=address)
        evidence = machine.attest(CHALLENGE.nonce, CHALLENGE.public_key)
    worker = verify_evidence(evidence, CHALLENGE, INTEL.trust())
    assert (worker.kind, worker.events) == ("tdx", {"rtmr1": (digest.hex(),)})


@pytest.mark.parametrize(
    "answer", [[], {}, "text", {"svn": "1", "report_data": "x"}, {"attestation_report": {}}]
)
def test_answers_of_another_form(answer: Any) -> None:
    with (
        answering(agent(lambda _: answer)) as address,
        pytest.raises(AttestationUnavailable, match="agent gives"),
    ):
        CocoMachine(agent=address).attest(CHALLENGE.nonce, CHALLENGE.public_key)


def test_no_agent() -> None:
    with pytest.raises(AttestationUnavailable, match="does not answer"):
        CocoMachine(agent=("127.0.0.1", 1))
