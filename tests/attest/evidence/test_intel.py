"""TDX and SGX quotes: made by the tests, and real ones at their own dates."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from sealring.attest.evidence import (
    Challenge,
    Evidence,
    Trust,
)
from sealring.attest.evidence.intel import parse_quote, verify_quote
from sealring.attest.evidence.trust import Collateral, parse_collateral
from sealring.attest.evidence.worker import Claims
from sealring.errors import (
    AttestationError,
    ConfigurationError,
    ForgedEvidence,
    MalformedEvidence,
    PolicyRefusal,
)
from tests.attest.evidence.judging import Judge
from tests.attest.evidence.vectors import vectors
from tests.attest.minting import CHALLENGE, DAY, NOW, issue
from tests.attest.minting.intel import MRENCLAVE, MRSIGNER, MRTD, PPID, Intel, tdx_body
from tests.codes import coded

INTEL = Intel()
GOOD = INTEL.evidence()
QUOTE = GOOD.parts["quote"]
JUDGE = Judge(lambda: CHALLENGE, INTEL.trust)
verify, refused = JUDGE.verify, JUDGE.refused


def changed(quote: bytes) -> Evidence:
    return replace(GOOD, parts={"quote": quote})


def test_true_evidence_is_an_attested_worker() -> None:
    worker = verify(GOOD)
    assert (worker.label, worker.measurement) == ("tdx TDX", MRTD.hex())
    assert worker.machine == PPID.hex()
    assert worker.registers["rtmr3"] == "a3" * 48
    assert worker.tcb == {"module": 5, "evaluation": 17}
    assert worker.tcb_status == "UpToDate"
    assert {one.issuer: (worker.verified_at - one.made).days for one in worker.lists} == {
        "CN=Intel SGX Root CA": 1,
        "CN=Intel SGX PCK Platform CA": 1,
        "Intel TCB information": 1,
        "Intel QE identity": 1,
    }


def test_quotes_of_version_5_with_reports_of_tdx_1_0_and_1_5() -> None:
    body = tdx_body(CHALLENGE.report_data("tdx"))
    for quote in (INTEL.quote(body, 5), INTEL.quote(body + b"\x05" + bytes(15 + 48))):
        worker = verify(changed(quote))
        assert worker.measurement == MRTD.hex()
        assert worker.registers["rtmr3"] == "a3" * 48
        for at in (48, 50, 54 + 136, 54 + 520):
            bent = quote[:at] + bytes([quote[at] ^ 2]) + quote[at + 1 :]
            with pytest.raises((ForgedEvidence, MalformedEvidence)):
                verify(changed(bent))


def test_an_enclave_too() -> None:
    worker = verify(INTEL.evidence("sgx"), INTEL.trust(INTEL.collateral("sgx")))
    assert (worker.measurement, worker.signer) == (MRENCLAVE.hex(), MRSIGNER.hex())
    assert worker.tcb == {"isvsvn": 3, "evaluation": 17}


@pytest.mark.threat("E1")
def test_no_byte_of_the_quote_can_be_changed() -> None:
    for at in range(0, len(QUOTE), 41):
        bent = QUOTE[:at] + bytes([QUOTE[at] ^ 0x08]) + QUOTE[at + 1 :]
        with pytest.raises(AttestationError):
            verify(changed(bent))
    for at in range(48, 48 + 584, 24):
        bent = QUOTE[:at] + bytes([QUOTE[at] ^ 0x02]) + QUOTE[at + 1 :]
        refused("evidence.forged_evidence", changed(bent))


@pytest.mark.threat("E1")
def test_cut_and_extended_quotes() -> None:
    for bent in (QUOTE[:-1], QUOTE[:700], QUOTE[:30], QUOTE + b"\0"):
        refused("evidence.malformed_evidence", changed(bent))
    refused("evidence.malformed_evidence", replace(GOOD, chain=(INTEL.root.der,)))


def test_unknown_versions_and_the_other_tee() -> None:
    refused("evidence.unknown_evidence", changed(b"\x06" + QUOTE[1:]))
    sgx = INTEL.evidence("sgx")
    refused("evidence.unknown_evidence", changed(sgx.parts["quote"]))


@pytest.mark.threat("E16")
def test_debug_and_migratable_guests() -> None:
    refused("policy.debug_guest", INTEL.evidence(attributes=1 << 28 | 1))
    known = INTEL.trust(INTEL.collateral("sgx"))
    refused("policy.debug_guest", INTEL.evidence("sgx", flags=7), known)
    refused("policy.guest_not_allowed", INTEL.evidence(attributes=1 << 28 | 1 << 29))


@pytest.mark.threat("E14")
def test_an_old_nonce_and_another_workers_key() -> None:
    for other in (Challenge(bytes(32), b"a worker's public key"), Challenge(CHALLENGE.nonce, b"x")):
        refused("evidence.not_bound", replace(INTEL.evidence(challenge=other), challenge=CHALLENGE))


@pytest.mark.threat("E12")
def test_a_look_alike_chain() -> None:
    alike = Intel()
    refused("evidence.untrusted_chain", alike.evidence())
    mine = INTEL.quote(tdx_body(CHALLENGE.report_data("tdx")))
    assert verify(changed(mine)).tcb_status == "UpToDate"
    spliced = alike.quote(tdx_body(CHALLENGE.report_data("tdx")))
    at, to = mine.index(b"-----BEGIN"), spliced.index(b"-----BEGIN")
    if len(mine) - at == len(spliced) - to:
        refused("evidence.forged_evidence", changed(spliced[:to] + mine[at:]))


def test_dates_and_revocation() -> None:
    late = NOW + 101 * DAY
    fresh = INTEL.collateral(days_left=200)
    refused("evidence.chain_expired", GOOD, INTEL.trust(fresh, now=late))
    for gone in (INTEL.pck, INTEL.platform, INTEL.tcb_signer):
        known = INTEL.trust(INTEL.collateral(revoked=(gone,)))
        refused("evidence.chain_revoked", GOOD, known)


@pytest.mark.threat("E10")
def test_collateral_that_is_stale_missing_forged_or_anothers() -> None:
    refused("evidence.stale_revocation_list", GOOD, INTEL.trust(now=NOW + 11 * DAY))
    refused("evidence.stale_revocation_list", GOOD, INTEL.trust(now=NOW - 2 * DAY))
    refused("evidence.stale_revocation_list", GOOD, INTEL.trust(INTEL.collateral("sgx")))
    stranger = issue("Intel SGX TCB Signing", None, ca=False, curve=ec.SECP256R1())
    # The verifier's own file is at fault, not the worker.
    refused("evidence.bad_collateral", GOOD, INTEL.trust(INTEL.collateral(signer=stranger)))
    # Another Intel's lists and statements are not those of ours.
    refused("evidence.bad_collateral", GOOD, INTEL.trust(Intel().collateral()))
    good = INTEL.collateral()
    for name in ("tcb_info_signature", "qe_identity_signature", "pck_crl", "root_ca_crl"):
        fields = json.loads(good.text)
        fields[name] = fields[name][:-1] + ("0" if fields[name][-1] != "0" else "1")
        refused(
            "evidence.bad_collateral", GOOD, INTEL.trust(replace(good, text=json.dumps(fields)))
        )


CHAINS = ("pck_crl_issuer_chain", "tcb_info_issuer_chain", "qe_identity_issuer_chain")
SPELLINGS: dict[str, Callable[[str], str]] = {
    "no last newline": str.rstrip,
    "two last newlines": lambda pem: pem + "\n",
    "CRLF": lambda pem: pem.replace("\n", "\r\n"),
    "words before": lambda pem: "Intel's\n" + pem,
}


def respelled(text: str, change: Callable[[str], str]) -> Collateral:
    fields = json.loads(text)
    assert all(change(fields[name]) != fields[name] for name in CHAINS)
    return parse_collateral(json.dumps(fields | {name: change(fields[name]) for name in CHAINS}))


@pytest.mark.parametrize("name", list(SPELLINGS))
@pytest.mark.threat("E10")
def test_intels_collateral_with_its_certificates_in_another_spelling(name: str) -> None:
    good, change = INTEL.collateral(), SPELLINGS[name]
    assert respelled(good.text, change).text == good.text
    assert verify(GOOD, INTEL.trust(respelled(good.text, change))).tcb_status == "UpToDate"
    # Certificates of another Intel are refused in any spelling.
    forged = respelled(Intel().collateral().text, change)
    refused("evidence.bad_collateral", GOOD, INTEL.trust(forged))


@pytest.mark.parametrize("name", list(SPELLINGS))
def test_real_collateral_with_its_certificates_in_another_spelling(name: str) -> None:
    quote, collateral = real("tdx_quote")
    assert check(quote, "tdx", respelled(collateral.text, SPELLINGS[name])).tcb_status == "UpToDate"


@pytest.mark.parametrize(
    "pem", ["", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
def test_collateral_without_readable_certificates_is_no_collateral(pem: str) -> None:
    for name in CHAINS:
        fields = json.loads(INTEL.collateral().text) | {name: pem}
        with pytest.raises(ConfigurationError, match="not Intel collateral"):
            parse_collateral(json.dumps(fields))


def test_a_quote_of_a_guest_with_a_service_td_is_true_and_not_admitted() -> None:
    """For example, a migration service can read such a guest's memory."""
    bound = CHALLENGE.report_data("tdx")
    body = tdx_body(bound)
    served = body + body[:16] + b"\x01" * 48
    refused(
        "policy.guest_not_allowed", Evidence("tdx", CHALLENGE, {"quote": INTEL.quote(served)}, ())
    )
    alone = body + body[:16] + bytes(48)
    verify(Evidence("tdx", CHALLENGE, {"quote": INTEL.quote(alone)}, ()))


