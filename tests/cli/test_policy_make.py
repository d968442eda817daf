"""`sealring policy new`, and `policy check` in words, as a user types them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from typer.testing import CliRunner, Result

from sealring.attest.evidence import Challenge, judge, parse_policy, verify_evidence
from sealring.attest.evidence.policy import new_policy, tables_from
from sealring.attest.evidence.simulated import Simulator
from sealring.attest.evidence.verify import describe_evidence
from sealring.attest.evidence.worker import AttestedWorker
from sealring.cli import app
from sealring.errors import ConfigurationError
from tests.attest.minting import CHALLENGE
from tests.attest.minting.amd import MEASUREMENT, Amd
from tests.attest.minting.tpm import Maker

AMD = Amd()
POLICY = f"""\
version = 1
job = "gpt"

[snp]
measurements = ["{MEASUREMENT.hex()}"]
minimum_tcb = {{Milan = {{bootloader = 0, tee = 0, snp = 8, microcode = 100}}}}
unchecked = ["platform_info"]

[tdx]
measurements = ["{"5a" * 48}"]
registers = {{rtmr1 = ["{"a1" * 48}"]}}
unchecked = ["rtmr0", "rtmr2"]
"""


def sealring(*arguments: object, answers: str | None = None) -> Result:
    return CliRunner().invoke(app, [str(one) for one in arguments], input=answers)


def test_a_policy_in_words(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(POLICY)
    done = sealring("policy", "check", path)
    assert done.exit_code == 0
    minimum = "tcb: Milan of at least bootloader 0, tee 0, snp 8, microcode 100, now and when"
    assert f"snp: {minimum}" in done.stdout
    assert "OPEN  tdx: rtmr2 is not checked: any kernel command line" in done.stdout
    assert "3 holes are left open by name." in done.stdout
    shown = json.loads(sealring("policy", "check", path, "--json").stdout)
    assert shown["open"] == 3
    assert {"about": "job", "open": False}.items() <= next(
        one for one in shown["clauses"] if one["about"] == "job"
    ).items()


def judged(policy: str, worker: AttestedWorker) -> set[str]:
    rules = judge(parse_policy(policy), worker, None).rules
    return {rule.name for rule in rules if rule.refusal is not None}


def test_a_policy_from_evidence_admits_that_machine_and_no_other() -> None:
    shown = describe_evidence(AMD.evidence(), AMD.trust())
    text = new_policy("gpt", tables_from([shown], {}))
    listed = AMD.trust(AMD.revocation_list())
    assert judged(text, verify_evidence(AMD.evidence(), CHALLENGE, listed)) == set()
    for changes, name in (
        ({"measurement": bytes(48)}, "measurement"),
        ({"platform_info": 0x24}, "platform_smt"),
        ({"launch_tcb": {"snp": 7}}, "launch tcb snp"),
    ):
        other = AMD.evidence(AMD.report(**changes))
        assert name in judged(text, verify_evidence(other, CHALLENGE, listed))
    assert "unchecked" not in text


def test_a_new_policy_for_a_tpm_from_its_evidence_file(tmp_path: Path) -> None:
    maker = Maker()
    evidence, policy = tmp_path / "evidence.json", tmp_path / "policy.toml"
    evidence.write_bytes(maker.evidence().encode())
    at = ("--at", "2026-06-01")
    done = sealring("policy", "new", "--evidence", evidence, "--job", "gpt", "--out", policy, *at)
    assert done.exit_code == 0, done.output
    worker = verify_evidence(
        maker.evidence(), maker.challenge(), maker.trust(maker.root.revocation_list())
    )
    assert judged(policy.read_text(), worker) == set()
    assert "# SHA-256 of the maker's root certificate." in policy.read_text()
    # Forged evidence gives no policy.
    forged = replace(maker.evidence(), parts={**maker.evidence().parts, "pcrs": bytes(22 * 32)})
    evidence.write_bytes(forged.encode())
    again = sealring("policy", "new", "--evidence", evidence, *at)
    assert type(again.exception).__name__ == "ForgedEvidence"


def test_a_new_policy_by_asking() -> None:
    rtmr = "a1" * 48
    done = sealring("policy", "new", answers=f"tdx\n{'5a' * 48}\n{rtmr}\n{rtmr} {'a2' * 48}\n\n")
    assert done.exit_code == 0, done.output
    text = done.stdout[done.stdout.index("# Who may join") :]
    rules = parse_policy(text).kinds["tdx"]
    assert len(rules["registers"]["rtmr1"]) == 2
    assert rules.unchecked == {"rtmr2"}
    assert "LEFT OPEN tdx: rtmr2 is not checked" in done.stderr
    snp = f"snp\n{'5a' * 48}\n3 0 8 115\n\n\noff\nany\nany\nany\nany\non\nany\n"
    done = sealring("policy", "new", "--job", "gpt", answers=snp)
    rules = parse_policy(done.stdout[done.stdout.index("# Who may join") :]).kinds["snp"]
    assert rules["platform_info"] == {"smt": False, "alias_check": True}
    assert rules["minimum_tcb"] == {
        "Milan": {"bootloader": 3, "tee": 0, "snp": 8, "microcode": 115}
    }
    wrong = sealring("policy", "new", answers="cca\n")
    assert type(wrong.exception) is ConfigurationError


def test_a_policy_that_was_asked_for_can_be_written_to_a_file() -> None:
    """Runs a process, because a test's runner shows the answers on stdout, too."""
    done = subprocess.run(
        [Path(sys.executable).parent / "sealring", "policy", "new"],
        input=f"tdx\n{'5a' * 48}\n\n\n\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "Kind of evidence" in done.stderr
    assert parse_policy(done.stdout).kinds["tdx"].unchecked == {"rtmr0", "rtmr1", "rtmr2"}


def test_foreign_evidence_is_judged_but_for_its_binding(tmp_path: Path) -> None:
    simulator = Simulator.create(datetime.now(UTC))
    policy, evidence = tmp_path / "policy.toml", tmp_path / "evidence.json"
    policy.write_text(
        f'version = 1\n[simulated]\nroots = ["{simulator.fingerprint}"]\nmeasurements = ["abcd"]\n'
    )
    made_for = Challenge(bytes(32), b"somebody's key")
    foreign = replace(simulator.attest(made_for, b"\xab\xcd"), challenge=CHALLENGE)
    evidence.write_bytes(foreign.encode())
    asked = ("policy", "check", policy, evidence)
    plain = sealring(*asked)
    assert plain.exit_code == 1
    assert "evidence.not_bound" in plain.stdout
    assert "--without-binding judges everything else" in plain.stdout
    done = sealring(*asked, "--without-binding")
    assert done.exit_code == 0
    assert "passes, but is not admitted like this" in done.stdout
    assert "was NOT judged" in done.stdout
    shown = json.loads(sealring(*asked, "--without-binding", "--json").stdout)
    assert (shown["passed"], shown["admitted"], shown["nonce"]) == (True, False, "not judged")
    policy.write_text(policy.read_text().replace("abcd", "ab"))
    refused = json.loads(sealring(*asked, "--without-binding", "--json").stdout)
    assert (refused["passed"], refused["rules"][2]["error"]) == (
        False,
        "policy.measurement_not_allowed",
    )
    both = sealring(*asked, "--without-binding", "--nonce", "00" * 32)
    assert type(both.exception) is ConfigurationError


def test_what_is_described_without_its_binding_is_no_attested_worker() -> None:
    described = describe_evidence(AMD.evidence(), AMD.trust())
    assert not isinstance(described, AttestedWorker)
