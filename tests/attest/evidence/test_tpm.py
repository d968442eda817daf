"""TPM evidence made by the tests: true evidence verifies, and each change has its own error."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from sealring.attest.evidence import (
    Challenge,
    Evidence,
    Trust,
    verify_evidence,
)
from sealring.attest.evidence.tpm.credential import check_ak
from sealring.attest.evidence.tpm.event_log import PCR_NAMES, matching_log, parse_event_log, replay
from sealring.attest.evidence.tpm.structures import SHA256
from sealring.errors import (
    AttestationError,
    ForgedEvidence,
    MalformedEvidence,
    UntrustedChain,
)
from tests.attest.evidence.judging import UNTRUE, Judge
from tests.attest.minting import CHALLENGE, DAY, NOW, issue
from tests.attest.minting.tpm import (
    AK_ATTRIBUTES,
    BOOT,
    PCRS,
    Maker,
    Measured,
    event_log,
    make_credential,
    pcr_values,
    public_of,
    quote,
    sign,
)
from tests.codes import coded

MAKER = Maker()
GOOD = MAKER.evidence()
JUDGE = Judge(MAKER.challenge, MAKER.trust)
verify, refused = JUDGE.verify, JUDGE.refused


def changed(**parts: bytes) -> Evidence:
    return replace(GOOD, parts={**GOOD.parts, **parts})


def requoted(message: bytes) -> Evidence:
    return changed(quote=message, signature=sign(MAKER.ak_key, message))


def test_true_evidence_is_an_attested_worker() -> None:
    worker = verify(GOOD, MAKER.trust(MAKER.root.revocation_list()))
    values = pcr_values(BOOT)
    assert worker.label == "tpm 2.0"
    assert worker.registers["pcr4"] == values[4].hex()
    assert worker.registers["pcr0"] == values[0].hex()
    kernel, loader = BOOT[3].digest.hex(), BOOT[2].digest.hex()
    assert worker.events["pcr4"] == (loader, kernel)
    assert len(worker.machine) == 64
    assert worker.not_after == MAKER.ek.certificate.not_valid_after_utc
    assert not worker.debug


@pytest.mark.threat("E3")
def test_pcrs_that_any_program_can_reset_are_never_reported() -> None:
    worker = verify(MAKER.evidence(pcrs=tuple(range(24))))
    assert {"pcr16", "pcr23"} & set(worker.registers) == set()
    assert "pcr22" in worker.registers


@pytest.mark.parametrize("part", ["quote", "signature", "ak", "pcrs", "event_log"])
@pytest.mark.threat("E1")
def test_no_byte_of_any_part_can_be_changed(part: str) -> None:
    raw = GOOD.parts[part]
    for at in range(0, len(raw), 1 if part in ("quote", "ak") else 7):
        bent = raw[:at] + bytes([raw[at] ^ 0x40]) + raw[at + 1 :]
        # An event's text is only a comment: nothing signs it, and nothing uses it.
        if part == "event_log" and _only_comments_differ(raw, bent):
            continue
        with pytest.raises(AttestationError, check=coded(*UNTRUE)):
            verify(changed(**{part: bent}))


def _only_comments_differ(one: bytes, other: bytes) -> bool:
    try:
        return replay(parse_event_log(one)) == replay(parse_event_log(other))
    except MalformedEvidence:
        return False


@pytest.mark.parametrize("part", ["quote", "signature", "ak", "pcrs", "event_log"])
def test_cut_and_extended_parts(part: str) -> None:
    for bent in (GOOD.parts[part][:-1], GOOD.parts[part][:9], GOOD.parts[part] + b"\0"):
        with pytest.raises((MalformedEvidence, ForgedEvidence)):
            verify(changed(**{part: bent}))


@pytest.mark.threat("E1")
def test_signed_but_cut_or_extended_quotes() -> None:
    for bent in (GOOD.parts["quote"][:-1], GOOD.parts["quote"] + b"\0"):
        refused("evidence.malformed_evidence", requoted(bent))


@pytest.mark.threat("E14")
def test_an_old_nonce_and_another_workers_key() -> None:
    own = MAKER.challenge()
    for other in (replace(own, nonce=bytes(32)), replace(own, public_key=b"another's")):
        refused("evidence.not_bound", replace(MAKER.evidence(other), challenge=own))


@pytest.mark.threat("E2")
def test_a_credential_that_was_not_opened_or_was_made_for_another() -> None:
    own = MAKER.challenge()
    guessed = replace(own, credential=own.credential[:32] + bytes(32))
    refused("evidence.not_bound", replace(MAKER.evidence(guessed), challenge=own))
    other_key = ec.generate_private_key(ec.SECP256R1())
    message = GOOD.parts["quote"]
    # The TPM opened the credential, but its owner signs with another key.
    stolen = changed(ak=public_of(other_key), signature=sign(other_key, message))
    assert "no credential" in refused("evidence.not_bound", stolen)
    with pytest.raises(AttestationError, check=coded("evidence.not_bound")):
        verify_evidence(MAKER.evidence(CHALLENGE), CHALLENGE, MAKER.trust())


@pytest.mark.parametrize("missing", [1 << 1, 1 << 4, 1 << 5, 1 << 16, 1 << 18])
@pytest.mark.threat("E2")
def test_a_key_that_may_leave_its_tpm_or_signs_anything(missing: int) -> None:
    loose = public_of(MAKER.ak_key, AK_ATTRIBUTES & ~missing)
    refused("evidence.forged_evidence", changed(ak=loose))
    with pytest.raises(ForgedEvidence):
        make_credential(MAKER.chain, loose, MAKER.trust())


def test_a_key_that_decrypts_too() -> None:
    refused(
        "evidence.forged_evidence", changed(ak=public_of(MAKER.ak_key, AK_ATTRIBUTES | 1 << 17))
    )


@pytest.mark.threat("E2")
def test_something_else_that_the_key_signed() -> None:
    values = {pcr: pcr_values(BOOT)[pcr] for pcr in PCRS}
    bound = MAKER.challenge().report_data("tpm")[:32]
    refused("evidence.malformed_evidence", requoted(quote(values, bound, magic=0x12345678)))
    refused("evidence.malformed_evidence", requoted(quote(values, bound, kind=0x8017)))


def test_other_pcrs_than_the_quoted_ones() -> None:
    values = GOOD.parts["pcrs"]
    said = refused("evidence.forged_evidence", changed(pcrs=values[32:] + values[:32]))
    assert "not the ones that the TPM signed" in said


@pytest.mark.threat("E4")
def test_a_log_that_leaves_something_out_or_says_more() -> None:
    more = (*BOOT, Measured(4, 0x80000003, b"rootkit"))
    for events in (BOOT[:3], more, tuple(reversed(BOOT))):
        assert "does not lead to" in refused(
            "evidence.forged_evidence", MAKER.evidence(log=event_log(events))
        )


def test_a_log_in_another_form_and_without_sha256() -> None:
    refused("evidence.unknown_evidence", MAKER.evidence(log=event_log(BOOT, ((4, 20),))))
    refused(
        "evidence.unknown_evidence",
        MAKER.evidence(log=event_log(BOOT).replace(b"Event03", b"Event02")),
    )


def test_a_log_of_several_banks_and_no_log() -> None:
    worker = verify(MAKER.evidence(log=event_log(BOOT, ((4, 20), (11, 32), (12, 48)))))
    assert len(worker.events["pcr4"]) == 2
    parts = {name: part for name, part in GOOD.parts.items() if name != "event_log"}
    assert verify(replace(GOOD, parts=parts)).events == {}


def test_only_the_named_pcrs_of_a_log_are_kept() -> None:
    held = {f"pcr{pcr}": pcr_values(BOOT)[pcr].hex() for pcr in (4, 7)}
    kept = parse_event_log(matching_log(event_log(BOOT), held, SHA256, PCR_NAMES))
    assert [event.pcr for event in kept] == [4, 4, 7]
    assert replay(kept)[4] == pcr_values(BOOT)[4]


@pytest.mark.threat("E12")
def test_chains() -> None:
    alike = Maker()
    assert "not a pinned root" in refused(
        "evidence.untrusted_chain", replace(GOOD, chain=alike.chain)
    )
    refused("evidence.untrusted_chain", replace(GOOD, chain=(*alike.chain[:2], MAKER.chain[2])))
    refused("evidence.untrusted_chain", replace(GOOD, chain=()))
    refused("evidence.untrusted_chain", GOOD, Trust(NOW))
    refused("evidence.chain_expired", GOOD, MAKER.trust(now=NOW + 101 * DAY))
    revoked = MAKER.trust(MAKER.signer.revocation_list(MAKER.ek.certificate))
    refused("evidence.chain_revoked", GOOD, revoked)
    stale = MAKER.trust(MAKER.root.revocation_list(days_old=20, days_left=-1))
    refused("evidence.stale_revocation_list", GOOD, stale)


def test_a_certificate_of_the_maker_that_is_not_for_an_endorsement_key() -> None:
    other = Maker(purpose=x509.ExtendedKeyUsage([x509.ObjectIdentifier("2.23.133.8.3")]))
    evidence = other.evidence()
    with pytest.raises(ForgedEvidence, match="endorsement key"):
        verify_evidence(evidence, other.challenge(), other.trust())
    plain = issue("no purpose", MAKER.signer, ca=False)
    refused("evidence.forged_evidence", replace(GOOD, chain=(plain.der, *MAKER.chain[1:])))


def test_no_credential_is_made_for_strangers() -> None:
    with pytest.raises(UntrustedChain):
        make_credential(Maker().chain, MAKER.ak, MAKER.trust())
    odd = Maker(ek=ec.generate_private_key(ec.SECP521R1()).public_key())
    with pytest.raises(MalformedEvidence, check=coded("evidence.unknown_evidence")):
        make_credential(odd.chain, odd.ak, odd.trust())


def test_credentials_differ_and_name_whom_they_are_for() -> None:
    one, two = (make_credential(MAKER.chain, MAKER.ak, MAKER.trust()) for _ in range(2))
    assert one.expected[:32] == two.expected[:32] == MAKER.challenge().credential[:32]
    assert one.expected[32:] != two.expected[32:]
    assert one.blob != two.blob
    assert check_ak(MAKER.ak).name[:2] == b"\x00\x0b"


@pytest.mark.threat("E14")
def test_the_senders_word_on_the_credential_counts_for_nothing() -> None:
    own = MAKER.challenge()
    other = replace(own, credential=own.credential[:32] + b"\x01" * 32)
    refused("evidence.not_bound", MAKER.evidence(other))
    assert Challenge(own.nonce, own.public_key) == CHALLENGE