def test_the_newest_collateral_is_used() -> None:
    old = INTEL.collateral(status="OutOfDate", days_left=2)
    worker = verify(GOOD, INTEL.trust(old, INTEL.collateral()))
    assert worker.tcb_status == "UpToDate"


@pytest.mark.threat("E16")
def test_a_tcb_that_intel_does_not_list() -> None:
    refused("policy.tcb_too_old", GOOD, INTEL.trust(INTEL.collateral(least=6)))
    worker = verify(GOOD, INTEL.trust(INTEL.collateral(status="OutOfDate")))
    assert worker.tcb_status == "OutOfDate"


def test_collateral_that_was_fetched_for_another_machine_of_the_family() -> None:
    fetched = INTEL.trust(INTEL.collateral(with_pck=True))
    second = INTEL.another(b"second machine..")
    assert verify(GOOD, fetched).machine == PPID.hex()
    assert verify(second.evidence(), fetched).machine == b"second machine..".hex()
    gone = INTEL.trust(INTEL.collateral(with_pck=True, revoked=(second.pck,)))
    assert verify(GOOD, gone).tcb_status == "UpToDate"
    refused("evidence.chain_revoked", second.evidence(), gone)


def test_a_file_that_is_no_collateral() -> None:
    for text in ("", "{}", "[]", '{"tcb_info": "{}"}'):
        with pytest.raises(ConfigurationError):
            parse_collateral(text)


