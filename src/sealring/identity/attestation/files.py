"""What evidence is judged by, read from files: the policy, and the vendors' lists."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from cryptography import x509

from sealring.errors import BadPolicy, ConfigurationError
from sealring.identity.attestation.policy import Policy
from sealring.identity.attestation.policy_file import parse_policy
from sealring.identity.attestation.roots import Trust
from sealring.identity.private_files import read_public


def read_policy(path: Path) -> tuple[Policy, str]:
    """The policy, and the digest by which tokens and certificates name it."""
    content = read_public(path, "the policy", BadPolicy)
    try:
        return parse_policy(content.decode()), hashlib.sha256(content).hexdigest()
    except UnicodeDecodeError:
        raise BadPolicy(f"the policy {path} is not UTF-8 text") from None


def trust_in(policy: Policy, directory: Path | None) -> Callable[[], Trust]:
    """Trust at the present time; what lies in `directory` is read again when it changes there."""
    seen: tuple[tuple[str, int], ...] | None = None
    lists: tuple[x509.CertificateRevocationList, ...] = ()

    def trust() -> Trust:
        nonlocal seen, lists
        now = _state(directory)
        if now != seen:
            lists = tuple(read_list(Path(name)) for name, _ in now)
            seen = now
        return Trust.pinned(simulated=policy.simulated_roots, lists=lists)

    trust()  # what cannot be read is better said at the start
    return trust


def _state(directory: Path | None) -> tuple[tuple[str, int], ...]:
    if directory is None:
        return ()
    try:
        files = [path for path in directory.iterdir() if path.suffix in {".crl", ".pem", ".der"}]
        return tuple(sorted((str(path), path.stat().st_mtime_ns) for path in files))
    except OSError as problem:
        raise ConfigurationError(f"{directory} cannot be read: {problem.strerror}") from None


def read_list(path: Path) -> x509.CertificateRevocationList:
    content = read_public(path, "the revocation list", ConfigurationError)
    try:
        if content.startswith(b"-----"):
            return x509.load_pem_x509_crl(content)
        return x509.load_der_x509_crl(content)
    except ValueError:
        raise ConfigurationError(f"{path} holds no revocation list") from None
