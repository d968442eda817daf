"""etcd on another machine is used only over TLS, with certificates on both sides."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from sealring.attest.broker.etcd import EtcdStore
from sealring.errors import BrokerRefusal, BrokerUnavailable, ConfigurationError
from tests.attest.broker.etcd_cluster import Cluster, needs_etcd
from tests.attest.broker.local import Place, running
from tests.codes import coded


class Files:
    """An authority, and the certificates that it issued to etcd and to a broker."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, directory.name)])
        authority = self._builder(self._name, self._key).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        self.ca = directory / "ca.pem"
        self.ca.write_bytes(authority.sign(self._key, SHA256()).public_bytes(Encoding.PEM))

    def issue(self, name: str) -> tuple[Path, Path]:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        certificate = (
            self._builder(subject, key)
            .add_extension(
                x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
                critical=False,
            )
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .sign(self._key, SHA256())
        )
        files = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        files[0].write_bytes(certificate.public_bytes(Encoding.PEM))
        files[1].write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return files

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey
    ) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return x509.CertificateBuilder(
            self._name, subject, key.public_key(), x509.random_serial_number(),
            now - timedelta(hours=1), now + timedelta(days=1),
        )  # fmt: skip


def options(ca: Path, certificate: Path, key: Path) -> str:
    return f"?ca={ca}&certificate={certificate}&key={key}"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def etcd(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    certificate, key = files.issue("etcd")
    tls = [
        "--cert-file", str(certificate), "--key-file", str(key),
        "--client-cert-auth", "--trusted-ca-file", str(files.ca),
    ]  # fmt: skip
    started = Cluster(tmp_path_factory.mktemp("etcd"), 1, tls)
    yield started
    started.close()


@needs_etcd
def test_a_broker_joins_workers_over_tls_with_its_certificate(
    etcd: Cluster, files: Files, tmp_path: Path
) -> None:
    place = Place(tmp_path)
    url = etcd.url + options(files.ca, *files.issue("broker"))
    with running(place, store=EtcdStore(url, place.keys.name, place.keys.store_key)) as broker:
        broker.join(0)
        with pytest.raises(BrokerRefusal, check=coded("broker.rank_taken")):
            broker.join(0)


@needs_etcd
@pytest.mark.parametrize("wrong", ["its certificate", "etcd's authority"])
@pytest.mark.threat("B12")
def test_a_stranger_on_either_side_is_refused(
    wrong: str, etcd: Cluster, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sealring.attest.broker.etcd._COMMIT_SECONDS", 1.0)
    stranger = Files(tmp_path)
    if wrong == "its certificate":
        url = etcd.url + options(files.ca, *stranger.issue("broker"))
    else:
        url = etcd.url + options(stranger.ca, *files.issue("broker"))
    store = EtcdStore(url, "name", bytes(32))
    with pytest.raises(BrokerUnavailable, check=coded("broker.store_unavailable")):
        store.submit(lambda view: view.get("x")).result()
    store.close()


@pytest.mark.parametrize("members", ["etcd.example:2379", "127.0.0.1:2379,10.0.0.1:2379"])
@pytest.mark.threat("B12")
def test_another_machine_is_not_spoken_to_in_the_clear(members: str) -> None:
    with pytest.raises(ConfigurationError, match="in the clear"):
        EtcdStore(f"etcd://{members}", "name", bytes(32))
