"""A verifier whose clock is behind: each refusal says so, and none calls true evidence forged."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from sealring.attest.evidence import Evidence, Trust, verify_evidence
from sealring.attest.evidence.nvidia import verify_nvidia
from sealring.errors import AttestationError, SealringError, UntrustedChain
from tests.attest.minting import CHALLENGE, DAY, NOW, issue
from tests.attest.minting.amd import Amd
from tests.attest.minting.intel import Intel
from tests.attest.minting.nvidia import Nvidia
from tests.codes import coded

AMD, INTEL, GPU = Amd(), Intel(), Nvidia()
BEHIND = "this machine's clock may be behind"


def refused(error: str, evidence: Evidence, trust: Trust) -> str:
    with pytest.raises(SealringError, check=coded(error)) as caught:
        verify_evidence(evidence, CHALLENGE, trust)
    return str(caught.value)


def test_a_list_that_was_made_after_the_clocks_time() -> None:
    trust = replace(AMD.trust(AMD.revocation_list()), now=NOW - 2 * DAY)
    assert BEHIND in refused("evidence.stale_revocation_list", AMD.evidence(), trust)
    late = replace(trust, now=NOW + 20 * DAY)
    said = refused("evidence.stale_revocation_list", AMD.evidence(), late)
    assert "fetch it again" in said
    assert BEHIND not in said


def test_an_ocsp_answer_that_was_made_after_the_clocks_time() -> None:
    answers = (GPU.provisioner.answer(GPU.boot),)
    nonce = CHALLENGE.device_nonce("snp")
    trust = replace(GPU.trust(now=NOW - 2 * DAY), answers=answers)
    with pytest.raises(
        AttestationError, match=BEHIND, check=coded("evidence.stale_revocation_list")
    ):
        verify_nvidia(GPU.evidence(nonce), nonce, trust)


def test_intels_collateral_that_was_made_after_the_clocks_time() -> None:
    said = refused(
        "evidence.stale_revocation_list", INTEL.evidence(), INTEL.trust(now=NOW - 2 * DAY)
    )
    assert BEHIND in said
    late = refused(
        "evidence.stale_revocation_list", INTEL.evidence(), INTEL.trust(now=NOW + 11 * DAY)
    )
    assert "fetch it again" in late


@pytest.mark.parametrize(("days_old", "days", "told"), [(-2, 100, BEHIND), (90, -1, "again")])
@pytest.mark.threat("E10")
def test_a_certificate_of_intels_statements_out_of_its_dates_is_no_forgery(
    days_old: int, days: int, told: str
) -> None:
    other = copy.copy(INTEL)
    other.tcb_signer = issue(
        "Intel SGX TCB Signing", INTEL.root, ca=False, curve=ec.SECP256R1(), days_old=days_old,
        days=days, usage=["digital_signature"],
    )  # fmt: skip
    said = refused(
        "evidence.stale_revocation_list", INTEL.evidence(), INTEL.trust(other.collateral())
    )
    assert told in said
    assert "this verifier's own Intel collateral" in said


def test_a_chain_and_references_that_begin_after_the_clocks_time() -> None:
    said = refused(
        "evidence.chain_expired", AMD.evidence(), replace(AMD.trust(), now=NOW - 101 * DAY)
    )
    assert BEHIND in said
    (reference, *_) = GPU.references()
    with pytest.raises(UntrustedChain, match=BEHIND, check=coded("evidence.chain_expired")):
        reference.check_dates(NOW - 101 * DAY)
    with pytest.raises(
        UntrustedChain, match="fetch them again", check=coded("evidence.chain_expired")
    ):
        reference.check_dates(NOW + 1001 * DAY)