def test_without_dcap_qvl_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dcap_qvl", None)
    with pytest.raises(
        ConfigurationError, match=r"sealring\[tdx\]", check=coded("configuration.missing_extra")
    ):
        verify(GOOD)


def real(name: str) -> tuple[bytes, Collateral]:
    folder = vectors("tdx")
    raw = (folder / name).read_bytes()
    # Some files have zeros after the quote. A worker sends only the quote.
    end = parse_quote(raw).end
    quote, filling = raw[:end], raw[end:]
    assert not any(filling)
    return quote, parse_collateral((folder / f"{name}_collateral.json").read_text())


def check(raw: bytes, kind: str, collateral: Collateral, now: datetime | None = None) -> Claims:
    when = now or max(one.made for one in collateral.statements)
    return verify_quote(raw, kind, Trust(when, collateral=(collateral,)))[0]


def test_real_quotes_verify_at_their_own_dates() -> None:
    tdx = check(*_kind("tdx_quote", "tdx"))
    assert (tdx.tcb_status, tdx.advisories) == ("UpToDate", ())
    sgx = check(*_kind("sgx_quote", "sgx"))
    assert sgx.tcb_status == "ConfigurationAndSWHardeningNeeded"
    assert "INTEL-SA-00289" in sgx.advisories
    with pytest.raises(PolicyRefusal, check=coded("policy.tcb_too_old")):
        check(*_kind("tdx_quote_outdated", "tdx"))


