"""What torch can construct without making a group first: refused, because none of it is sealed."""

from __future__ import annotations

from typing import Any, Final

import torch

from sealring.core.sealed_only import symmetric
from sealring.core.sealed_only.caller import calling_line
from sealring.errors import PlaintextGroup

_GROUPS: Final = (
    "ProcessGroupGloo", "ProcessGroupNCCL", "ProcessGroupNCCL2", "ProcessGroupMPI",
    "ProcessGroupUCC", "ProcessGroupXCCL",
)  # fmt: skip


def refuse_all() -> None:
    distributed: Any = torch._C._distributed_c10d
    for name in _GROUPS:
        if (group := getattr(distributed, name, None)) is not None:
            instead = "Make the group with torch.distributed.new_group, or sealring.create_group"
            refuse_method(group, "__init__", name, instead)
            refuse_method(group, "create", name, instead)
    symmetric.watch()
    rpc: Any = getattr(torch._C, "_distributed_rpc", None)
    if (agent := getattr(rpc, "TensorPipeAgent", None)) is not None:
        instead = "Use send, recv and the object collectives of torch.distributed"
        refuse_method(agent, "__init__", "torch.distributed.rpc", instead)


def refuse_method(owner: Any, method: str, what: str, instead: str) -> None:
    """Every call of it from now on is PlaintextGroup; a second call of this changes nothing."""
    torchs = getattr(owner, method, None)
    if torchs is None or hasattr(torchs, "refused_by_sealring"):
        return

    def refuse(*_: Any, **__: Any) -> None:
        raise PlaintextGroup(
            f"{calling_line()} uses {what}, which is not sealed, and this job is sealed-only. "
            f"{instead}."
        )

    refuse.refused_by_sealring = True  # type: ignore[attr-defined]
    setattr(owner, method, refuse if method == "__init__" else staticmethod(refuse))
