"""A policy that `policy new` writes from evidence admits that evidence, for all real evidence."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from typer.testing import CliRunner, Result

from sealring.attest.evidence import Evidence, Trust, describe_evidence, judge, parse_policy
from sealring.attest.evidence.agent_evidence import devices_of, evidence_of
from sealring.attest.evidence.az_vtpm import canonical_hcl_report, parse_hcl_report
from sealring.attest.evidence.chains import VerifiedChain, check_issued, load_certificate
from sealring.attest.evidence.evidence import DeviceEvidence
from sealring.attest.evidence.intel import canonical_quote
from sealring.attest.evidence.policy import check_admits, explain, new_policy, tables_from
from sealring.attest.evidence.snp import (
    canonical_report,
    check_report_signature,
    claims_of,
    parse_report,
)
from sealring.attest.evidence.tpm.verify import registers, verify_quote
from sealring.attest.evidence.worker import DescribedWorker, shown
from sealring.cli import app
from sealring.errors import named
from tests.attest.evidence.vectors import vectors
from tests.attest.minting import CHALLENGE
from tests.attest.minting.amd import PLAIN_POLICY, TCB, Amd
from tests.attest.minting.intel import Intel
from tests.attest.minting.nvidia import Nvidia
from tests.attest.minting.tpm import AzureGuest, Maker

# Every file of evidence, and the other files in its folder. A new file must be added here.
EVIDENCE = {
    "snp": {"attestation.bin", "report_milan.hex", "snp_test-report.bin", "turin_report.bin"},
    "tdx": {
        "tdx_quote", "sgx_quote", "tdx_quote_outdated", "near_quote.json", "tdx-quote.hex",
        "cos-113-tdx-quote.dat",
    },
    "vtpm-snp": {"az-snp-vtpm_evidence-v2.json", "az-snp-vtpm_evidence-genoa.json"},
    "vtpm-tdx": {"evidence-v0.json", "td-quote.bin", "hcl-report.bin"},
    "nvidia": {
        "gpu_evidence.json", "hgx-4-switches.json", "hopperAttestationReport.txt",
        "coco-hopper-report.txt", "hopperAttestationReportInvalidSignature.txt",
    },
}  # fmt: skip
BESIDE = {
    "snp": {
        "milan.testcer", "vcek.testcer", "vcek_milan.der", "cert_chain_milan", "snp_test-vcek.der",
        "milan3.pem", "turin_vcek.der", "turin_ask.der",
    },
    "tdx": {
        "near_collateral.json", "sgx_quote_collateral.json", "tdx_quote_collateral.json",
        "tdx_quote_outdated_collateral.json", "pckcrl", "rootcrl.der", "trusted_root.pem",
        "sample_qeIdentity_response", "sample_tcbInfo_response",
    },
    "vtpm-snp": set(),
    "vtpm-tdx": set(),
    "nvidia": {
        "hopperCertChain.txt", "coco-hopper-certs.txt", "rim_root.crt",
        "1010_0200_882_96005E0001_test_no_gpu.swidtag", "Driver_RIM_test_no_gpu.swidtag",
        "incorrect_signature_driver_rim.xml",
    },
}  # fmt: skip


@pytest.mark.parametrize("folder", list(EVIDENCE))
def test_no_real_evidence_is_left_out_here(folder: str) -> None:
    found = {path.name for path in vectors(folder).iterdir()}
    assert found == EVIDENCE[folder] | BESIDE[folder]


class Written:
    """`policy new` from one machine's evidence, then `policy check` of both, as typed by a user."""

    def __init__(
        self, folder: Path, evidence: Evidence, at: str, collateral: Iterable[str] = ()
    ) -> None:
        self._folder, self._at = folder, at
        (folder / "cache").mkdir()
        for name in collateral:
            (folder / "cache" / name).write_bytes((vectors("tdx") / name).read_bytes())
        (folder / "evidence.json").write_bytes(evidence.encode())
        self.made = self._run("new", "--evidence", "evidence.json", "--out", "policy.toml")

    def _run(self, *arguments: str) -> Result:
        paths = [str(self._folder / one) if "." in one else one for one in arguments]
        cache = ("--cache", str(self._folder / "cache"))
        return CliRunner().invoke(app, ["policy", *paths, *cache, "--at", self._at])

    def refused(self) -> list[str]:
        """The rules by which the policy refuses the evidence that it was written from."""
        assert self.made.exit_code == 0, self.made.exception
        done = self._run("check", "policy.toml", "evidence.json", "--without-binding", "--json")
        rules = json.loads(done.stdout)["rules"]
        assert rules
        return [rule["rule"] for rule in rules if not rule["passed"]]


