"""What can be set from outside, read once when a group is made."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, cast

from sealring import _native, limits
from sealring.core.engine.cuda.wires import CudaWait, Wire
from sealring.core.group.cores import usable_cores
from sealring.core.schedule import Algorithm, Operation
from sealring.core.schedule.choose import NOTHING_SET, parse_fixed
from sealring.core.schedule.table import AlgorithmTable, parse_table, shipped_table
from sealring.errors import ConfigurationError

Transport = Literal["auto", "tcp", "shm"]
TRANSPORTS: Final = ("auto", "tcp", "shm")
CUDA_WAITS: Final = ("auto", "stream", "host")
MAX_TABLE_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Settings:
    transport: Transport = "auto"
    """Shared memory between ranks of one host and TCP otherwise, or one of them for all."""
    record_bytes: int = limits.RECORD_BYTES
    rekey_bytes: int = limits.REKEY_BYTES
    algorithms: Mapping[Operation, Algorithm] = field(default_factory=dict)
    """Instead of the table's choice; the same on all ranks."""
    table: AlgorithmTable = field(default_factory=shipped_table)
    """The same on all ranks."""
    host: str = field(default_factory=lambda: socket.gethostname() or "unnamed")
    """What this worker's host is called: ranks with one name share one."""
    gpu_wire: Wire = Wire.AUTO
    """Which way records take between GPUs; the same on all ranks."""
    cuda_wait: CudaWait = "auto"
    """Who waits for a call with CUDA tensors: the host, or only the current stream."""
    threads: int | None = None
    """How many threads share a large collective; None: as many as this rank has cores."""

    @property
    def shared(self) -> dict[str, int]:
        """What every rank must have set alike; the handshake compares it."""
        return {
            "record_bytes": self.record_bytes,
            "ring_bytes": limits.RING_BYTES,
            "algorithm_table": self.table.digest(),
            "gpu_wire": list(Wire).index(self.gpu_wire),
            "gpu_wire_slots": limits.WIRE_SLOTS,
            "gpu_wire_bytes": limits.WIRE_PAYLOAD_BYTES,
            **{
                f"algorithm.{operation.name.lower()}": algorithm.value
                for operation, algorithm in self.algorithms.items()
            },
        }


def read_settings(environ: Mapping[str, str]) -> Settings:
    transport = _one_of(environ, "SEALRING_TRANSPORT", TRANSPORTS)
    record_bytes = _bytes(
        environ, "SEALRING_RECORD_BYTES", limits.RECORD_BYTES, 1 << 10, limits.MAX_PAYLOAD_BYTES
    )
    if record_bytes % 64:
        raise ConfigurationError("SEALRING_RECORD_BYTES must be a multiple of 64")
    rekey_bytes = _bytes(environ, "SEALRING_REKEY_BYTES", limits.REKEY_BYTES, 1, limits.REKEY_BYTES)
    fixed = environ.get("SEALRING_ALGORITHM")
    return Settings(
        cast(Transport, transport),
        record_bytes,
        rekey_bytes,
        parse_fixed(fixed, "SEALRING_ALGORITHM") if fixed else NOTHING_SET,
        _table(environ),
        environ.get("SEALRING_HOST") or socket.gethostname() or "unnamed",
        Wire(_one_of(environ, "SEALRING_GPU_WIRE", tuple(Wire))),
        cast(CudaWait, _one_of(environ, "SEALRING_CUDA_WAIT", CUDA_WAITS)),
        _threads(environ),
    )


# Parsed when this module is loaded: when a group forms, all ranks would wait for it.
shipped_table()


def _one_of(environ: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str:
    """The first of them is the default."""
    chosen = environ.get(name) or choices[0]
    if chosen not in choices:
        raise ConfigurationError(f"{name} is {chosen!r}; set it to one of {', '.join(choices)}")
    return chosen


def _table(environ: Mapping[str, str]) -> AlgorithmTable:
    path = environ.get("SEALRING_ALGORITHM_TABLE")
    if not path:
        return shipped_table()
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_TABLE_BYTES + 1)
    except OSError as problem:
        raise ConfigurationError(
            f"SEALRING_ALGORITHM_TABLE: {path} cannot be read: {problem.strerror}"
        ) from None
    if len(content) > MAX_TABLE_BYTES:
        raise ConfigurationError(
            f"SEALRING_ALGORITHM_TABLE: {path} is longer than {MAX_TABLE_BYTES} bytes"
        )
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise ConfigurationError(f"SEALRING_ALGORITHM_TABLE: {path} is not UTF-8") from None
    return parse_table(text, f"SEALRING_ALGORITHM_TABLE: {path}").over(shipped_table())


def _threads(environ: Mapping[str, str]) -> int | None:
    text = environ.get("SEALRING_THREADS")
    if not text:
        return None
    cores = usable_cores()
    most = min(cores, _native.MAX_LANES)
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise ConfigurationError(
            f"SEALRING_THREADS is {text!r}; it must be a number from 1 to {most}: this worker may "
            f"use {cores} cores"
        )
    return int(text)


def _bytes(environ: Mapping[str, str], name: str, default: int, low: int, high: int) -> int:
    text = environ.get(name)
    if not text:
        return default
    if not text.isdecimal() or not low <= int(text) <= high:
        raise ConfigurationError(f"{name} is {text!r}; it must be a number from {low} to {high}")
    return int(text)
