"""An operator's authority, from `sealring ca init` to a worker that uses its files."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from typer.testing import CliRunner

from sealring.cli.ca import app
from sealring.core.identity import WorkerName, load_credentials
from sealring.core.identity.authority import create_authority, issue_from_directory, request
from sealring.errors import BadCredential, ConfigurationError, named
from tests.codes import coded


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def run(*arguments: object, error: str | None = None) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if error is None:
        assert result.exit_code == 0, result.exception
        return result.output
    assert named(result.exception) == error
    return str(result.exception)


@pytest.mark.threat("K14")
def test_init_request_issue_show(tmp_path: Path) -> None:
    ca, worker = tmp_path / "ca", tmp_path / "worker"
    run("init", ca, "--name", "ours")
    run("request", "--job", "j", "--rank", 3, "--out", worker)
    said = run(
        *("issue", "--ca", ca, "--job", "j", "--rank", 3, "--world-size", 4),
        *("--request", worker / "j-rank-3.csr", "--hours", 2, "--out", worker),
    )
    assert "made on this machine" not in said
    assert mode(ca) == 0o700
    assert mode(ca / "authority.key") == mode(worker / "j-rank-3.key") == 0o600
    shown = json.loads(run("show", worker / "j-rank-3.pem", "--json"))
    assert [(row["job"], row["rank"], row["world_size"]) for row in shown] == [("j", 3, 4)]
    assert "CN=ours" in run("show", ca / "authority.pem")

    environ = {
        "SEALRING_CERTIFICATE": str(worker / "j-rank-{rank}.pem"),
        "SEALRING_KEY": str(worker / "j-rank-{rank}.key"),
        "SEALRING_AUTHORITY": str(ca / "authority.pem"),
    }
    assert load_credentials(3, 4, environ).job == "j"


def test_a_key_made_here_is_said_to_be(tmp_path: Path) -> None:
    run("init", tmp_path / "ca")
    said = run("issue", "--ca", tmp_path / "ca", "--job", "j", "--rank", 0, "--out", tmp_path)
    assert "made on this machine" in said
    assert mode(tmp_path / "j-rank-0.key") == 0o600


@pytest.mark.threat("K14")
def test_nothing_private_is_overwritten(tmp_path: Path) -> None:
    run("init", tmp_path)
    before = (tmp_path / "authority.key").read_bytes()
    assert "already" in run("init", tmp_path, error="configuration")
    (tmp_path / "authority.pem").unlink()
    assert "overwritten" in run("init", tmp_path, error="configuration")
    assert (tmp_path / "authority.key").read_bytes() == before

    request(WorkerName("j", 0), tmp_path)
    with pytest.raises(ConfigurationError, match="overwritten"):
        request(WorkerName("j", 0), tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_certificate_can_be_renewed_for_the_same_key(tmp_path: Path) -> None:
    create_authority(tmp_path / "ca", "ca")
    csr, _ = request(WorkerName("j", 0), tmp_path)
    certificates = set()
    for _ in range(2):
        issued = issue_from_directory(
            tmp_path / "ca", WorkerName("j", 0), tmp_path, world=1, hours=1, request_file=csr
        )
        certificates.add(issued.certificate.read_bytes())
    assert len(certificates) == 2


def odd_request(kind: str) -> bytes:
    uri = x509.UniformResourceIdentifier("spiffe://sealring/j/rank/0")
    other = x509.UniformResourceIdentifier("spiffe://sealring/j/rank/1")
    names = {"another rank": [other], "two names": [uri, other], "no name": []}.get(kind, [uri])
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=True)
    if kind == "an authority":
        builder = builder.add_extension(x509.BasicConstraints(True, None), critical=True)
    if kind == "another kind of key":
        return builder.sign(generate_private_key(SECP256R1()), SHA256()).public_bytes(Encoding.PEM)
    signed = builder.sign(Ed25519PrivateKey.generate(), None)
    if kind == "a broken signature":
        der = bytearray(signed.public_bytes(Encoding.DER))
        der[-1] ^= 1
        signed = x509.load_der_x509_csr(bytes(der))
    return signed.public_bytes(Encoding.PEM)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("another rank", "does not ask for"),
        ("two names", "does not ask for"),
        ("no name", "does not ask for"),
        ("an authority", "does not ask for"),
        ("another kind of key", "not for an Ed25519 key"),
        ("a broken signature", "not signed by the key"),
    ],
)
@pytest.mark.threat("J32")
def test_a_request_for_anything_else_is_refused(tmp_path: Path, kind: str, reason: str) -> None:
    create_authority(tmp_path / "ca", "ca")
    path = tmp_path / "odd.csr"
    path.write_bytes(odd_request(kind))
    with pytest.raises(BadCredential, match=reason, check=coded("configuration.bad_certificate")):
        issue_from_directory(
            tmp_path / "ca", WorkerName("j", 0), tmp_path, world=1, hours=1, request_file=path
        )
    assert not (tmp_path / "j-rank-0.pem").exists()


@pytest.mark.threat("K7")
def test_an_authority_whose_key_others_can_read_does_not_issue(tmp_path: Path) -> None:
    create_authority(tmp_path, "ca")
    (tmp_path / "authority.key").chmod(0o640)
    said = run(
        "issue", "--ca", tmp_path, "--job", "j", "--rank", 0, error="configuration.bad_certificate"
    )
    assert "chmod 600" in said


def test_a_rank_outside_its_world_is_not_issued(tmp_path: Path) -> None:
    create_authority(tmp_path, "ca")
    said = run(
        *("issue", "--ca", tmp_path, "--job", "j", "--rank", 4, "--world-size", 4),
        *("--out", tmp_path),
        error="configuration.bad_certificate",
    )
    assert "does not exist in a world of 4" in said
