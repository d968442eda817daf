"""From a machine's evidence in a file to a policy that admits it, with the commands of a user."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from typer.testing import CliRunner

from sealring.attest.evidence.attesters import make_simulator
from sealring.attest.evidence.tpm import machine as machine_module
from sealring.attest.evidence.tpm.commands import Tpm
from sealring.cli import app
from sealring.errors import AttestationUnavailable, ConfigurationError
from tests.attest.evidence.swtpm import needs_swtpm, running, store
from tests.attest.minting.tpm import Maker


def sealring(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(one) for one in arguments])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


def test_simulated_evidence_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_simulator(tmp_path / "simulator")
    monkeypatch.setenv("SEALRING_ATTESTER", f"simulated:{tmp_path / 'simulator'}")
    evidence, policy = tmp_path / "evidence.json", tmp_path / "policy.toml"
    assert "simulated evidence, for a nonce of its own" in sealring(
        "policy", "attest", "--out", evidence
    )
    sealring("policy", "new", "--evidence", evidence, "--job", "gpt", "--out", policy)
    assert json.loads(sealring("policy", "check", policy, evidence, "--json"))["admitted"]
    again = tmp_path / "again.json"
    shown = json.loads(sealring("policy", "attest", "--out", again, "--json"))
    assert shown == {"kind": "simulated", "out": str(again), "bytes": again.stat().st_size}
    # Each file is made for a new nonce and key.
    assert (
        json.loads(again.read_text())["challenge"] != json.loads(evidence.read_text())["challenge"]
    )


@needs_swtpm
def test_a_tpms_evidence_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as address:
        with Tpm.open(address) as tpm:
            with tpm.primary(machine_module.EK_P256) as (_, public):
                x, y = (int.from_bytes(part, "big") for part in (public[-66:-34], public[-32:]))
            maker = Maker(ek=ec.EllipticCurvePublicNumbers(x, y, ec.SECP256R1()).public_key())
            store(tpm, 0x01C0000A, maker.ek.der)
        issuers = tmp_path / "issuers.pem"
        pem = (one.certificate.public_bytes(Encoding.PEM) for one in (maker.signer, maker.root))
        issuers.write_bytes(b"".join(pem))
        monkeypatch.setenv("SEALRING_ATTESTER", f"tpm:{issuers}")
        monkeypatch.setenv("SEALRING_SETTINGS", json.dumps({"tpm": address}))
        evidence, policy = tmp_path / "evidence.json", tmp_path / "policy.toml"
        sealring("policy", "attest", "--out", evidence)
    at = ("--at", "2026-06-01")
    sealring("policy", "new", "--evidence", evidence, "--out", policy, *at)
    lists = tmp_path / "maker.crl"
    lists.write_bytes(maker.root.revocation_list().public_bytes(Encoding.DER))
    checked = sealring("policy", "check", policy, evidence, "--revocation-list", lists, *at)
    assert "tpm 2.0: admitted" in checked
    assert "only the verifier that made it can judge it" in checked


def test_a_machine_that_makes_no_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEALRING_ATTESTER", raising=False)
    done = CliRunner().invoke(app, ["policy", "attest", "--out", str(tmp_path / "evidence.json")])
    assert type(done.exception) is AttestationUnavailable
    assert not (tmp_path / "evidence.json").exists()
    gpus = CliRunner().invoke(app, ["policy", "attest", "--gpus"])
    assert type(gpus.exception) is ConfigurationError
