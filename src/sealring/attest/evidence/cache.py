"""The vendors' lists and statements about their hardware, fetched beforehand, in one folder.

*.crl      revocation lists, DER or PEM
*.ocsp     OCSP answers, DER
*.json     Intel collateral, as dcap-qvl writes it
*.swidtag  NVIDIA's reference measurements, also *.xml
*.pem      certificates of AMD's issuers, for guests that send only their chip's certificate

No check waits for a vendor's server, and none uses anything out of date. Lists and collateral carry
their dates, and every verdict shows how old they are.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509 import ocsp

from sealring.attest.evidence.nvidia_reference import Reference, verify_reference
from sealring.attest.evidence.policy import Policy, parse_policy
from sealring.attest.evidence.trust import Collateral, Trust, parse_collateral
from sealring.core.identity.loading import (
    certificates_from_pem,
    ocsp_response_from_der,
    revocation_list_from,
)
from sealring.errors import AttestationError, BadPolicy, ConfigurationError
from sealring.formats.files import read_public


@dataclass(frozen=True, slots=True)
class Cache:
    lists: tuple[x509.CertificateRevocationList, ...] = ()
    answers: tuple[ocsp.OCSPResponse, ...] = ()
    collateral: tuple[Collateral, ...] = ()
    references: tuple[Reference, ...] = ()
    issuers: tuple[bytes, ...] = ()
    """Certificates in DER."""
    expired: tuple[str, ...] = ()
    """Reference files that are not valid now, each with the reason. They are not used."""

    def trust(self, policy: Policy, now: datetime | None = None) -> Trust:
        """A Trust with the pinned roots, the policy's roots, and all of this cache."""
        return self.trust_roots(policy.simulated_roots, policy.tpm_roots, now)

    def trust_roots(
        self, simulated: frozenset[str], tpm: frozenset[str], now: datetime | None
    ) -> Trust:
        return Trust(
            now or datetime.now(UTC),
            self.lists,
            self.answers,
            tpm=tpm,
            simulated=simulated,
            collateral=self.collateral,
            references=self.references,
            issuers=self.issuers,
        )


def read_cache(folder: Path, now: datetime | None = None) -> Cache:
    """Reads the folder. References' signatures are checked at `now`, their dates at each use."""
    collateral, references, expired = [], [], []
    issuers: list[bytes] = []
    try:
        paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as problem:
        raise ConfigurationError(f"the cache {folder} cannot be read: {problem}") from None
    lists = tuple(read_list(path) for path in paths if path.suffix == ".crl")
    answers = tuple(read_answer(path) for path in paths if path.suffix == ".ocsp")
    trust = Trust(now or datetime.now(UTC), lists=lists, answers=answers)
    for path in paths:
        if path.suffix == ".json":
            collateral.append(_collateral(path))
        elif path.suffix in (".swidtag", ".xml"):
            content = read_public(path, "the reference measurements", ConfigurationError)
            try:
                references.append(verify_reference(content, trust))
            except AttestationError as refusal:
                expired.append(f"{path.name}: {refusal}")
        elif path.suffix == ".pem":
            issuers += read_certificates(path)
        elif path.suffix not in (".crl", ".ocsp"):
            raise ConfigurationError(
                f"{path} is not a .crl, .ocsp, .json, .swidtag, .xml or .pem: the cache holds "
                "nothing else"
            )
    return Cache(
        lists, answers, tuple(collateral), tuple(references), tuple(issuers), tuple(expired)
    )


def read_certificates(path: Path) -> tuple[bytes, ...]:
    content = read_public(path, "the issuers' certificates", ConfigurationError)
    refusal = ConfigurationError(f"{path} holds no certificates in PEM")
    found = certificates_from_pem(content, refusal)
    return tuple(one.public_bytes(Encoding.DER) for one in found)


def read_list(path: Path) -> x509.CertificateRevocationList:
    content = read_public(path, "the revocation list", ConfigurationError)
    return revocation_list_from(content, ConfigurationError(f"{path} holds no revocation list"))


def read_answer(path: Path) -> ocsp.OCSPResponse:
    content = read_public(path, "the OCSP answer", ConfigurationError)
    refusal = ConfigurationError(f"{path} holds no OCSP answer")
    answer = ocsp_response_from_der(content, refusal)
    if answer.response_status is not ocsp.OCSPResponseStatus.SUCCESSFUL:
        raise ConfigurationError(
            f"{path} holds the OCSP error {answer.response_status.name}: ask again"
        )
    return answer


def _collateral(path: Path) -> Collateral:
    content = read_public(path, "the collateral", ConfigurationError)
    try:
        return parse_collateral(content.decode())
    except (ConfigurationError, UnicodeDecodeError):
        raise ConfigurationError(f"{path} is not Intel collateral: fetch it again") from None


_LOG = logging.getLogger("sealring")


def read_policy(path: Path) -> tuple[Policy, str]:
    """The policy, and the digest that names it in tokens and certificates."""
    content = read_public(path, "the policy", BadPolicy)
    try:
        return parse_policy(content.decode()), hashlib.sha256(content).hexdigest()
    except UnicodeDecodeError:
        raise BadPolicy(f"the policy {path} is not UTF-8 text") from None


def trust_in(policy: Policy, folder: Path | None) -> Callable[[], Trust]:
    """Returns a function that gives Trust at the present time. It reads a changed folder again.

    A folder that cannot be read at the start is an error. Later, the content that was read before
    stays in use, with its dates, and the log says so: a file may be half written at that moment.
    """
    if folder is None:
        return lambda: Cache().trust(policy)
    kept = _Kept(folder)
    return lambda: kept.cache().trust(policy)


class _Kept:
    """The content of a folder, read as a whole, and again after a change."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._seen = _state(folder)
        self._cache = read_cache(folder)
        self._read_at = datetime.now(UTC)

    def cache(self) -> Cache:
        with self._lock:
            try:
                now = _state(self._folder)
                if now != self._seen:
                    # Tried once for each state of the folder, whether it succeeds or not.
                    self._seen = now
                    self._cache, self._read_at = read_cache(self._folder), datetime.now(UTC)
            except ConfigurationError as problem:
                _LOG.error(
                    "%s. What was read of the cache at %s stays in use; put new files there under "
                    "another name and rename them",
                    problem, f"{self._read_at:%Y-%m-%d %H:%M:%S} UTC",
                )  # fmt: skip
            return self._cache


def _state(folder: Path) -> tuple[tuple[str, int, int], ...]:
    try:
        found = [(path.name, path.stat()) for path in folder.iterdir()]
    except OSError as problem:
        raise ConfigurationError(f"the cache {folder} cannot be read: {problem}") from None
    return tuple(sorted((name, each.st_mtime_ns, each.st_size) for name, each in found))
