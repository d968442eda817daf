"""Where a bench runs: on this machine's cores, or on its GPUs, which ranks take in turn."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from sealring.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

KINDS: Final = ("cpu", "cuda", "auto")


@dataclass(frozen=True, slots=True)
class Place:
    kind: Literal["cpu", "cuda"] = "cpu"
    name: str = "cpu"
    """As results call it: `cpu`, or the GPU's name."""
    gpus: int = 0

    @property
    def backend(self) -> Literal["gloo", "nccl"]:
        """Torch's own for tensors there."""
        return "nccl" if self.kind == "cuda" else "gloo"

    def shared_by(self, ranks: int) -> bool:
        """Whether several of the ranks are on one GPU."""
        return self.kind == "cuda" and ranks > self.gpus

    def enter(self, rank: int, ranks: int) -> torch.device:
        """In a worker, before it makes a group: where this rank's tensors are from now on."""
        import torch

        if self.kind == "cpu":
            return torch.device("cpu")
        if self.shared_by(ranks):
            os.environ.update(nccl_on_a_shared_gpu(rank))
        device = torch.device("cuda", rank % self.gpus)
        torch.cuda.set_device(device)
        # Products of float32 as training on GPUs has them: by the tensor cores, in TF32.
        torch.set_float32_matmul_precision("high")
        return device

    def free_bytes(self) -> int:
        """Of memory: the machine's, or that of the GPU that has least."""
        if self.kind == "cpu":
            return _available_memory()
        import torch

        return min(torch.cuda.mem_get_info(index)[0] for index in range(self.gpus))


CPU: Final = Place()


def settle(device: torch.device) -> None:
    """Waits until what the device was given to do is done."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def find_place(wanted: str) -> Place:
    """`cpu`, `cuda`, or `auto`: GPUs where torch finds any."""
    import torch

    if wanted not in KINDS:
        raise ConfigurationError(f"--device is {wanted!r}; it must be one of {', '.join(KINDS)}")
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return CPU
    if not torch.cuda.is_available():
        raise ConfigurationError("torch finds no GPU here: measure on CPUs, or where there is one")
    return Place("cuda", str(torch.cuda.get_device_name(0)), torch.cuda.device_count())


def nccl_on_a_shared_gpu(rank: int) -> dict[str, str]:
    """NCCL refuses two ranks of one host on one GPU. With a host's name each it takes them for
    different hosts and goes by the loopback, which is slower than what it does between GPUs."""
    return {
        "NCCL_HOSTID": f"rank-{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_CUMEM_ENABLE": "0",
    }


SHARED_GPU: Final = (
    "several ranks share a GPU: each has an NCCL_HOSTID of its own, and NCCL goes by the loopback, "
    "without peer and shared memory"
)
"""What the output says where nccl_on_a_shared_gpu() was needed."""


def _available_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    return 1 << 62
