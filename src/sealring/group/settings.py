"""What can be set from outside, read once when a group is made."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, cast

from sealring import limits
from sealring.errors import ConfigurationError
from sealring.recorder.process import trace_directory
from sealring.schedule import Algorithm

Transport = Literal["auto", "tcp", "shm"]
TRANSPORTS: Final = ("auto", "tcp", "shm")
TRACE_SIGNALS: Final = {"USR1": signal.SIGUSR1, "USR2": signal.SIGUSR2}


@dataclass(frozen=True, slots=True)
class Settings:
    transport: Transport = "auto"
    """Shared memory between ranks of one host and TCP otherwise, or one of them for all."""
    record_bytes: int = limits.RECORD_BYTES
    rekey_bytes: int = limits.REKEY_BYTES
    algorithm: Algorithm | None = None
    """Instead of the table's choice; the same on all ranks."""
    trace_directory: Path | None = None
    """Where the flight record goes when a collective fails."""
    trace_signal: signal.Signals | None = None
    """Which signal writes it there too."""

    @property
    def shared(self) -> dict[str, int]:
        """What every rank must have set alike; the handshake compares it."""
        return {
            "record_bytes": self.record_bytes,
            "ring_bytes": limits.RING_BYTES,
            "algorithm": 0 if self.algorithm is None else self.algorithm.value,
        }


def read_settings(environ: Mapping[str, str]) -> Settings:
    transport = environ.get("SEALRING_TRANSPORT") or "auto"
    if transport not in TRANSPORTS:
        raise ConfigurationError(
            f"SEALRING_TRANSPORT is {transport!r}; set it to one of {', '.join(TRANSPORTS)}"
        )
    record_bytes = _bytes(
        environ, "SEALRING_RECORD_BYTES", limits.RECORD_BYTES, 1 << 10, limits.MAX_PAYLOAD_BYTES
    )
    if record_bytes % 64:
        raise ConfigurationError("SEALRING_RECORD_BYTES must be a multiple of 64")
    rekey_bytes = _bytes(environ, "SEALRING_REKEY_BYTES", limits.REKEY_BYTES, 1, limits.REKEY_BYTES)
    directory, number = _tracing(environ)
    return Settings(
        cast(Transport, transport),
        record_bytes,
        rekey_bytes,
        _algorithm(environ),
        directory,
        number,
    )


def _algorithm(environ: Mapping[str, str]) -> Algorithm | None:
    names = {algorithm.name.lower(): algorithm for algorithm in Algorithm}
    value = environ.get("SEALRING_ALGORITHM", "")
    if value and value not in names:
        raise ConfigurationError(
            f"SEALRING_ALGORITHM is {value!r}; set it to one of {', '.join(names)}, or unset it"
        )
    return names.get(value)


def _tracing(environ: Mapping[str, str]) -> tuple[Path | None, signal.Signals | None]:
    directory = environ.get("SEALRING_TRACE_DIR")
    name = environ.get("SEALRING_TRACE_SIGNAL")
    if name and name not in TRACE_SIGNALS:
        raise ConfigurationError(
            f"SEALRING_TRACE_SIGNAL is {name!r}; set it to {' or '.join(TRACE_SIGNALS)}, "
            "or unset it"
        )
    if name and not directory:
        raise ConfigurationError(
            "SEALRING_TRACE_SIGNAL is set and SEALRING_TRACE_DIR is not: say where the flight "
            "record should go"
        )
    return trace_directory(directory) if directory else None, TRACE_SIGNALS[name] if name else None


def _bytes(environ: Mapping[str, str], name: str, default: int, low: int, high: int) -> int:
    text = environ.get(name)
    if not text:
        return default
    if not text.isdecimal() or not low <= int(text) <= high:
        raise ConfigurationError(f"{name} is {text!r}; it must be a number from {low} to {high}")
    return int(text)
