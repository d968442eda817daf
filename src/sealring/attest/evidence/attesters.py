"""Attesters, which make evidence on a worker's machine. SEALRING_ATTESTER names one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, Protocol

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from sealring.attest.evidence.agent_evidence import CocoMachine
from sealring.attest.evidence.encoding import from_base64, to_base64
from sealring.attest.evidence.evidence import Challenge, DeviceEvidence, Evidence
from sealring.attest.evidence.guest import AzureMachine, TsmMachine
from sealring.attest.evidence.nvidia import collect_gpus
from sealring.attest.evidence.policy import Policy
from sealring.attest.evidence.simulated import KIND as SIMULATED
from sealring.attest.evidence.simulated import Simulator
from sealring.attest.evidence.tpm.commands import Tpm
from sealring.attest.evidence.tpm.ima import IMA_LOG
from sealring.attest.evidence.tpm.machine import (
    CertifiedTpmMachine,
    Logs,
    TpmMachine,
    read_issuers,
)
from sealring.attest.evidence.tpm.verify import KIND as TPM
from sealring.core import settings
from sealring.core.identity.loading import certificate_from_pem
from sealring.core.identity.process import read_private
from sealring.errors import BrokerError, ConfigurationError
from sealring.formats.files import read_public, write_private, write_public, writing

_SIMULATOR_DAYS: Final = 365
_MEASUREMENT_BYTES: Final = 32


class Attester(Protocol):
    @property
    def kind(self) -> str: ...
    def introduce(self) -> dict[str, Any]:
        """What the hardware says of itself before it gets a challenge. Mostly empty."""

    def attest(self, nonce: bytes, public_key: bytes, extra: dict[str, Any]) -> Evidence:
        """Makes evidence. `extra` is what the broker sent with the nonce."""


@dataclass(frozen=True, slots=True)
class SimulatedAttester:
    """SIMULATED evidence, from a directory that `sealring policy new --simulator` made."""

    simulator: Simulator
    measurement: bytes

    @property
    def kind(self) -> str:
        return SIMULATED

    def introduce(self) -> dict[str, Any]:
        return {}

    def attest(self, nonce: bytes, public_key: bytes, extra: dict[str, Any]) -> Evidence:
        return self.simulator.attest(Challenge(nonce, public_key), self.measurement)


class GuestTee(Protocol):
    """A guest's TEE: TsmMachine, AzureMachine, CertifiedTpmMachine, CocoMachine."""

    @property
    def kind(self) -> str: ...
    def attest(
        self, nonce: bytes, public_key: bytes, devices: tuple[DeviceEvidence, ...] = ()
    ) -> Evidence: ...


@dataclass(frozen=True, slots=True)
class GuestAttester:
    """A confidential guest, with its GPUs if the policy asks for them."""

    machine: GuestTee
    gpus: bool

    @property
    def kind(self) -> str:
        return self.machine.kind

    def introduce(self) -> dict[str, Any]:
        return {}

    def attest(self, nonce: bytes, public_key: bytes, extra: dict[str, Any]) -> Evidence:
        asked = Challenge(nonce, public_key).device_nonce(self.kind)
        devices = collect_gpus(asked) if self.gpus else ()
        return self.machine.attest(nonce, public_key, devices)


@dataclass(frozen=True, slots=True)
class TpmAttester:
    """This machine's TPM 2.0, with its GPUs if the policy asks for them."""

    machine: TpmMachine
    gpus: bool = False

    @property
    def kind(self) -> str:
        return TPM

    def introduce(self) -> dict[str, Any]:
        introduction = self.machine.introduction()
        return {
            "chain": _texts(introduction.chain),
            "ak": to_base64(introduction.ak),
            "others": [_texts(chain) for chain in introduction.others],
        }

    def attest(self, nonce: bytes, public_key: bytes, extra: dict[str, Any]) -> Evidence:
        refusal = BrokerError(
            "the broker sent no credential for this TPM", code="broker.malformed_answer"
        )
        blob = from_base64(extra.get("credential"), refusal)
        sealed = extra.get("others", [])
        if not isinstance(sealed, list):
            raise refusal
        others = [None if one is None else from_base64(one, refusal) for one in sealed]
        asked = Challenge(nonce, public_key).device_nonce(TPM)
        return self.machine.attest(
            nonce, public_key, blob, collect_gpus(asked) if self.gpus else (), others
        )


