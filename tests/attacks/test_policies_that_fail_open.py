"""A policy that omits a rule is refused; each test shows what the omission would let in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.x509 import ocsp
from cryptography.x509.oid import ExtendedKeyUsageOID

from sealring.attest.evidence import AttestedWorker, Trust, judge, parse_policy
from sealring.attest.evidence.verify import verify_evidence
from sealring.errors import AttestationError, BadPolicy, UntrustedChain
from tests.attest.minting import CHALLENGE, DAY, NOW, Holder, issue
from tests.attest.minting.amd import MEASUREMENT, TCB, Amd
from tests.attest.minting.intel import MRSIGNER, MRTD, Intel
from tests.attest.minting.nvidia import Nvidia
from tests.attest.minting.tpm import Maker, Measured
from tests.codes import coded

AMD = Amd()
SIGNER = b"\x1d" * 48
NO_LISTS = "version = 1\n[freshness]\nrequire_revocation_lists = false\n"
SNP = f"""{NO_LISTS}
[snp]
measurements = ["{MEASUREMENT.hex()}"]
minimum_tcb = {{Milan = {{bootloader = 3, tee = 0, snp = 8, microcode = 115}}}}
platform_info = {{alias_check = true}}
"""


def bad(policy: str) -> str:
    with pytest.raises(BadPolicy) as caught:
        parse_policy(policy)
    return str(caught.value)


def snp(**changes: object) -> AttestedWorker:
    evidence = AMD.evidence(AMD.report(**changes))  # type: ignore[arg-type]
    return verify_evidence(evidence, CHALLENGE, AMD.trust())


def failed(policy: str, worker: AttestedWorker) -> list[tuple[str, str]]:
    rules = judge(parse_policy(policy), worker, None).rules
    return [(rule.name, rule.refusal) for rule in rules if rule.refusal is not None]


def without(policy: str, rule: str) -> str:
    return "".join(line for line in policy.splitlines(True) if not line.startswith(rule))


@pytest.mark.threat("E17")
def test_a_host_whose_firmware_has_known_holes() -> None:
    forgetful = without(SNP, "minimum_tcb")
    said = bad(forgetful)
    assert "line 5: snp.minimum_tcb is missing: hosts pass whose firmware" in said
    assert 'unchecked = ["minimum_tcb"] in [snp]' in said
    old = Amd(tcb=dict.fromkeys(TCB, 0))
    worker = verify_evidence(old.evidence(), CHALLENGE, old.trust())
    assert ("tcb snp", "policy.tcb_too_old") in failed(SNP, worker)
    assert failed(forgetful + 'unchecked = ["minimum_tcb"]\n', worker) == []


@pytest.mark.threat("E18")
def test_a_guest_launched_before_the_hosts_firmware_was_repaired() -> None:
    worker = snp(launch_tcb=TCB | {"snp": 5})
    assert failed(SNP, worker) == [("launch tcb snp", "policy.tcb_too_old")]
    assert failed(SNP + 'unchecked = ["launch_tcb"]\n', worker) == []


@pytest.mark.threat("E18")
def test_a_report_by_a_cloud_providers_key() -> None:
    vlek = Amd(vlek=True)
    worker = verify_evidence(vlek.evidence(), CHALLENGE, vlek.trust())
    assert failed(SNP, worker) == [("vlek", "policy.guest_not_allowed")]
    assert failed(SNP + "vlek = true\n", worker) == []


@pytest.mark.threat("E18")
def test_a_host_whose_memory_was_not_checked_for_aliases() -> None:
    forgetful = without(SNP, "platform_info")
    assert "snp.platform_info is missing" in bad(forgetful)
    worker = snp(platform_info=1)
    assert failed(SNP, worker) == [("platform_alias_check", "policy.guest_not_allowed")]
    assert failed(forgetful + 'unchecked = ["platform_info"]\n', worker) == []
    # An unknown bit is refused, because it may mean anything.
    assert failed(SNP, snp(platform_info=0x25 | 1 << 40)) == [
        ("platform_unknown", "policy.guest_not_allowed")
    ]


@pytest.mark.threat("E17")
def test_an_older_image_of_the_same_signer() -> None:
    signed = SNP.replace("measurements", "signers").replace(MEASUREMENT.hex(), SIGNER.hex())
    assert "snp.guest_svn is missing: every older image that the signer signed" in bad(signed)
    old = snp(id_key=SIGNER, guest_svn=2, measurement=bytes(48))
    assert failed(signed + "guest_svn = 3\n", old) == [("guest_svn", "policy.guest_not_allowed")]
    new = snp(id_key=SIGNER, guest_svn=3, measurement=bytes(48))
    assert failed(signed + "guest_svn = 3\n", new) == []
    assert failed(signed + 'unchecked = ["guest_svn"]\n', old) == []


@pytest.mark.threat("E17")
def test_an_older_enclave_or_another_product_of_the_same_signer() -> None:
    signed = f'{NO_LISTS}[sgx]\nsigners = ["{MRSIGNER.hex()}"]\n'
    said = bad(signed)
    assert "sgx.isvsvn is missing" in said
    assert "sgx.isvprodid is missing" in said
    strict = signed + 'registers = {isvprodid = ["0007"]}\nminimum_tcb = {isvsvn = 4}\n'
    intel = Intel()
    known = intel.trust(intel.collateral("sgx"))
    worker = verify_evidence(intel.evidence("sgx"), CHALLENGE, known)
    assert failed(strict, worker) == [("tcb isvsvn", "policy.tcb_too_old")]


@pytest.mark.threat("E17")
def test_another_kernel_under_the_same_tdx_firmware() -> None:
    by_firmware = f'{NO_LISTS}[tdx]\nmeasurements = ["{MRTD.hex()}"]\n'
    said = bad(by_firmware)
    for name in ("rtmr0", "rtmr1", "rtmr2"):
        assert f"tdx.{name} is missing" in said
    intel = Intel()
    worker = verify_evidence(intel.evidence(), CHALLENGE, intel.trust())
    opened = by_firmware + 'unchecked = ["rtmr0", "rtmr1", "rtmr2"]\n'
    assert failed(opened, worker) == []
    strict = by_firmware + 'unchecked = ["rtmr0", "rtmr2"]\nregisters = {rtmr1 = ["%s"]}\n'
    assert [name for name, _ in failed(strict % ("a2" * 48), worker)] == ["rtmr1"]


@pytest.mark.threat("E17")
def test_a_boot_loader_that_extends_pcr_11_as_the_listed_image_does() -> None:
    hostile = Maker(events=(Measured(4, 0x80000003, b"hostile"), Measured(11, 13, b"image")))
    worker = verify_evidence(hostile.evidence(), hostile.challenge(), hostile.trust())
    alone = f"""{NO_LISTS}
