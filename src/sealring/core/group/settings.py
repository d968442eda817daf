"""A group's settings, read from the environment once, when the group is made."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sealring import limits
from sealring.core import settings
from sealring.core.engine.cuda.wires import Wire
from sealring.core.schedule import Algorithm, Operation
from sealring.core.schedule.choose import NOTHING_SET, parse_fixed
from sealring.core.schedule.table import AlgorithmTable, parse_table, shipped_table
from sealring.core.settings import CudaWait, Transport
from sealring.errors import ConfigurationError
from sealring.formats.files import read_public


@dataclass(frozen=True, slots=True)
class Settings:
    transport: Transport = "auto"
    """auto: shared memory between ranks of one host, TCP otherwise. Or one of the two for all."""
    record_bytes: int = limits.RECORD_BYTES
    rekey_bytes: int = limits.REKEY_BYTES
    algorithms: Mapping[Operation, Algorithm] = field(default_factory=dict)
    """Algorithms that replace the table's choice; must be equal on all ranks."""
    table: AlgorithmTable = field(default_factory=shipped_table)
    """Chooses algorithms by size; must be equal on all ranks."""
    host: str = field(default_factory=lambda: socket.gethostname() or "unnamed")
    """The name of this worker's host. Ranks with equal names count as ranks of one host."""
    gpu_wire: Wire = Wire.AUTO
    """The way of records between GPUs; must be equal on all ranks."""
    cuda_wait: CudaWait = "auto"
    """Whether the host or only the current stream waits for a call with CUDA tensors."""
    threads: int | None = None
    """How many threads share a large collective. None: chosen by this rank's share of the cores."""

    @property
    def shared(self) -> dict[str, int]:
        """The settings that must be equal on all ranks; the handshake compares them."""
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
    fixed = settings.ALGORITHM.read(environ)
    return Settings(
        settings.TRANSPORT.read(environ),
        settings.RECORD_BYTES.read(environ),
        settings.REKEY_BYTES.read(environ),
        parse_fixed(fixed, settings.ALGORITHM.where) if fixed else NOTHING_SET,
        _table(environ),
        settings.HOST.read(environ) or socket.gethostname() or "unnamed",
        Wire(settings.GPU_WIRE.read(environ)),
        settings.CUDA_WAIT.read(environ),
        settings.THREADS.read(environ),
    )


# Parsed at import and not when a group forms, because then all ranks would wait for it.
shipped_table()


def _table(environ: Mapping[str, str]) -> AlgorithmTable:
    path = settings.ALGORITHM_TABLE.read(environ)
    if not path:
        return shipped_table()
    what = f"{settings.ALGORITHM_TABLE.where}:"
    content = read_public(Path(path), what, ConfigurationError)
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise ConfigurationError(f"{what} {path} is not UTF-8") from None
    return parse_table(text, f"{what} {path}").over(shipped_table())
