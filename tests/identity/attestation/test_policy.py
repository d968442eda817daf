"""SIMULATED evidence, and what a policy admits, refuses and says of its own mistakes."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from sealring.errors import (
    AttestationError,
    BadPolicy,
    ChainExpired,
    DebugGuest,
    ForgedEvidence,
    GuestNotAllowed,
    KindNotAllowed,
    MalformedEvidence,
    MeasurementNotAllowed,
    NotBound,
    RankNotAllowed,
    StaleRevocationList,
    TcbTooOld,
    UntrustedChain,
)
from sealring.identity.attestation import AttestedWorker, Challenge, Trust, judge, parse_policy
from sealring.identity.attestation.simulated import Simulator
from sealring.identity.attestation.verify import verify_evidence
from tests.identity.attestation.minting import CHALLENGE, DAY, MEASUREMENT, NOW, PLAIN_POLICY, Amd

AMD = Amd()
SIMULATOR = Simulator.create(NOW)
TRUST = Trust(NOW, simulated=frozenset({SIMULATOR.fingerprint}))
POLICY = f"""\
version = 1
rejoins = 3

[freshness]
revocation_list_days = 7

[snp]
measurements = ["{MEASUREMENT.hex()}"]
products = ["Milan"]
minimum_tcb = {{snp = 8, microcode = 100}}

[simulated]
roots = ["{SIMULATOR.fingerprint}"]
measurements = ["abcd"]
minimum_tcb = {{simulated = 1}}

[[ranks]]
ranks = "0-3"
kinds = ["snp"]

