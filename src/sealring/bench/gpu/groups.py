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

SETTABLE: Final = ("host", "peer", "nccl")
WIRES: Final = (*SETTABLE, "hosts")
"""`hosts` stands for two hosts, each with half of the ranks: peer memory inside, NCCL between."""
BY_NCCL: Final = ("nccl", "hosts")


def environment_for(*wires: str) -> dict[str, str]:
    """What workers need that use these: NCCL's wire would wait for kernels that are loaded late."""
    return {"CUDA_MODULE_LOADING": "EAGER"} if set(wires) & set(BY_NCCL) else {}


@contextmanager
def over(wire: str, rank: int = 0, ranks: int = 1) -> Iterator[None]:
    settings = {"SEALRING_GPU_WIRE": wire}
    if wire == "hosts":
        settings = {"SEALRING_GPU_WIRE": "nccl", "SEALRING_HOST": f"host-{2 * rank // ranks}"}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def sealed_over(wire: str, device: Any) -> Any:
    import torch.distributed as dist

    with over(wire, dist.get_rank(), dist.get_world_size()):
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