def pem_ders(path: Path) -> tuple[bytes, ...]:
    found = x509.load_pem_x509_certificates(path.read_bytes())
    return tuple(one.public_bytes(Encoding.DER) for one in found)


def snp(report: str, leaf: str, chain: str, devices: tuple[DeviceEvidence, ...] = ()) -> Evidence:
    folder = vectors("snp")
    raw = (folder / report).read_bytes()
    raw = bytes.fromhex(raw.decode()) if report.endswith(".hex") else raw
    whole = ((folder / leaf).read_bytes(), *pem_ders(folder / chain)[:2])
    return Evidence("snp", CHALLENGE, {"report": canonical_report(raw)}, whole, devices)


def quote(name: str) -> bytes:
    raw = (vectors("tdx") / name).read_bytes()
    if name.endswith(".json"):
        raw = bytes(json.loads(raw))
    elif name.endswith(".hex"):
        raw = bytes.fromhex(raw.decode().strip().removeprefix("0x"))
    return canonical_quote(raw)


def intel(kind: str, name: str) -> Evidence:
    return Evidence(kind, CHALLENGE, {"quote": quote(name)}, ())


@pytest.mark.parametrize(
    "files",
    [
        ("report_milan.hex", "vcek_milan.der", "cert_chain_milan"),
        ("snp_test-report.bin", "snp_test-vcek.der", "milan3.pem"),
    ],
)
def test_snp(tmp_path: Path, files: tuple[str, str, str]) -> None:
    written = Written(tmp_path, snp(*files), "2024-01-01")
    # The verifier must get AMD's revocation list itself. It is missing, and the error names it.
    assert written.refused() == ["revocation"]
    assert "NOT AT HAND revocation: no list; none of CN=ARK-Milan" in written.made.stderr


def test_a_debug_guest_gets_no_policy_that_would_refuse_it(tmp_path: Path) -> None:
    evidence = snp("attestation.bin", "vcek.testcer", "milan.testcer")
    made = Written(tmp_path, evidence, "2024-01-01").made
    assert named(made.exception) == "policy.debug_guest"
    assert "no policy can be written from" in str(made.exception)
    assert not (tmp_path / "policy.toml").exists()


@pytest.mark.parametrize(
    ("kind", "name", "at", "collateral"),
    [
        ("tdx", "tdx_quote", "2025-06-20", "tdx_quote_collateral.json"),
        ("tdx", "tdx_quote", "2026-08-14", "near_collateral.json"),
        ("tdx", "near_quote.json", "2026-08-14", "near_collateral.json"),
        ("sgx", "sgx_quote", "2025-06-20", "sgx_quote_collateral.json"),
    ],
)
def test_tdx_and_sgx(tmp_path: Path, kind: str, name: str, at: str, collateral: str) -> None:
    assert Written(tmp_path, intel(kind, name), at, [collateral]).refused() == []


@pytest.mark.parametrize(
    ("name", "collateral", "error"),
    [
        ("tdx_quote_outdated", ["tdx_quote_outdated_collateral.json"], "policy.tcb_too_old"),
        ("cos-113-tdx-quote.dat", [], "evidence.stale_revocation_list"),
        ("tdx-quote.hex", [], "evidence.stale_revocation_list"),
    ],
)
def test_tdx_machines_of_which_nothing_can_be_said_get_no_policy(
    tmp_path: Path, name: str, collateral: list[str], error: str
) -> None:
    made = Written(tmp_path, intel("tdx", name), "2026-02-19", collateral).made
    assert named(made.exception) == error


def test_azure_snp(tmp_path: Path) -> None:
    given = json.loads((vectors("vtpm-snp") / "az-snp-vtpm_evidence-v2.json").read_bytes())
    issuers = pem_ders(vectors("snp") / "milan.testcer")[:2]
    evidence = evidence_of("az-snp-vtpm", given, CHALLENGE, (), issuers)
    assert Written(tmp_path, evidence, "2025-06-01").refused() == ["revocation"]


def test_azure_tdx_lacks_intels_collateral(tmp_path: Path) -> None:
    fields = json.loads((vectors("vtpm-tdx") / "evidence-v0.json").read_bytes())
    for name, key in (("td-quote.bin", "td_quote"), ("hcl-report.bin", "hcl_report")):
        assert (vectors("vtpm-tdx") / name).read_bytes() == bytes(fields[key])
    padded, message = bytes(fields["td_quote"]), fields["tpm_quote"]
    parts = {
        "hcl_report": canonical_hcl_report(bytes(fields["hcl_report"])),
        "td_quote": canonical_quote(padded),
        "quote": bytes(message["message"]),
        "signature": bytes.fromhex("0014000b0100") + bytes(message["signature"]),
        "pcrs": b"".join(map(bytes, message["pcrs"])),
    }
    made = Written(tmp_path, Evidence("az-tdx-vtpm", CHALLENGE, parts, ()), "2025-06-01").made
    assert named(made.exception) == "evidence.stale_revocation_list"


