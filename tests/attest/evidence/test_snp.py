"""SNP evidence made by the tests: true evidence verifies, and each change has its own error."""

from __future__ import annotations

import copy
import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest

from sealring.attest.evidence import (
    Challenge,
    Trust,
)
from sealring.attest.evidence.chains import AMD_ROOTS
from sealring.errors import ForgedEvidence, MalformedEvidence
from tests.attest.evidence.judging import Judge
from tests.attest.evidence.minting import CHALLENGE, CHIP, DAY, MEASUREMENT, NOW, TCB, Amd

AMD = Amd()
ROOT = Path(__file__).parents[3]
JUDGE = Judge(lambda: CHALLENGE, AMD.trust)
verify, refused = JUDGE.verify, JUDGE.refused


def test_true_evidence_is_an_attested_worker() -> None:
    worker = verify(AMD.evidence(), AMD.trust(AMD.revocation_list()))
    assert (worker.kind, worker.product, worker.label) == ("snp", "Milan", "snp Milan")
    assert worker.measurement == MEASUREMENT.hex()
    assert worker.machine == CHIP.hex()
    assert worker.tcb == TCB
    assert worker.not_after == AMD.leaf.not_valid_after_utc
    assert [one.made for one in worker.lists] == [NOW - DAY]
    assert worker.unlisted == ()
    assert not worker.debug
    assert not worker.simulated


def test_a_key_of_a_cloud_provider_and_the_layout_of_turin() -> None:
    vlek = Amd(vlek=True)
    assert verify(vlek.evidence(), vlek.trust()).machine == ""
    chip = CHIP[1:9]
    turin = Amd("Turin", chip=chip, tcb=TCB | {"fmc": 7})
    worker = verify(turin.evidence(turin.report(chip=chip, version=5)), turin.trust())
    assert worker.tcb == TCB | {"fmc": 7}


@pytest.mark.parametrize("at", [*range(0, 0x2A0, 7), *range(0x2A0, 1184, 5)])
@pytest.mark.threat("E1")
def test_no_byte_of_the_report_can_be_changed(at: int) -> None:
    report = bytearray(AMD.report())
    report[at] ^= 0x40
    with pytest.raises((ForgedEvidence, MalformedEvidence)):
        verify(AMD.evidence(bytes(report)))


@pytest.mark.threat("E1")
def test_cut_and_extended_reports() -> None:
    report = AMD.report()
    for other in (report[:-1], report[:100], report + b"\0"):
        refused("evidence.malformed_evidence", AMD.evidence(other))


@pytest.mark.parametrize("changes", [{"version": 1}, {"version": 4}, {"algorithm": 2}])
@pytest.mark.threat("E11")
def test_unknown_versions_and_algorithms(changes: dict[str, int]) -> None:
    refused("evidence.unknown_evidence", AMD.evidence(AMD.report(**changes)))  # type: ignore[arg-type]


@pytest.mark.threat("E12")
def test_a_chain_that_looks_alike() -> None:
    alike = Amd()
    assert "not a pinned root" in refused("evidence.untrusted_chain", alike.evidence())
    mixed = replace(AMD.evidence(), chain=(*alike.chain[:2], AMD.chain[2]))
    assert "did not issue" in refused("evidence.untrusted_chain", mixed)
    mixed = replace(AMD.evidence(), chain=(alike.chain[0], *AMD.chain[1:]))
    assert "did not issue" in refused("evidence.untrusted_chain", mixed)
    refused("evidence.untrusted_chain", AMD.evidence(), Trust(NOW))


@pytest.mark.threat("E12")
def test_a_chain_with_a_link_missing_or_too_many() -> None:
    refused("evidence.untrusted_chain", replace(AMD.evidence(), chain=()))
    refused("evidence.untrusted_chain", replace(AMD.evidence(), chain=(AMD.chain[0], AMD.chain[2])))
    refused("evidence.forged_evidence", replace(AMD.evidence(), chain=(*AMD.chain, AMD.chain[2])))
    refused("evidence.forged_evidence", replace(AMD.evidence(), chain=AMD.chain[1:]))
    refused(
        "evidence.malformed_evidence", replace(AMD.evidence(), chain=(b"rubbish", *AMD.chain[1:]))
    )