def _texts(chain: Sequence[bytes]) -> list[str]:
    return [to_base64(one) for one in chain]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What evidence must show besides the machine itself."""

    gpus: bool = False
    ima: bool = False
    """The kernel's list of measured files."""

    @classmethod
    def by(cls, policy: Policy) -> Wanted:
        return cls(gpus=policy.devices is not None, ima=policy.shows_files)

    @property
    def logs(self) -> Logs:
        return Logs(files=IMA_LOG if self.ima else None)


OpenMachine = Callable[[Callable[[], Tpm], tuple[bytes, ...], Logs], GuestTee]
"""Opens a machine. Takes its TPM, the certificates that it does not have itself, and the logs to
show."""
_MACHINES: Final[Mapping[str, OpenMachine]] = {
    "tsm": lambda tpm, chain, logs: TsmMachine(chain),
    "azure": lambda tpm, chain, logs: AzureMachine(tpm(), chain, logs=logs),
    "tpm-ak": lambda tpm, chain, logs: CertifiedTpmMachine(tpm(), chain, logs),
    "coco": lambda tpm, chain, logs: CocoMachine(chain),
}


def find_attester(environ: Mapping[str, str], wanted: Wanted) -> Attester:
    """The attester that SEALRING_ATTESTER names."""
    source = settings.ATTESTER.read(environ)
    name, given, path = source.partition(":")
    known = (*_MACHINES, TPM)
    if name == SIMULATED and path:
        return open_simulator(Path(path))
    if name not in known or (given and not path):
        raise settings.ATTESTER.refused(
            source,
            f"set it to {', '.join(known)}, each with :FILE for certificates that the machine does "
            f"not have, or to {SIMULATED}:DIR",
        )
    chain = _read_chain(path) if path else ()

    def tpm() -> Tpm:
        return Tpm.open(settings.TPM.read(environ))

    if name == TPM:
        return TpmAttester(TpmMachine(tpm(), chain, logs=wanted.logs), wanted.gpus)
    return GuestAttester(_MACHINES[name](tpm, chain, wanted.logs), wanted.gpus)


def _read_chain(path: str) -> tuple[bytes, ...]:
    """Certificates that the machine does not have itself: the chip's, or the TPM maker's."""
    pem = read_public(Path(path), "the hardware's certificates", ConfigurationError)
    try:
        return read_issuers(pem)
    except ValueError:
        raise ConfigurationError(f"{path} holds no PEM certificates") from None


def make_simulator(directory: Path) -> SimulatedAttester:
    """Makes a new SIMULATED authority, with a measurement that its workers show."""
    with writing(directory, "made"):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    simulator = Simulator.create(datetime.now(UTC), timedelta(days=_SIMULATOR_DAYS))
    key = simulator.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_private(directory / "simulator.key", key)
    write_public(directory / "simulator.pem", simulator.certificate.public_bytes(Encoding.PEM))
    # Plainly readable, and the digest of nothing.
    measurement = b"SIMULATED".ljust(_MEASUREMENT_BYTES, b"\0")
    return SimulatedAttester(simulator, measurement)


def open_simulator(directory: Path) -> SimulatedAttester:
    pem = read_public(directory / "simulator.pem", "the simulator", ConfigurationError)
    key_pem = read_private(directory / "simulator.key", "the simulator's key", ConfigurationError)
    refusal = ConfigurationError(f"{directory} does not hold a simulator")
    certificate = certificate_from_pem(pem, refusal)
    try:
        key = load_pem_private_key(key_pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise refusal
    measurement = b"SIMULATED".ljust(_MEASUREMENT_BYTES, b"\0")
    return SimulatedAttester(Simulator(certificate, key), measurement)