def hex_device(report: str, chain: str) -> tuple[DeviceEvidence, ...]:
    folder = vectors("nvidia")
    listed = [
        {
            "evidence": (folder / report).read_text().strip(),
            "certificate": base64.b64encode((folder / chain).read_bytes()).decode(),
        }
    ]
    return devices_of(json.dumps({"nvidia": {"device_evidence_list": listed}}))


def hgx() -> tuple[DeviceEvidence, ...]:
    listed = []
    for name in ("gpu_evidence.json", "hgx-4-switches.json"):
        listed += json.loads((vectors("nvidia") / name).read_bytes())
    return devices_of(json.dumps({"nvidia": {"device_evidence_list": listed}}))


@pytest.mark.parametrize(
    ("devices", "gpus", "switches", "at"),
    [
        ("hgx", 8, 4, "2024-06-01"),
        ("hopper", 1, 0, "2024-06-01"),
        ("coco", 1, 0, "2024-06-01"),
    ],
)
def test_nvidia(tmp_path: Path, devices: str, gpus: int, switches: int, at: str) -> None:
    shown = {
        "hgx": hgx,
        "hopper": lambda: hex_device("hopperAttestationReport.txt", "hopperCertChain.txt"),
        "coco": lambda: hex_device("coco-hopper-report.txt", "coco-hopper-certs.txt"),
    }[devices]()
    machine = snp("report_milan.hex", "vcek_milan.der", "cert_chain_milan", shown)
    written = Written(tmp_path, machine, at)
    # References and lists are the verifier's to get. Everything about the devices passes.
    others = {rule for rule in written.refused() if not rule.endswith(" measurements")}
    assert others == {"revocation"}
    assert "no reference for the vbios" in written.made.stderr
    rules = parse_policy((tmp_path / "policy.toml").read_text()).devices
    assert rules is not None
    assert (rules["gpus"], rules["switches"]) == (gpus, switches)


def test_the_gpus_of_a_real_machine_without_its_switches_get_no_policy(tmp_path: Path) -> None:
    machine = snp("report_milan.hex", "vcek_milan.der", "cert_chain_milan", hgx()[:8])
    made = Written(tmp_path, machine, "2024-06-01").made
    assert "protected PCIe" in str(made.exception)


# AMD's roots for Turin and Genoa are not here, so these reports are verified with their own keys.


def admitted(worker: DescribedWorker) -> DescribedWorker:
    policy = parse_policy(new_policy(None, tables_from([worker], {})))
    assert {rule.name for rule in check_admits(policy, worker)} <= {"revocation"}
    return worker


def under_key(raw: bytes, leaf: bytes, product: str) -> DescribedWorker:
    report, key = parse_report(raw), load_certificate(leaf)
    check_report_signature(report, key)
    end = key.not_valid_after_utc
    claims = claims_of(report, VerifiedChain((key,), "", end, (), ()), product)
    now = datetime(2025, 6, 1, tzinfo=UTC)
    return DescribedWorker(**shown(claims, "snp", (), now))


def test_a_real_turin_which_sets_a_bit_that_has_no_name() -> None:
    folder = vectors("snp")
    leaf, ask = ((folder / name).read_bytes() for name in ("turin_vcek.der", "turin_ask.der"))
    check_issued(leaf, load_certificate(leaf), load_certificate(ask))
    worker = admitted(under_key((folder / "turin_report.bin").read_bytes(), leaf, "Turin"))
    assert worker.guest["platform_unknown"] == 1 << 6


def test_a_real_genoa_of_azure() -> None:
    fields = json.loads((vectors("vtpm-snp") / "az-snp-vtpm_evidence-genoa.json").read_bytes())
    hcl = parse_hcl_report(bytes(fields["report"]))
    leaf = base64.b64decode("".join(fields["vcek"].strip().splitlines()[1:-1]))
    worker = under_key(hcl.report, leaf, "Genoa")
    assert parse_report(hcl.report).report_data == hcl.bound
    quoted = fields["quote"]
    signature = bytes.fromhex("0014000b0100") + bytes(quoted["signature"])
    values = b"".join(map(bytes, quoted["pcrs"]))
    _, pcrs = verify_quote(bytes(quoted["message"]), signature, hcl.key, values)
    guest = {**worker.guest, "insecure_boot": int(not hcl.secure_boot)}
    booted = {**worker.registers, **registers(pcrs)}
    admitted(replace(worker, kind="az-snp-vtpm", registers=booted, guest=guest))


