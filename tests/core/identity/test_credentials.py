"""The credentials that a worker makes from its environment variables and files."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from sealring import _native
from sealring.core.identity import Credentials, WorkerName, load_credentials, verify
from sealring.core.identity.secret import derive_authority
from sealring.errors import BadCredential, ConfigurationError
from tests.codes import coded
from tests.core.identity.issuing import Issuer

SECRET = "e64da4abc5f68a23edc3cb3dc27e6ab23c16f3a2c6abf7b2ab995a50f0057a8d"


def secret_file(tmp_path: Path, mode: int = 0o600, content: bytes = SECRET.encode()) -> Path:
    path = tmp_path / "job.secret"
    path.write_bytes(content)
    path.chmod(mode)
    return path


def write(tmp_path: Path, credentials: Credentials, rank: int = 1) -> dict[str, str]:
    """Writes an operator's three files; returns the environment that names them."""
    key = tmp_path / f"worker-{rank}.key"
    key.write_bytes(
        credentials.private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    key.chmod(0o600)
    (tmp_path / f"worker-{rank}.pem").write_bytes(
        credentials.certificate.public_bytes(Encoding.PEM)
    )
    (tmp_path / "authority.pem").write_bytes(
        b"".join(one.public_bytes(Encoding.PEM) for one in credentials.authorities)
    )
    return {
        "SEALRING_CERTIFICATE": str(tmp_path / "worker-{rank}.pem"),
        "SEALRING_KEY": str(tmp_path / "worker-{rank}.key"),
        "SEALRING_AUTHORITY": str(tmp_path / "authority.pem"),
    }


def test_holders_of_one_secret_verify_each_other(tmp_path: Path) -> None:
    one = load_credentials(1, 4, {"SEALRING_SECRET": SECRET})
    other = load_credentials(
        2, 4, {"SEALRING_SECRET_FILE": str(secret_file(tmp_path, content=f"{SECRET}\n".encode()))}
    )
    assert one.authorities == other.authorities
    peer = verify(one.certificate, other.authorities, job=other.job, world=4, rank=1, where="here")
    assert (peer.job, peer.rank, peer.world) == (one.job, 1, 4)
    assert peer.fingerprint == one.fingerprint


def test_a_secret_always_gives_the_same_authority() -> None:
    """Versions of sealring must agree on it, so changing it would change the protocol."""
    secret = b"0123456789abcdef" * 4
    authority = derive_authority(_native.Secret(secret))
    assert authority.default_job == "job-811803af"
    assert authority.certificate == derive_authority(_native.Secret(secret)).certificate
    assert authority.certificate != derive_authority(_native.Secret(secret + b"x")).certificate


def test_each_worker_has_a_key_of_its_own_and_keeps_it() -> None:
    one, other = (load_credentials(rank, 4, {"SEALRING_SECRET": SECRET}) for rank in (1, 2))
    again = load_credentials(1, 4, {"SEALRING_SECRET": SECRET})
    assert one.certificate.public_key() != other.certificate.public_key()
    assert one.certificate.public_key() == again.certificate.public_key()
    assert one.certificate == again.certificate
    named = load_credentials(1, 4, {"SEALRING_SECRET": SECRET, "SEALRING_JOB": "another"})
    larger = load_credentials(1, 5, {"SEALRING_SECRET": SECRET})
    keys = {each.certificate.public_key().public_bytes_raw() for each in (one, named, larger)}  # type: ignore[union-attr]
    assert len(keys) == 3
    lifetime = one.certificate.not_valid_after_utc - datetime.now(UTC)
    assert 23.9 < lifetime.total_seconds() / 3600 <= 24


def test_a_process_makes_a_new_certificate_for_its_key_after_an_hour() -> None:
    """For an hour all its groups show one certificate, which each peer verifies once."""
    authority = derive_authority(_native.Secret(SECRET.encode()))
    now = datetime.now(UTC) + timedelta(days=100)

    def at(hours: float) -> x509.Certificate:
        name = WorkerName("job", 3)
        return authority.issue_to_self(name, 7, now + timedelta(hours=hours))[0]

    first, still, later = at(0), at(0.99), at(1)
    set_back = at(-2)
    assert first == still
    made = [first, later, set_back]
    assert len({each.serial_number for each in made}) == 3
    assert len({each.public_key().public_bytes_raw() for each in made}) == 1  # type: ignore[union-attr]
    assert set_back.not_valid_before_utc < now - timedelta(hours=2)
    assert first.not_valid_after_utc < later.not_valid_after_utc


def test_the_job_can_be_named() -> None:
    environ = {"SEALRING_SECRET": SECRET, "SEALRING_JOB": "llama.7b_a-1"}
    assert load_credentials(0, 1, environ).job == "llama.7b_a-1"
    with pytest.raises(ConfigurationError, match="job name"):
        load_credentials(0, 1, environ | {"SEALRING_JOB": "a/b"})


def test_no_identity_says_what_to_do() -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"openssl rand.*SEALRING_SECRET_FILE.*sealring ca",
        check=coded("configuration.no_identity"),
    ):
        load_credentials(0, 1, {})


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o601])
@pytest.mark.threat("K7")
def test_a_secret_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = secret_file(tmp_path, mode)
    with pytest.raises(
        BadCredential, match=f"chmod 600 {path}", check=coded("configuration.bad_secret")
    ):
        load_credentials(0, 1, {"SEALRING_SECRET_FILE": str(path)})


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_secret_of_its_owner_is_read(tmp_path: Path, mode: int) -> None:
    environ = {"SEALRING_SECRET_FILE": str(secret_file(tmp_path, mode))}
    assert load_credentials(0, 1, environ).rank == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.threat("K7")