[[ranks]]
ranks = "4"
kinds = ["snp", "simulated"]
"""
ONLY_SNP = POLICY[: POLICY.index("[simulated]")]


def snp(days_old: int = 1, **changes: object) -> AttestedWorker:
    evidence = AMD.evidence(AMD.report(**changes))  # type: ignore[arg-type]
    return verify_evidence(evidence, CHALLENGE, AMD.trust(AMD.revocation_list(days_old=days_old)))


def simulated(measurement: bytes = b"\xab\xcd", **changes: object) -> AttestedWorker:
    evidence = SIMULATOR.attest(CHALLENGE, measurement, **changes)  # type: ignore[arg-type]
    return verify_evidence(evidence, CHALLENGE, TRUST)


def refused(error: type[AttestationError], worker: AttestedWorker, rank: int = 4) -> str:
    verdict = judge(parse_policy(POLICY), worker, rank)
    assert not verdict.admitted
    with pytest.raises(AttestationError) as caught:
        verdict.require()
    assert type(caught.value) is error
    return str(caught.value)


def test_what_the_policy_describes_is_admitted() -> None:
    policy = parse_policy(POLICY)
    for worker, rank in ((snp(), 0), (snp(), 4), (simulated(), 4), (simulated(), None)):
        verdict = judge(policy, worker, rank)
        verdict.require()
        assert verdict.admitted
    assert (policy.rejoins, policy.revocation_list_days, policy.nonce_seconds) == (3, 7, 120)


def test_what_it_does_not_describe_is_refused() -> None:
    refused(DebugGuest, snp(policy=PLAIN_POLICY | 1 << 19))
    refused(DebugGuest, simulated(debug=True))
    refused(MeasurementNotAllowed, snp(measurement=bytes(48)))
    refused(MeasurementNotAllowed, simulated(b"\xab"))
    refused(GuestNotAllowed, snp(vmpl=1))
    refused(GuestNotAllowed, snp(policy=PLAIN_POLICY | 1 << 18))
    refused(TcbTooOld, simulated(tcb=0))
    refused(RankNotAllowed, simulated(), 3)
    refused(RankNotAllowed, snp(), 5)
    refused(StaleRevocationList, snp(days_old=8))


def test_a_tcb_below_the_minimum_and_another_product() -> None:
    tcb = {"bootloader": 3, "tee": 0, "snp": 7, "microcode": 99}
    old = Amd("Genoa", tcb=tcb)
    worker = verify_evidence(old.evidence(), CHALLENGE, old.trust(old.revocation_list()))
    said = refused(GuestNotAllowed, worker)
    assert "tcb snp: 7, not at least 8; tcb microcode: 99, not at least 100" in said


def test_revocation_lists_are_needed_unless_the_policy_says_otherwise() -> None:
    worker = verify_evidence(AMD.evidence(), CHALLENGE, AMD.trust())
    refused(StaleRevocationList, worker)
    relaxed = POLICY.replace("[freshness]", "[freshness]\nrequire_revocation_lists = false")
    assert judge(parse_policy(relaxed), worker, 0).admitted


def test_simulated_evidence_needs_to_be_named_and_says_so_everywhere() -> None:
    worker = simulated()
    with pytest.raises(KindNotAllowed, match="SIMULATED"):
        judge(parse_policy(ONLY_SNP), worker, None).require()
    assert worker.label == "SIMULATED"
    assert worker.as_json()["kind"] == "SIMULATED"
    assert "SIMULATED" in SIMULATOR.certificate.subject.rfc4514_string()
    assert parse_policy(ONLY_SNP).simulated_roots == frozenset()


def test_simulated_evidence_is_held_to_the_same() -> None:
    good = SIMULATOR.attest(CHALLENGE, b"\xab\xcd")
    other = SIMULATOR.attest(Challenge(bytes(32), CHALLENGE.public_key), b"\xab\xcd")
    cut = {**good.parts, "statement": good.parts["statement"][:-1]}
    nothing = {"statement": b"{}", "signature": SIMULATOR.key.sign(b"{}")}
    for error, evidence, trust in (
        (UntrustedChain, Simulator.create(NOW).attest(CHALLENGE, b"\xab\xcd"), TRUST),
        (UntrustedChain, good, Trust(NOW)),
        (ForgedEvidence, replace(good, parts=cut), TRUST),
        (MalformedEvidence, replace(good, parts=nothing), TRUST),
        (NotBound, other, TRUST),
        (ChainExpired, good, replace(TRUST, now=NOW + 31 * DAY)),
        (ChainExpired, good, replace(TRUST, now=NOW - timedelta(hours=1))),
    ):
        with pytest.raises(error) as caught:
            verify_evidence(evidence, CHALLENGE, trust)
        assert type(caught.value) is error


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("version = 1", "version = 2", "line 1: version is 1"),
        ("rejoins = 3", "rejoin = 3", "line 2: rejoin is not known here"),
        ("rejoins = 3", "rejoins = -1", "line 2: rejoins is a number from 0 to 1000"),
        ("_days = 7", "_days = true", "line 5: freshness.revocation_list_days is a number"),
        ('["Milan"]', '["Rome"]', "line 9: snp.products is a list of Genoa, Milan, Turin"),
        (MEASUREMENT.hex(), "5A", "line 8: snp.measurements is a list of lower-case hexadecimal"),
        ("snp = 8", "snp = 800", "line 10: snp.minimum_tcb.snp is a number from 0 to 255"),
        ("snp = 8", "psp = 8", "line 10: snp.minimum_tcb.psp is not known here"),
        ('["abcd"]', "[]", "line 14: simulated.measurements is empty or missing"),
        ('roots = ["', 'root = ["', "line 13: simulated.root is not known here"),
        ('"0-3"', '"3-0"', "ranks.ranks is"),
        ('kinds = ["snp"]', 'kinds = ["tdx"]', "ranks.kinds is a list of kinds that this policy"),
        ("[snp]", "[snp", "the policy is not TOML"),
        ("[snp]", "debug = true\n[snp]", "freshness.debug is not known here"),
    ],
)
def test_a_mistake_in_the_policy_is_named_with_its_line(old: str, new: str, said: str) -> None:
    assert old in POLICY
    with pytest.raises(BadPolicy) as caught:
        parse_policy(POLICY.replace(old, new, 1))
    assert said in str(caught.value)


def test_a_policy_that_admits_nothing_is_a_mistake() -> None:
    with pytest.raises(BadPolicy, match="admits nothing"):
        parse_policy("version = 1")
