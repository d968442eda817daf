"""sealring: a torch.distributed backend in which every byte between workers is sealed.

    torch.distributed.init_process_group("sealring")

`import torch` finds the backend by itself; this package is imported for its errors and tools.
Nothing here imports torch: torch imports us.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sealring.errors import (
    ConfigurationError,
    GroupError,
    HandshakeError,
    SealringError,
)

if TYPE_CHECKING:
    from sealring.plan.tuning import tune
    from sealring.recorder import dump_flight_record, flight_record

__version__ = "0.1.0"

__all__ = [
    "ConfigurationError",
    "GroupError",
    "HandshakeError",
    "SealringError",
    "__version__",
    "dump_flight_record",
    "flight_record",
    "tune",
]


def __getattr__(name: str) -> Any:
    # `import torch` imports this package: what few scripts need is loaded when they ask for it.
    if name in ("dump_flight_record", "flight_record"):
        from sealring import recorder

        return getattr(recorder, name)
    if name == "tune":
        from sealring.plan.tuning import tune

        return tune
    raise AttributeError(f"module 'sealring' has no attribute {name!r}")
