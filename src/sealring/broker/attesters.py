"""What on this machine makes evidence for a worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, Protocol

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from sealring.errors import ConfigurationError, NoIdentity
from sealring.identity.attestation import Challenge, Evidence
from sealring.identity.attestation.simulated import KIND as SIMULATED
from sealring.identity.attestation.simulated import Simulator
from sealring.identity.private_files import read_private, read_public, write_private, write_public

_SIMULATOR_DAYS: Final = 365
_MEASUREMENT_BYTES: Final = 32


class Attester(Protocol):
    @property
    def kind(self) -> str: ...
    def attest(self, challenge: Challenge) -> Evidence: ...


@dataclass(frozen=True, slots=True)
class SimulatedAttester:
    """SIMULATED evidence, from a directory that `sealring broker simulator` made."""

    simulator: Simulator
    measurement: bytes

    @property
    def kind(self) -> str:
        return SIMULATED

    def attest(self, challenge: Challenge) -> Evidence:
        return self.simulator.attest(challenge, self.measurement)


def find_attester(environ: Mapping[str, str]) -> Attester:
    """What this worker attests itself with."""
    if directory := environ.get("SEALRING_SIMULATOR"):
        return open_simulator(Path(directory))
    raise NoIdentity(
        "nothing here makes evidence for a broker: run on a machine whose evidence sealring can "
        "make, or, to try things out, set SEALRING_SIMULATOR to a directory of `sealring broker "
        "simulator`, which the policy must name"
    )


def make_simulator(directory: Path) -> SimulatedAttester:
    """A SIMULATED authority of one's own, and a measurement for its workers to show."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as problem:
        raise ConfigurationError(f"{directory} cannot be made: {problem.strerror}") from problem
    simulator = Simulator.create(datetime.now(UTC), timedelta(days=_SIMULATOR_DAYS))
    key = simulator.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_private(directory / "simulator.key", key)
    write_public(directory / "simulator.pem", simulator.certificate.public_bytes(Encoding.PEM))
    # Recognisable at sight, and no digest of anything.
    measurement = b"SIMULATED".ljust(_MEASUREMENT_BYTES, b"\0")
    return SimulatedAttester(simulator, measurement)


def open_simulator(directory: Path) -> SimulatedAttester:
    pem = read_public(directory / "simulator.pem", "the simulator", ConfigurationError)
    key_pem = read_private(directory / "simulator.key", "the simulator's key", ConfigurationError)
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        key = load_pem_private_key(key_pem, password=None)
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigurationError(f"{directory} does not hold a simulator")
    measurement = b"SIMULATED".ljust(_MEASUREMENT_BYTES, b"\0")
    return SimulatedAttester(Simulator(certificate, key), measurement)