def test_real_collateral_of_one_machine_fits_the_familys_others() -> None:
    folder = vectors("tdx")
    padded = bytes(json.loads((folder / "near_quote.json").read_text()))
    quote = padded[: parse_quote(padded).end]
    fields = json.loads((folder / "near_collateral.json").read_text())
    other, _ = real("tdx_quote")
    chain = parse_quote(other).certificates.decode().removesuffix("\0")
    for shown in (fields["pck_certificate_chain"], chain):
        known = parse_collateral(json.dumps(fields | {"pck_certificate_chain": shown}))
        one, another = (check(raw, "tdx", known) for raw in (quote, other))
        assert (one.tcb_status, another.tcb_status) == ("UpToDate", "OutOfDate")
        assert one.machine != another.machine


def _kind(name: str, kind: str) -> tuple[bytes, str, Collateral]:
    raw, collateral = real(name)
    return raw, kind, collateral


HEADER = (0, 2, 4, 8, 10, 12, 28)
TD_REPORT = (0, 16, 64, 112, 120, 128, 136, 184, 232, 280, 328, 376, 424, 472, 520)
ENCLAVE_REPORT = (0, 16, 20, 48, 64, 96, 128, 160, 256, 258, 260, 320)


@pytest.mark.parametrize(("name", "kind"), [("tdx_quote", "tdx"), ("sgx_quote", "sgx")])
@pytest.mark.threat("E1")
def test_every_field_of_a_real_quote_changed_in_turn(name: str, kind: str) -> None:
    raw, collateral = real(name)
    body, end = (TD_REPORT, 48 + 584) if kind == "tdx" else (ENCLAVE_REPORT, 48 + 384)
    # After the body: a length, the signature, the key, and (TDX) type and length of the rest.
    after = [end, end + 4, end + 68, *([end + 132, end + 134] if kind == "tdx" else [])]
    qe = end + (138 if kind == "tdx" else 132)
    behind = [qe + 384, qe + 448, qe + 450, qe + 482, qe + 484, qe + 488]
    fields = [*HEADER, *(48 + at for at in body), *after, *(qe + at for at in ENCLAVE_REPORT)]
    for at in [*fields, *behind]:
        bent = raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]
        with pytest.raises(AttestationError):
            check(bent, kind, collateral)


@pytest.mark.parametrize(("name", "kind"), [("tdx_quote", "tdx"), ("sgx_quote", "sgx")])
@pytest.mark.threat("E1")
def test_their_broken_variants_do_not(name: str, kind: str) -> None:
    raw, collateral = real(name)
    for at in range(0, len(raw), 37):
        bent = raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :]
        with pytest.raises(AttestationError):
            check(bent, kind, collateral)
    for bent in (raw[:-1], raw + b"\0"):
        with pytest.raises(MalformedEvidence):
            check(bent, kind, collateral)
    with pytest.raises(AttestationError, check=coded("evidence.stale_revocation_list")):
        check(raw, kind, collateral, datetime(2030, 1, 1, tzinfo=UTC))
    fields = json.loads(collateral.text)
    fields["tcb_info"] = fields["tcb_info"].replace("OutOfDate", "UpToDate")
    with pytest.raises(AttestationError, check=coded("evidence.bad_collateral")):
        check(raw, kind, parse_collateral(json.dumps(fields)))
