"""Several ranks on one GPU, connected by the wire that a test chooses."""

from __future__ import annotations

import os

import pytest
import torch

from sealring.lab.bench.gpu import environment_for
from sealring.lab.bench.workers import nccl_on_a_shared_gpu

each_wire = pytest.mark.parametrize("wire", ["peer", "host", "links", "nccl"])


def environment_of(wire: str, **more: str) -> dict[str, str]:
    return {"SEALRING_GPU_WIRE": wire, **environment_for(wire), **more}


def enter(rank: int) -> None:
    """Prepares a worker before its first group."""
    if os.environ.get("SEALRING_GPU_WIRE") == "nccl":
        os.environ.update(nccl_on_a_shared_gpu(rank))
    torch.cuda.set_device(0)