# Evidence made by the tests, where there is no real evidence.


def policy_for(*workers: DescribedWorker) -> str:
    return new_policy(None, tables_from(workers, {}))


@pytest.mark.threat("E19")
def test_unknown_bits_of_the_platform_are_refused_unless_the_policy_numbers_them() -> None:
    amd = Amd("Turin", tcb=TCB | {"fmc": 7})
    trust = amd.trust(amd.revocation_list())

    def worker(info: int) -> DescribedWorker:
        return describe_evidence(amd.evidence(amd.report(platform_info=info)), trust)

    text = policy_for(worker(0x65))
    assert "other_bits = [6]" in text

    def refused(text: str, info: int) -> list[str]:
        rules = judge(parse_policy(text), worker(info), None).rules
        return [f"{one.name}: {one.found}, not {one.wanted}" for one in rules if one.refusal]

    assert refused(text, 0x65) == refused(text, 0x25) == []
    unknown = "platform_unknown: bits 6 9, not at most bits 6"
    assert refused(text, 0x265) == [unknown]
    strict = text.replace(", other_bits = [6]", "")
    assert refused(strict, 0x65) == ["platform_unknown: bits 6, not at most no bits"]
    # A policy that was written from machines that differ in such a bit admits all of them.
    both = policy_for(worker(0x25), worker(0x65))
    assert refused(both, 0x25) == refused(both, 0x65) == []


AMD, MAKER, INTEL = Amd(), Maker(), Intel()
VLEK = Amd(vlek=True)
MACHINES: dict[str, tuple[Evidence, Trust]] = {
    "vmpl": (AMD.evidence(AMD.report(vmpl=2)), AMD.trust(AMD.revocation_list())),
    "migration": (
        AMD.evidence(AMD.report(policy=PLAIN_POLICY | 1 << 18)),
        AMD.trust(AMD.revocation_list()),
    ),
    "vlek": (VLEK.evidence(), VLEK.trust(VLEK.revocation_list())),
    "secure_boot": (
        AzureGuest(AMD, secure_boot=False).evidence(),
        AMD.trust(AMD.revocation_list()),
    ),
    "pcr4": (MAKER.evidence(pcrs=(0, 7)), MAKER.trust(MAKER.root.revocation_list())),
    "tcb_status": (INTEL.evidence(), INTEL.trust(INTEL.collateral(status="OutOfDate"))),
}


@pytest.mark.parametrize("weakness", list(MACHINES))
def test_a_policy_admits_a_weak_machine_and_names_its_weakness(weakness: str) -> None:
    evidence, trust = MACHINES[weakness]
    worker = describe_evidence(evidence, trust)
    roots = {"tpm": [MAKER.root.fingerprint]} if evidence.kind == "tpm" else {}
    policy = parse_policy(new_policy(None, tables_from([worker], roots)))
    assert check_admits(policy, worker) == []
    assert any(one.open and one.text.startswith(weakness) for one in explain(policy))


def test_one_policy_for_machines_with_and_without_gpus_and_with_another_platform() -> None:
    gpu = Nvidia()
    devices = (gpu.evidence(CHALLENGE.device_nonce("snp")),)
    trust = replace(AMD.trust(), nvidia=gpu.trust().nvidia)
    workers = [
        describe_evidence(AMD.evidence(AMD.report(platform_info=0xBF), devices), trust),
        describe_evidence(AMD.evidence(AMD.report(platform_info=0)), trust),
    ]
    text = policy_for(*workers)
    # They report no bit alike, so the rule is left open by name.
    assert parse_policy(text).kinds["snp"].unchecked == {"platform_info"}
    for one in workers:
        check_admits(parse_policy(text), one)


def test_one_policy_for_tpms_of_two_makers(tmp_path: Path) -> None:
    asked = []
    for number, maker in enumerate((Maker(), Maker())):
        path = tmp_path / f"{number}.json"
        path.write_bytes(maker.evidence().encode())
        asked += ["--evidence", str(path)]
    done = CliRunner().invoke(app, ["policy", "new", *asked, "--at", "2026-06-01"])
    assert done.exit_code == 0, done.exception
    assert len(parse_policy(done.stdout).tpm_roots) == 2
