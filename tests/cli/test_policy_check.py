"""`sealring policy check` and `sealring attest` as a person types them."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

from typer.testing import CliRunner

from sealring.cli import app
from sealring.errors import BadPolicy
from sealring.identity.attestation import Challenge
from sealring.identity.attestation.simulated import Simulator
from tests.identity.attestation.swtpm import needs_swtpm, running

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
    assert shown["worker"]["kind"] == "SIMULATED"
    assert all(rule["passed"] for rule in shown["rules"])


def test_evidence_that_does_not_says_which_rule(tmp_path: Path) -> None:
    arguments = written(tmp_path, debug=True)
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 1
    failed = [rule for rule in json.loads(done.stdout)["rules"] if not rule["passed"]]
    assert [(rule["rule"], rule["error"]) for rule in failed] == [("debug", "DebugGuest")]
    table = CliRunner().invoke(app, arguments)
    assert table.exit_code == 1
    assert "SIMULATED: refused" in table.stdout
    assert "DebugGuest" in table.stdout


def test_another_nonce_is_refused_before_the_policy_is_asked(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [*written(tmp_path), "--json", "--nonce", "01" * 32])
    assert done.exit_code == 1
    assert json.loads(done.stdout)["error"] == "NotBound"


def test_a_policy_with_a_mistake(tmp_path: Path) -> None:
    arguments = written(tmp_path)
    Path(arguments[2]).write_text("version = 1\nsnp = 3\n")
    done = CliRunner().invoke(app, arguments)
    assert type(done.exception) is BadPolicy
    assert "line 2: snp is a table" in str(done.exception)


def test_attest_lists_what_is_here() -> None:
    shown = json.loads(CliRunner().invoke(app, ["attest", "--json"]).stdout)
    assert all(row["shows"] == {} for row in shown["hardware"] if not row["present"])
    kinds = {row["kind"]: row["verifier"] for row in shown["hardware"]}
    assert kinds == dict.fromkeys(("snp", "tdx", "sgx", "tpm", "nvidia"), True)
    assert shown["simulated"] == "SIMULATED"


@needs_swtpm
def test_attest_shows_a_tpms_registers_and_whether_its_maker_certified_it() -> None:
    with running() as address:
        done = CliRunner().invoke(app, ["attest", "--json", "--tpm", address])
        table = CliRunner().invoke(app, ["attest", "--tpm", address])
    (row,) = [one for one in json.loads(done.stdout)["hardware"] if one["kind"] == "tpm"]
    assert row["present"]
    assert row["shows"]["pcr17"] == "ff" * 32
    assert "pcr16" not in row["shows"]
    assert "no certificate for an endorsement key" in row["note"]
    assert f"tpm pcr17 = {'ff' * 32}" in table.stdout


def test_attest_says_what_is_wrong_with_a_tpm(tmp_path: Path) -> None:
    asked = ["attest", "--json", "--tpm", f"unix://{tmp_path}/none"]
    (row,) = [
        one
        for one in json.loads(CliRunner().invoke(app, asked).stdout)["hardware"]
        if one["kind"] == "tpm"
    ]
    assert "cannot be opened" in row["note"]
