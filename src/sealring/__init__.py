"""sealring: a torch.distributed backend in which every byte between workers is sealed.

    torch.distributed.init_process_group("sealring")

`import torch` finds the backend by itself. Scripts import this package for its errors and tools.
This module does not import torch, because torch imports it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from sealring.errors import (
    ConfigurationError,
    GroupError,
    HandshakeError,
    SealringError,
)
from sealring.version import __version__

if TYPE_CHECKING:
    from sealring.core.group.process_group import SealedProcessGroup
    from sealring.core.sealed_only.guard import require_sealed
    from sealring.core.store import sealed_store
    from sealring.lab.plan.answer import tune
    from sealring.observe import dump_flight_record, flight_record
    from sealring.record.recording.run import record_run

__all__ = [
    "ConfigurationError",
    "GroupError",
    "HandshakeError",
    "SealedProcessGroup",
    "SealringError",
    "__version__",
    "create_group",
    "dump_flight_record",
    "flight_record",
    "record_run",
    "require_sealed",
    "sealed_store",
    "tune",
]


def create_group(
    store: Any,
    rank: int,
    size: int,
    *,
    timeout: timedelta = timedelta(minutes=30),
    name: str = "",
    job_ranks: Sequence[int] | None = None,
    job_size: int | None = None,
) -> SealedProcessGroup:
    """Makes a process group of `size` ranks that meet in `store`, without torch's default group.

    All ranks call this with the same name, and with a store (or a PrefixStore) that no other group
    uses. `job_ranks` has the ranks in the members' certificates, in the group's order, and
    `job_size` is the world size in them. Without these two, the group is a separate job. A group
    ends with shutdown() or abort(), or with the last reference to it.
    """
    from sealring.core.registration import no_collection

    with no_collection():
        from sealring.core.group import create
    return create.create_group(
        create.options_of_call(
            store, rank, size, timeout=timeout, name=name, job_ranks=job_ranks, job_size=job_size
        )
    )


# `import torch` imports this package, so names that few scripts need are loaded on first use.
_LOADED_ON_USE: Final = {
    "SealedProcessGroup": "sealring.core.group.process_group",
    "dump_flight_record": "sealring.observe",
    "flight_record": "sealring.observe",
    "record_run": "sealring.record.recording.run",
    "require_sealed": "sealring.core.sealed_only.guard",
    "sealed_store": "sealring.core.store",
    "tune": "sealring.lab.plan.answer",
}


def __getattr__(name: str) -> Any:
    if name in _LOADED_ON_USE:
        return getattr(import_module(_LOADED_ON_USE[name]), name)
    raise AttributeError(f"module 'sealring' has no attribute {name!r}")