@pytest.mark.threat("E12")
def test_an_issuer_that_is_no_authority() -> None:
    weak = Amd(ask_is_ca=False)
    assert "may not issue" in refused("evidence.untrusted_chain", weak.evidence(), weak.trust())


def test_a_critical_extension_that_is_not_known() -> None:
    limited = Amd(critical=True)
    assert "critical extension" in refused(
        "evidence.untrusted_chain", limited.evidence(), limited.trust()
    )


@pytest.mark.threat("E12")
def test_dates() -> None:
    trust = AMD.trust(now=NOW + 101 * DAY)
    assert "SEV-VCEK" in refused("evidence.chain_expired", AMD.evidence(), trust)
    refused("evidence.chain_expired", AMD.evidence(), AMD.trust(now=NOW - 101 * DAY))


@pytest.mark.threat("E12")
def test_revocation() -> None:
    revoked = AMD.trust(AMD.revocation_list(AMD.ask))
    assert "has revoked CN=SEV-Milan" in refused("evidence.chain_revoked", AMD.evidence(), revoked)
    old = AMD.trust(AMD.revocation_list(days_old=20, days_left=-1))
    refused("evidence.stale_revocation_list", AMD.evidence(), old)


@pytest.mark.threat("E13")
def test_a_list_signed_by_another_is_no_list() -> None:
    assert verify(AMD.evidence(), AMD.trust(Amd().revocation_list(AMD.ask))).lists == ()


@pytest.mark.threat("E14")
def test_an_old_nonce_and_another_workers_key() -> None:
    for other in (
        Challenge(bytes(32), CHALLENGE.public_key),
        Challenge(CHALLENGE.nonce, b"another worker's public key"),
    ):
        refused("evidence.not_bound", AMD.evidence(AMD.report(challenge=other)))


@pytest.mark.threat("E14")
def test_the_senders_word_on_the_challenge_counts_for_nothing() -> None:
    other = Challenge(bytes(32), b"mine")
    evidence = replace(AMD.evidence(AMD.report(challenge=other)), challenge=other)
    refused("evidence.not_bound", evidence)


@pytest.mark.threat("E15")
def test_another_chips_key_and_another_tcbs_key() -> None:
    assert "another chip" in refused(
        "evidence.forged_evidence", AMD.evidence(AMD.report(chip=bytes(64)))
    )
    newer = AMD.report(tcb=TCB | {"microcode": 116})
    assert "TCB" in refused("evidence.forged_evidence", AMD.evidence(newer))
    masked = Amd(chip=bytes(64))
    refused(
        "evidence.forged_evidence", masked.evidence(masked.report(chip=bytes(64))), masked.trust()
    )


@pytest.mark.threat("E15")
def test_a_key_for_another_product_or_role() -> None:
    other = Amd(stated_product="Genoa")
    refused("evidence.forged_evidence", other.evidence(), other.trust())
    refused("evidence.forged_evidence", AMD.evidence(), AMD.trust(product="Genoa"))
    vlek = Amd(vlek=True)
    refused("evidence.forged_evidence", AMD.evidence(vlek.report()))


@pytest.mark.threat("E11")
def test_a_kind_without_a_verifier_and_parts_that_do_not_belong() -> None:
    refused("evidence.unknown_evidence", replace(AMD.evidence(), kind="cca"))
    refused(
        "evidence.malformed_evidence", replace(AMD.evidence(), parts={"report": b"x", "more": b"x"})
    )


@pytest.mark.threat("E23")
def test_proof_cannot_be_made_or_copied() -> None:
    worker = verify(AMD.evidence())
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError):
            attempt(worker)
    with pytest.raises((TypeError, ValueError)):
        replace(worker, debug=False)  # type: ignore[call-arg]


@pytest.mark.threat("E23")
def test_only_verifiers_hold_the_seal() -> None:
    holders = {
        path.name
        for path in (ROOT / "src").rglob("*.py")
        if re.search(r"evidence\.worker import [^)]*?\bSEAL\b", path.read_text())
    }
    assert holders == {"verify.py"}


def test_the_pinned_roots_are_the_ones_used_by_default() -> None:
    assert Trust(NOW).amd is AMD_ROOTS
    assert Trust(NOW).simulated == frozenset()
    assert sorted(AMD_ROOTS.values()) == ["Genoa", "Milan", "Turin"]
