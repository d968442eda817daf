"""The folder of vendors' statements: its files are used, and a file of no known kind is named."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding
from typer.testing import CliRunner

from sealring.attest.evidence import Trust, parse_policy, read_cache, verify_evidence
from sealring.attest.evidence.chains import INTEL_ROOTS, NVIDIA_ROOTS
from sealring.attest.evidence.nvidia import verify_nvidia
from sealring.attest.evidence.simulated import Simulator
from sealring.cli import app
from sealring.errors import ConfigurationError, UntrustedChain
from tests.attest.minting import CHALLENGE, NOW
from tests.attest.minting.amd import Amd
from tests.attest.minting.intel import Intel
from tests.attest.minting.nvidia import MEASUREMENTS, Nvidia
from tests.attest.minting.tpm import BOOT, AzureGuest, Maker, pcr_values

MAKER = Maker()
POLICY = f"""\
version = 1
[tpm]
roots = ["{MAKER.root.fingerprint}"]
pcrs = {{4 = ["{pcr_values(BOOT)[4].hex()}"]}}
unchecked = ["pcr0", "pcr7", "ima"]
"""


def test_lists_and_collateral_are_read_and_used(tmp_path: Path) -> None:
    intel = Intel()
    (tmp_path / "intel.json").write_text(intel.collateral().text)
    revocations = MAKER.root.revocation_list()
    (tmp_path / "maker.crl").write_bytes(revocations.public_bytes(Encoding.DER))
    (tmp_path / "same.crl").write_bytes(revocations.public_bytes(Encoding.PEM))
    (tmp_path / ".hidden").write_text("not looked at")
    cache = read_cache(tmp_path, NOW)
    assert (len(cache.lists), len(cache.collateral)) == (2, 1)
    trust = cache.trust(parse_policy(POLICY), NOW)
    worker = verify_evidence(MAKER.evidence(), MAKER.challenge(), trust)
    assert len(worker.lists) == 2
    assert (trust.intel, trust.nvidia) == (INTEL_ROOTS, NVIDIA_ROOTS)


def test_a_reference_that_is_not_nvidias_is_named_and_not_used(tmp_path: Path) -> None:
    (tmp_path / "driver.swidtag").write_bytes(Nvidia().reference_file("1", MEASUREMENTS))
    cache = read_cache(tmp_path, NOW)
    assert cache.references == ()
    assert "driver.swidtag: the chain ends at" in cache.expired[0]


@pytest.mark.parametrize("name", ["list.crl", "intel.json", "notes.txt"])
def test_a_file_that_does_not_belong_there(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\xff something else")
    with pytest.raises(ConfigurationError, match=name):
        read_cache(tmp_path)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_cache(tmp_path / "none")


def test_policy_check_with_a_cache_and_a_stated_time(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    revocations = MAKER.root.revocation_list().public_bytes(Encoding.DER)
    (cache / "maker.crl").write_bytes(revocations)
    policy, evidence = tmp_path / "policy.toml", tmp_path / "evidence.json"
    policy.write_text(POLICY)
    evidence.write_bytes(MAKER.evidence().encode())
    asked = ["policy", "check", str(policy), str(evidence), "--cache", str(cache)]
    done = CliRunner().invoke(app, [*asked, "--json", "--at", "2026-06-01"])
    shown = json.loads(done.stdout)
    assert (done.exit_code, shown["admitted"]) == (0, True)
    (seen,) = shown["worker"]["lists"]
    assert seen["issuer"] == "CN=TPM maker's root"
    assert datetime.fromtimestamp(seen["made"], UTC).date() == date(2026, 5, 31)
    late = json.loads(CliRunner().invoke(app, [*asked, "--json", "--at", "2026-06-20"]).stdout)
    assert late["error"] == "evidence.stale_revocation_list"
    nonce = ["--nonce", "01" * 32]
    other = CliRunner().invoke(app, [*asked, *nonce, "--json", "--at", "2026-06-01"])
    assert json.loads(other.stdout)["error"] == "evidence.not_bound"
    table = CliRunner().invoke(app, [*asked, "--at", "2026-06-01"])
    assert "tpm 2.0: admitted" in table.stdout


def test_nothing_that_is_minted_here_leads_to_a_pinned_root() -> None:
    amd, intel, gpu = Amd(), Intel(), Nvidia()
    trust = replace(Trust(NOW), collateral=(intel.collateral(),))
    evidence = (
        amd.evidence(),
        AzureGuest(amd).evidence(),
        intel.evidence(),
        MAKER.evidence(),
        Simulator.create(NOW).attest(CHALLENGE, b"\xab"),
    )
    for one in evidence:
        with pytest.raises(UntrustedChain, match="not a pinned root"):
            verify_evidence(one, MAKER.challenge(), trust)
    with pytest.raises(UntrustedChain, match="not a pinned root"):
        verify_nvidia(gpu.evidence(bytes(32)), bytes(32), trust)