def test_a_secret_of_somebody_else_is_refused(tmp_path: Path) -> None:
    path = secret_file(tmp_path)
    os.chown(path, 12345, -1)
    with pytest.raises(
        BadCredential, match="belongs to user 12345", check=coded("configuration.bad_secret")
    ):
        load_credentials(0, 1, {"SEALRING_SECRET_FILE": str(path)})


@pytest.mark.threat("K7")
def test_a_secret_must_be_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    for path, reason in ((tmp_path, "not a regular"), (tmp_path / "fifo", "not a regular")):
        with pytest.raises(BadCredential, match=reason, check=coded("configuration.bad_secret")):
            load_credentials(0, 1, {"SEALRING_SECRET_FILE": str(path)})
    with pytest.raises(
        BadCredential, match="No such file", check=coded("configuration.bad_secret")
    ):
        load_credentials(0, 1, {"SEALRING_SECRET_FILE": str(tmp_path / "none")})


def test_one_identity_only(tmp_path: Path) -> None:
    files = write(tmp_path, Issuer().credentials(1))
    with pytest.raises(ConfigurationError, match="one identity"):
        load_credentials(1, 4, files | {"SEALRING_SECRET": SECRET})
    with pytest.raises(ConfigurationError, match="unset one"):
        load_credentials(1, 4, {"SEALRING_SECRET": SECRET, "SEALRING_SECRET_FILE": "x"})
    del files["SEALRING_KEY"]
    for key in ({}, {"SEALRING_KEY": ""}):
        with pytest.raises(ConfigurationError, match="SEALRING_KEY must be set too"):
            load_credentials(1, 4, files | key)


def test_an_operators_files_are_read(tmp_path: Path) -> None:
    made = Issuer().credentials(1, job="j")
    loaded = load_credentials(1, 4, write(tmp_path, made) | {"SEALRING_JOB": "j"})
    assert loaded == Credentials("j", 1, made.certificate, made.authorities, made.key)
    assert loaded.key.pkcs8 == made.key.pkcs8


def test_a_certificate_for_something_else_is_refused(tmp_path: Path) -> None:
    environ = write(tmp_path, Issuer().credentials(1, job="j"))
    with pytest.raises(
        BadCredential,
        match="for job j, and SEALRING_JOB is k",
        check=coded("configuration.bad_certificate"),
    ):
        load_credentials(1, 4, environ | {"SEALRING_JOB": "k"})
    with pytest.raises(
        BadCredential, match="for a world of 4", check=coded("configuration.bad_certificate")
    ):
        load_credentials(1, 5, environ)
    environ = {name: path.replace("{rank}", "1") for name, path in environ.items()}
    with pytest.raises(
        BadCredential,
        match="for rank 1, and this worker is rank 2",
        check=coded("configuration.bad_certificate"),
    ):
        load_credentials(2, 4, environ)


@pytest.mark.threat("K7")
def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    environ = write(tmp_path, Issuer().credentials(1))
    (tmp_path / "worker-1.key").chmod(0o644)
    with pytest.raises(
        BadCredential, match="chmod 600", check=coded("configuration.bad_certificate")
    ):
        load_credentials(1, 4, environ)


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    issuer = Issuer()
    environ = write(tmp_path, issuer.credentials(1))
    pem = tmp_path / "worker-1.pem"
    own = pem.read_bytes()
    pem.write_bytes(issuer.credentials(1).certificate.public_bytes(Encoding.PEM))
    with pytest.raises(
        BadCredential, match="is not the one of", check=coded("configuration.bad_certificate")
    ):
        load_credentials(1, 4, environ)
    pem.write_bytes(own * 2)
    with pytest.raises(
        BadCredential, match="2 certificates", check=coded("configuration.bad_certificate")
    ):
        load_credentials(1, 4, environ)
    pem.write_bytes(own)
    authority = tmp_path / "authority.pem"
    authority.write_bytes(Issuer().certificate.public_bytes(Encoding.PEM))
    with pytest.raises(
        BadCredential,
        match="not issued by an authority",
        check=coded("configuration.bad_certificate"),
    ):
        load_credentials(1, 4, environ)
    authority.write_bytes(own)
    with pytest.raises(
        BadCredential, match="not an authority's", check=coded("configuration.bad_certificate")
    ):
        load_credentials(1, 4, environ)
    (tmp_path / "worker-1.key").write_bytes(b"rubbish")
    authority.write_bytes(issuer.certificate.public_bytes(Encoding.PEM))
    with pytest.raises(
        BadCredential,
        match="not an unencrypted PEM private key",
        check=coded("configuration.bad_certificate"),
    ):
        load_credentials(1, 4, environ)


@pytest.mark.threat("K15")
def test_printing_credentials_shows_no_key() -> None:
    credentials = load_credentials(0, 1, {"SEALRING_SECRET": SECRET})
    assert "rivate" not in repr(credentials)
    assert "key" not in repr(derive_authority(_native.Secret(SECRET.encode()))).lower()
