"""Certificates for many ranks in one command."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography import x509
from typer.testing import CliRunner

from sealring.cli import app
from sealring.cli.ca import ranks_of
from sealring.errors import BadCertificate, ConfigurationError
from sealring.identity.certificates import claims_of


def ca(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["ca", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_machine_s_ranks_are_requested_and_issued_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ca("init")
    said = ca("request", "--job", "gpt", "--rank", "2-3,5")
    assert "sealring ca issue --job gpt --rank 2-3,5 --request 'gpt-rank-{rank}.csr'" in said
    assert "SEALRING_KEY='gpt-rank-{rank}.key'" in said
    ca("issue", "--job", "gpt", "--rank", "2-3,5", "--request", "gpt-rank-{rank}.csr")
    for rank in (2, 3, 5):
        content = Path(f"gpt-rank-{rank}.pem").read_bytes()
        assert claims_of(x509.load_pem_x509_certificate(content)).name.rank == rank


def test_one_request_for_many_ranks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ca("init")
    with pytest.raises(ConfigurationError, match="each has a request of its own"):
        ca("issue", "--job", "gpt", "--rank", "0-1", "--request", "one.csr")


@pytest.mark.parametrize("text", ["", "a", "3-1", "1,", "-1", "0-2,1", "1--2", "0x1", "1" * 9])
def test_ranks_that_cannot_be(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--rank is"):
        ranks_of(text)


def test_a_rank_beyond_the_world_leaves_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ca("init")
    with pytest.raises(BadCertificate, match="rank 3 does not exist in a world of 2"):
        ca("issue", "--job", "gpt", "--rank", "0-3", "--world-size", "2", "--out", "made")
    assert not Path("made").exists()
    ca("issue", "--job", "gpt", "--rank", "0-3", "--world-size", "4", "--out", "made")
