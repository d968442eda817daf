"""What judging evidence costs is measured on evidence that verifies."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from sealring.lab.__main__ import app
from sealring.lab.bench.attest import verify_ms


def test_every_kind_is_measured() -> None:
    taken = verify_ms(runs=1)
    assert set(taken) == {"tpm", "snp", "tdx", "nvidia"}
    assert all(milliseconds > 0 for milliseconds in taken.values())


def test_the_command_prints_what_programs_read() -> None:
    done = CliRunner().invoke(app, ["attest", "--workers", "4", "--json"])
    assert done.exit_code == 0, done.output
    printed = json.loads(done.stdout)
    assert set(printed["verify_ms"]) == {"tpm", "snp", "tdx", "nvidia"}
    assert printed["join"]["workers"] == 4
    assert printed["join"]["seconds"] > 0