[tpm]
roots = ["{hostile.root.fingerprint}"]
pcrs = {{11 = ["{worker.registers["pcr11"]}"]}}
"""
    said = bad(alone)
    for name in ("pcr0", "pcr4", "pcr7"):
        assert f"tpm.{name} is missing" in said
    assert failed(alone + 'unchecked = ["pcr0", "pcr4", "pcr7", "ima"]\n', worker) == []


STRICT_LISTS = SNP.replace("require_revocation_lists = false", "")


@pytest.mark.threat("E21")
def test_one_list_for_a_chain_of_several_issuers() -> None:
    maker = Maker()
    between = issue("TPM maker, 2nd level", maker.signer, ca=True)
    ek = issue(
        "endorsement key", between, ca=False, public_key=maker.ek.certificate.public_key(),
        usage=["key_encipherment"],
        extensions=[x509.ExtendedKeyUsage([x509.ObjectIdentifier("2.23.133.8.1")])],
    )  # fmt: skip
    maker.ek = ek
    chain = (ek.der, between.der, maker.signer.der, maker.root.der)
    evidence = replace(maker.evidence(), chain=chain)
    policy = (
        f'version = 1\n[tpm]\nroots = ["{maker.root.fingerprint}"]\n'
        'pcrs = {5 = ["%s"]}\nunchecked = ["pcr0", "pcr4", "pcr7", "ima"]\n' % ("00" * 32)
    )
    one = maker.trust(maker.root.revocation_list())
    worker = verify_evidence(evidence, maker.challenge(), one)
    assert failed(policy, worker) == [("revocation", "evidence.stale_revocation_list")]
    both = maker.trust(maker.root.revocation_list(), maker.signer.revocation_list())
    worker = verify_evidence(evidence, maker.challenge(), both)
    assert failed(policy, worker) == []
    named = policy.replace("[tpm]", '[freshness]\nissuers_without_lists = ["CN=TPM maker"]\n[tpm]')
    assert failed(named, verify_evidence(evidence, maker.challenge(), one)) == []


@pytest.mark.threat("E21")
def test_a_list_that_speaks_of_other_certificates_only() -> None:
    only_leaves = x509.IssuingDistributionPoint(None, None, True, False, None, False, False)
    root = AMD.root
    partial = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(root.certificate.subject)
        .last_update(NOW - DAY)
        .next_update(NOW + DAY)
        .add_extension(only_leaves, critical=True)
        .sign(root.key, SHA384())
    )
    worker = verify_evidence(AMD.evidence(), CHALLENGE, AMD.trust(partial))
    assert failed(STRICT_LISTS, worker) == [("revocation", "evidence.stale_revocation_list")]


GPU = Nvidia()
GPU_POLICY = STRICT_LISTS + "\n[nvidia]\nrequire_reference = false\n"


def gpu_trust(*answers: ocsp.OCSPResponse) -> Trust:
    lists = (
        AMD.revocation_list(),
        GPU.root.revocation_list(),
        GPU.identity.revocation_list(),
    )
    nvidia = frozenset({GPU.root.fingerprint})
    return replace(AMD.trust(*lists), nvidia=nvidia, answers=answers)


def with_gpu(trust: Trust) -> AttestedWorker:
    devices = (GPU.evidence(CHALLENGE.device_nonce("snp")),)
    return verify_evidence(AMD.evidence(devices=devices), CHALLENGE, trust)


def responder(issuer: Holder, *purposes: x509.ObjectIdentifier) -> Holder:
    usage = x509.ExtendedKeyUsage(purposes or [ExtendedKeyUsageOID.OCSP_SIGNING])
    return issue("OCSP", issuer, ca=False, usage=["digital_signature"], extensions=[usage])


@pytest.mark.threat("E21")
def test_a_gpu_whose_own_revocation_was_not_asked() -> None:
    assert failed(GPU_POLICY, with_gpu(gpu_trust())) == [
        ("revocation", "evidence.stale_revocation_list")
    ]
    for by in (None, responder(GPU.provisioner), responder(GPU.root)):
        good = GPU.provisioner.answer(GPU.boot, responder=by)
        assert failed(GPU_POLICY, with_gpu(gpu_trust(good))) == []
    named = GPU_POLICY.replace(
        "[freshness]",
        '[freshness]\nissuers_without_lists = ["CN=NVIDIA GH100 Provisioner ICA 1"]',
    )
    assert failed(named, with_gpu(gpu_trust())) == []


@pytest.mark.parametrize(
    "answer",
    [
        lambda: GPU.provisioner.answer(GPU.boot, responder=responder(Nvidia().provisioner)),
        lambda: GPU.provisioner.answer(
            GPU.boot, responder=responder(GPU.provisioner, ExtendedKeyUsageOID.SERVER_AUTH)
        ),
        lambda: GPU.provisioner.answer(GPU.boot, responder=GPU.device),
        lambda: GPU.provisioner.answer(GPU.identity),
        lambda: Nvidia().provisioner.answer(GPU.boot),
    ],
    ids=["by a stranger", "by a server", "by the device", "about another", "of a look-alike"],
)
@pytest.mark.threat("E21")
def test_an_answer_about_a_gpu_that_nvidia_did_not_give(
    answer: Callable[[], ocsp.OCSPResponse],
) -> None:
    worker = with_gpu(gpu_trust(answer()))
    assert failed(GPU_POLICY, worker) == [("revocation", "evidence.stale_revocation_list")]


@pytest.mark.parametrize("reason", [None, x509.ReasonFlags.certificate_hold])
@pytest.mark.threat("E21")
def test_a_gpu_that_nvidia_revoked_or_put_on_hold(reason: x509.ReasonFlags | None) -> None:
    gone = GPU.provisioner.answer(GPU.boot, status=ocsp.OCSPCertStatus.REVOKED, reason=reason)
    with pytest.raises(
        UntrustedChain,
        match="REVOKED to OCSP about CN=GH100",
        check=coded("evidence.chain_revoked"),
    ):
        with_gpu(gpu_trust(gone))
    older = GPU.provisioner.answer(GPU.boot, days_old=2)
    with pytest.raises(UntrustedChain, check=coded("evidence.chain_revoked")):
        with_gpu(gpu_trust(older, gone))
    unknown = GPU.provisioner.answer(GPU.boot, status=ocsp.OCSPCertStatus.UNKNOWN)
    with pytest.raises(UntrustedChain, match="UNKNOWN", check=coded("evidence.chain_revoked")):
        with_gpu(gpu_trust(unknown))


@pytest.mark.threat("E21")
def test_an_old_answer_about_a_gpu() -> None:
    late = GPU.provisioner.answer(GPU.boot, days_old=9, days_left=-1)
    with pytest.raises(
        AttestationError, match="OCSP answer", check=coded("evidence.stale_revocation_list")
    ):
        with_gpu(gpu_trust(late))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("debug = true\n", "line 9: snp.debug is not known here"),
        ('unchecked = ["measurement"]\n', "snp.unchecked names measurement; this table can leave"),
        ('unchecked = ["guest_svn"]\n', "snp.unchecked names guest_svn; this table can leave"),
        ('unchecked = ["minimum_tcb"]\n', "snp.unchecked names minimum_tcb, which is stated"),
        ("[snp.platform]\nsmt = 1\n", "line 9: snp.platform is not known here"),
        ("snp.x = 1\n", "line 9: snp.snp is not known here"),
    ],
)
@pytest.mark.threat("E20")
def test_a_key_that_is_not_known_is_refused_with_its_line(more: str, said: str) -> None:
    assert said in bad(SNP + more)
