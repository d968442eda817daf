"""Groups of ranks on one GPU, each with a wire of its own; one of them without cryptography.

Which wire a group has is read from the environment when it is made, so groups of several wires can
be in one process; the ranks agree on it when the group meets its first tensor.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from typing import Any, Final

from sealring.errors import ConfigurationError

WIRES: Final = ("host", "peer", "nccl")
_SETTING: Final = "SEALRING_GPU_WIRE"


def environment_for(*wires: str) -> dict[str, str]:
    """What workers need that use these: NCCL's wire would wait for kernels that are loaded late."""
    return {"CUDA_MODULE_LOADING": "EAGER"} if "nccl" in wires else {}


@contextmanager
def over(wire: str) -> Iterator[None]:
    before = os.environ.get(_SETTING)
    os.environ[_SETTING] = wire
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SETTING]
        else:
            os.environ[_SETTING] = before


def sealed_over(wire: str, device: Any) -> Any:
    import torch.distributed as dist

    with over(wire):
        group: Any = dist.new_group(backend="sealring")
    _meet_a_tensor(group, device)
    if device.type == "cuda" and not group._engine.wired:
        raise ConfigurationError(f"the ranks' GPUs have no such wire: {wire}")
    return group


def unsealed_over(wire: str, device: Any) -> Any:
    """The same path by kernels that leave the cryptography out (bench/unsealed.cu)."""
    from unittest.mock import patch

    from sealring.engine.cuda import attachment

    # Nothing that can be set from outside leads here.
    unsealed = attachment.Kernels(unsealed_text, "_unsealed")
    with patch.object(attachment, "SHIPPED", unsealed):
        return sealed_over(wire, device)


def unsealed_text() -> Mapping[str, bytes]:
    from sealring.engine.cuda.compiler import kernel_text

    own = (resources.files("sealring.bench") / "unsealed.cu").read_bytes()
    return {**kernel_text(), "unsealed.cu": own}


def _meet_a_tensor(group: Any, device: Any) -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.zeros(1, device=device), group=group)
