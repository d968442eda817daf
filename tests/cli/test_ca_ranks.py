"""Certificates for many ranks in one command."""

from __future__ import annotations

import re
import shlex
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from typer.testing import CliRunner

from sealring.cli import app
from sealring.cli.ca import ranks_of
from sealring.core.identity.certificates import claims_of, make_authority
from sealring.errors import BadCredential, ConfigurationError
from tests.cli.test_commands import sealring
from tests.codes import coded


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
    command = "sealring ca issue --job gpt --rank 2-3,5 --world-size {} --request '{}'"
    files = "gpt-rank-{rank}.csr"
    assert f"{command.format('N', files)}, with N the number of all workers of the job." in said
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
    with pytest.raises(
        BadCredential,
        match="rank 3 does not exist in a world of 2",
        check=coded("configuration.bad_certificate"),
    ):
        ca("issue", "--job", "gpt", "--rank", "0-3", "--world-size", "2", "--out", "made")
    assert not Path("made").exists()
    ca("issue", "--job", "gpt", "--rank", "0-3", "--world-size", "4", "--out", "made")


def test_the_request_names_the_world_in_the_command_to_issue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A certificate that names no world is valid in a world of any size."""
    monkeypatch.chdir(tmp_path)
    ca("init")
    said = ca("request", "--job", "gpt", "--rank", "0", "--world-size", "4")
    found = re.search(r"sealring (ca issue .* --request '([^']*)')", said)
    assert found is not None
    assert "--world-size 4" in found[1]
    ca(*shlex.split(found[1])[1:])
    content = Path("gpt-rank-0.pem").read_bytes()
    assert claims_of(x509.load_pem_x509_certificate(content)).world == 4
    with pytest.raises(
        BadCredential,
        match="rank 4 does not exist in a world of 4",
        check=coded("configuration.bad_certificate"),
    ):
        ca("request", "--job", "gpt", "--rank", "4", "--world-size", "4")
    assert not Path("gpt-rank-4.key").exists()


def test_a_clock_that_is_behind_the_authority_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ca("init")
    key = load_pem_private_key(Path("sealring-ca/authority.key").read_bytes(), None)
    assert isinstance(key, Ed25519PrivateKey)
    tomorrow = datetime.now(UTC) + timedelta(hours=30)
    later = make_authority(key, "later", 7, tomorrow, tomorrow + timedelta(days=9))
    Path("sealring-ca/authority.pem").write_bytes(later.public_bytes(Encoding.PEM))
    with pytest.raises(
        BadCredential,
        match=r"is valid from .* on this machine: set its clock",
        check=coded("configuration.bad_certificate"),
    ):
        ca("issue", "--job", "gpt", "--rank", "0")


SCRIPT = """
import torch.distributed as dist
dist.init_process_group()
"""


@pytest.mark.threat("J28")
def test_a_worker_notices_by_itself_that_its_certificate_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker once dialed its peers many times, and only the peers named the reason."""
    monkeypatch.chdir(tmp_path)
    ca("init")
    ca("issue", "--job", "gpt", "--rank", "0")
    ca("issue", "--job", "gpt", "--rank", "1", "--hours", "0.0003")
    Path("train.py").write_text(SCRIPT)
    time.sleep(2.5)  # the certificate is valid for a second
    done = sealring(
        "run", "-n", "2", "train.py", SEALRING_JOB="gpt",
        SEALRING_AUTHORITY="sealring-ca/authority.pem",
        SEALRING_CERTIFICATE="gpt-rank-{rank}.pem", SEALRING_KEY="gpt-rank-{rank}.key",
    )  # fmt: skip
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        "configuration.bad_certificate: the certificate of this worker, rank 1, ended at "
    )
    assert "issue a new one (`sealring ca issue`), or set the clock (rank 1" in last
    assert "handshake.certificate_expired" not in done.stderr
