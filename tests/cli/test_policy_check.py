"""`sealring policy check` and `sealring policy attest` as a user types them."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sealring.attest.evidence import Challenge
from sealring.attest.evidence.simulated import Simulator
from sealring.cli import app
from sealring.core.settings import with_settings
from sealring.errors import BadPolicy
from tests.attest.evidence.swtpm import needs_swtpm, running

CHALLENGE = Challenge(bytes(32), b"a worker's public key")


def written(folder: Path, *, debug: bool = False) -> list[str]:
    simulator = Simulator.create(datetime.now(UTC))
    policy, evidence = folder / "policy.toml", folder / "evidence.json"
    policy.write_text(
        f'version = 1\n[simulated]\nroots = ["{simulator.fingerprint}"]\nmeasurements = ["abcd"]\n'
    )
    evidence.write_bytes(simulator.attest(CHALLENGE, b"\xab\xcd", debug=debug).encode())
    return ["policy", "check", str(policy), str(evidence)]


def test_evidence_that_passes(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [*written(tmp_path), "--json"])
    assert done.exit_code == 0
    shown = json.loads(done.stdout)
    assert shown["admitted"]
    assert shown["worker"]["label"] == "SIMULATED"
    assert all(rule["passed"] for rule in shown["rules"])


def test_evidence_that_does_not_says_which_rule(tmp_path: Path) -> None:
    arguments = written(tmp_path, debug=True)
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 1
    failed = [rule for rule in json.loads(done.stdout)["rules"] if not rule["passed"]]
    assert [(rule["rule"], rule["error"]) for rule in failed] == [("debug", "policy.debug_guest")]
    table = CliRunner().invoke(app, arguments)
    assert table.exit_code == 1
    assert "SIMULATED: refused" in table.stdout
    assert "policy.debug_guest" in table.stdout


def test_another_nonce_is_refused_before_the_policy_is_asked(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [*written(tmp_path), "--json", "--nonce", "01" * 32])
    assert done.exit_code == 1
    assert json.loads(done.stdout)["error"] == "evidence.not_bound"


def test_a_policy_with_a_mistake(tmp_path: Path) -> None:
    arguments = written(tmp_path)
    Path(arguments[2]).write_text("version = 1\nsnp = 3\n")
    done = CliRunner().invoke(app, arguments)
    assert type(done.exception) is BadPolicy
    assert "line 2: snp is a table" in str(done.exception)


def test_attest_lists_what_is_here() -> None:
    shown = json.loads(CliRunner().invoke(app, ["policy", "attest", "--json"]).stdout)
    assert all(row["shows"] == {} for row in shown["hardware"] if not row["present"])
    kinds = {row["kind"]: row["verifier"] for row in shown["hardware"]}
    assert kinds == dict.fromkeys(("snp", "tdx", "sgx", "tpm", "nvidia"), True)
    assert shown["simulated"] == "SIMULATED"


@needs_swtpm
def test_attest_shows_a_tpms_registers_and_whether_its_maker_certified_it() -> None:
    with running() as address:
        env = with_settings({}, tpm=address)
        done = CliRunner().invoke(app, ["policy", "attest", "--json"], env=env)
        table = CliRunner().invoke(app, ["policy", "attest"], env=env)
    (row,) = [one for one in json.loads(done.stdout)["hardware"] if one["kind"] == "tpm"]
    assert row["present"]
    assert row["shows"]["pcr17"] == "ff" * 32
    assert "pcr16" not in row["shows"]
    assert "no certificate for an endorsement key" in row["note"]
    assert f"tpm pcr17 = {'ff' * 32}" in table.stdout


def test_attest_says_what_is_wrong_with_a_tpm(tmp_path: Path) -> None:
    env = with_settings({}, tpm=f"unix://{tmp_path}/none")
    asked = CliRunner().invoke(app, ["policy", "attest", "--json"], env=env)
    (row,) = [one for one in json.loads(asked.stdout)["hardware"] if one["kind"] == "tpm"]
    assert "cannot be opened" in row["note"]


def explained(folder: Path, table: str) -> str:
    path = folder / "policy.toml"
    path.write_text(f"version = 1\n{table}")
    done = CliRunner().invoke(app, ["policy", "check", str(path)])
    assert done.exit_code == 0, done.exception
    return " ".join(done.stdout.split())


SNP = f'''[snp]
measurements = ["{"5a" * 48}"]
minimum_tcb = {{Milan = {{bootloader = 3, tee = 0, snp = 8, microcode = 115}}}}
platform_info = {{alias_check = true}}
'''
SGX = f'''[sgx]
signers = ["{"5a" * 32}"]
registers = {{isvprodid = ["0007"]}}
minimum_tcb = {{isvsvn = 3}}
'''
TPM = f'''[tpm]
roots = ["{"ab" * 32}"]
pcrs = {{0 = ["{"cd" * 32}"], 4 = ["{"cd" * 32}"], 7 = ["{"cd" * 32}"]}}
unchecked = ["ima"]
'''


@pytest.mark.parametrize("table", [SNP, SGX, f"{SNP}[freshness]\nrevocation_list_days = 7\n"])
def test_a_policy_without_a_known_hole_says_so(tmp_path: Path, table: str) -> None:
    assert explained(tmp_path, table).endswith("No known hole is left open.")


@pytest.mark.parametrize(
    ("table", "told"),
    [
        (f'[simulated]\nroots = ["{"ab" * 32}"]\nmeasurements = ["ab"]\n', "SIMULATED evidence"),
        (TPM, "whose owner can read its memory"),
        (SNP.replace("3, tee = 0, snp = 8, microcode = 115", "0, tee = 0, snp = 0, microcode = 0"),
         "minimum_tcb: any firmware and microcode of Milan passes"),
        (f'{SNP}signers = ["{"5a" * 48}"]\nguest_svn = 0\n', "guest_svn: every older image"),
        (SNP.replace("true}", "true, other_bits = [6]}"), "platform_info: hosts pass that report"),
        (SNP + "vlek = true\n", "vlek: reports pass"),
        (SNP + "migration = 1\n", "migration: guests pass"),
        (SNP + "vmpl = 1\n", "vmpl: software of privilege level 1 passes"),
        (SNP + 'unchecked = ["launch_tcb"]\n', "launch_tcb is not checked"),
        (SGX.replace("isvsvn = 3", "isvsvn = 0"), "isvsvn: every older enclave"),
        (SGX + 'tcb_status = ["OutOfDate"]\n', "tcb_status: platforms pass"),
        (TPM + "ak_certificates = true\n", "ak_certificates: quotes pass"),
        (TPM.replace('unchecked = ["ima"]\n', "") + '[tpm.ima]\nexclude = ["/run/"]\nfiles = '
         + f'{{"/bin/a" = ["{"ab" * 32}"]}}\n', "ima.exclude: any file passes"),
        (SNP + "[nvidia]\nrequire_reference = false\n", "require_reference: firmware passes"),
        (SNP + "[freshness]\nrequire_revocation_lists = false\n", "require_revocation_lists"),
        (SNP + '[freshness]\nissuers_without_lists = ["CN=A"]\n', "what CN=A revoked is not asked"),
    ],
)  # fmt: skip
def test_each_known_hole_of_a_policy_is_named_as_open(
    tmp_path: Path, table: str, told: str
) -> None:
    said = explained(tmp_path, table)
    assert "No known hole" not in said
    assert any(told in part for part in said.split("OPEN ")[1:]), said
