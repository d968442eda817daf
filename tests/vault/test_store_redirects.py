"""A store that sends its clients elsewhere, with their requests and credentials."""

from __future__ import annotations

import datetime
import os
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from sealring.errors import StoreFailed
from sealring.vault import Vault, keys
from sealring.vault.objects import OBJECT_NAME
from sealring.vault.stores import Store
from tests.vault.http_store import Answer, HttpStore, serving
from tests.vault.test_checkpoints import load, refused
from tests.vault.test_http_store import loaded, opened, server

__all__ = ["server"]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
STATUSES = [301, 302, 303, 307, 308]


@pytest.fixture
def attacker(tmp_path: Path) -> Iterator[HttpStore]:
    """It would answer as the real one does."""
    with serving(tmp_path) as made:
        yield made


@pytest.mark.parametrize("header", ["Location", "URI"])
@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("name", ["vault.json", "manifest", "rank-00000", "objects/"])
@pytest.mark.threat("V29")
def test_a_redirect_to_another_address_is_not_followed(
    name: str, status: int, header: str, server: HttpStore, attacker: HttpStore, key: Path
) -> None:
    def answer(method: str, path: str) -> Answer | None:
        if path.endswith(f"/{name}") or (name.endswith("/") and name in path):
            return Answer(status, headers={header: attacker.address + path})
        return None

    server.answer = answer
    words = f"redirects to {attacker.address}, and nothing is sent there"
    if name == "vault.json":
        with pytest.raises(StoreFailed, match=words):
            opened(server, key)
    else:
        refused(lambda: load(opened(server, key)), StoreFailed, words)
    assert attacker.requests == []


def test_a_redirect_on_the_same_server_is_followed(server: HttpStore, key: Path) -> None:
    """As servers do it for a folder that is named without the slash behind it."""

    def answer(method: str, path: str) -> Answer | None:
        if path.startswith("/vault/"):
            return Answer(307, headers={"Location": "/moved" + path.removeprefix("/vault")})
        return None

    (server.directory / "moved").symlink_to(server.directory / "vault")
    server.answer = answer
    assert loaded(server, key) == 2


def certificate(folder: Path) -> ssl.SSLContext:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "store")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (folder / "cert.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "cert.key")
    return context


@pytest.mark.threat("V29")
def test_a_redirect_from_https_to_http_is_not_followed(
    server: HttpStore, key: Path, tmp_path: Path
) -> None:
    """On the same host: an attacker on the network would read and answer what follows."""
    context = certificate(tmp_path)
    plain = f"http://localhost:{server.server_address[1]}"
    with serving(tmp_path, context) as sealed:
        url = f"https://localhost:{sealed.server_address[1]}/vault"
        command = [sys.executable, "-m", "sealring.cli", "vault", "ls", url, "--key", str(key)]
        env = {**os.environ, "SSL_CERT_FILE": str(tmp_path / "cert.pem")}
        good = subprocess.run(command, env=env, capture_output=True, text=True)
        assert good.returncode == 0, good.stderr
        sealed.answer = lambda method, path: Answer(302, headers={"Location": plain + path})
        server.requests.clear()
        bad = subprocess.run(command, env=env, capture_output=True, text=True)
    assert bad.returncode != 0
    assert f"redirects to {plain}, and nothing is sent there" in " ".join(bad.stderr.split())
    assert server.requests == []


@pytest.fixture
def in_the_place_of_s3(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[HttpStore]:
    (tmp_path / "ledgers").mkdir()
    monkeypatch.setenv("SEALRING_VAULT_LEDGER", str(tmp_path / "ledgers"))
    monkeypatch.setenv("AWS_SESSION_TOKEN", "the session's token")
    files = fsspec.get_filesystem_class("s3")
    with serving(tmp_path) as there:
        monkeypatch.setenv("AWS_ENDPOINT_URL", there.address)
        files.clear_instance_cache()
        yield there
        files.clear_instance_cache()


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("region", [{}, {"x-amz-bucket-region": "eu-west-1"}])
@pytest.mark.threat("V29")
def test_s3_sends_no_token_to_another_address(
    region: dict[str, str],
    status: int,
    in_the_place_of_s3: HttpStore,
    attacker: HttpStore,
    key: Path,
) -> None:
    """Neither for a question nor for a put, whose body it would send along."""
    there = in_the_place_of_s3
    there.answer = lambda method, path: Answer(
        status, headers={"Location": attacker.address + path, **region}
    )
    store = Store("s3://bucket/vault")
    for work in (
        lambda: Vault.open("s3://bucket/vault", keys.key_file(key)),
        lambda: store.names("objects", OBJECT_NAME),
        lambda: store.put("manifest", b"sealed", new=True),
        lambda: store.read_range("manifest", 0, 9),
    ):
        with pytest.raises(StoreFailed, match=f"redirects to {attacker.address}, and nothing"):
            work()
    assert {headers.get("X-Amz-Security-Token") for _, _, headers, _ in there.requests} == {
        "the session's token"
    }
    assert attacker.requests == []
