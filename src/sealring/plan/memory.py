"""What a rank holds while it trains with Adam, by the way in which the model is spread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from sealring import limits
from sealring.plan.collectives import Cluster
from sealring.plan.model import Model

Precision = Literal["fp32", "bf16", "fp16"]

ITEMSIZE: Final[dict[Precision, int]] = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Of parameters and gradients."""
_OPTIMIZER_BYTES: Final[dict[Precision, int]] = {"fp32": 8, "bf16": 12, "fp16": 12}
"""Adam's two moments in float32, and a float32 copy of parameters that are shorter."""


@dataclass(frozen=True, slots=True)
class Memory:
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    """DDP's buckets, FSDP's gathered units."""
    host_links: float
    """sealring's own, in the host's memory: rings and record buffers of all links."""

    @property
    def device_bytes(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers


def link_bytes(cluster: Cluster) -> float:
    """Every rank has a link to every other: two rings in shared memory, or two records' buffers."""
    inside = min(cluster.per_host, cluster.ranks) - 1
    between = cluster.ranks - 1 - inside
    return float(inside * 2 * limits.RING_BYTES + between * 2 * limits.RECORD_BYTES)


def ddp_memory(model: Model, cluster: Cluster, precision: Precision, batch: int) -> Memory:
    size = ITEMSIZE[precision]
    held = float(model.count * size)
    return Memory(
        parameters=held,
        gradients=held,
        optimizer=float(model.count * _OPTIMIZER_BYTES[precision]),
        activations=model.activation_values * batch * size,
        buffers=held,  # buckets are a second copy of the gradients
        host_links=link_bytes(cluster),
    )


def fsdp_memory(
    model: Model, cluster: Cluster, precision: Precision, batch: int, largest_unit: int
) -> Memory:
    size = ITEMSIZE[precision]
    held = model.count * size / cluster.ranks
    return Memory(
        parameters=held,
        gradients=held,
        optimizer=model.count * _OPTIMIZER_BYTES[precision] / cluster.ranks,
        activations=model.activation_values * batch * size,
        # The unit that computes and the one that is gathered meanwhile, and its gradients.
        buffers=3.0 * largest_unit * size,
        host_links=link_bytes(cluster),
    )


def sharded_memory(
    model: Model, cluster: Cluster, precision: Precision, tensor: int, pipeline: int
) -> Memory:
    """Tensor x pipeline parallelism with microbatches of one sample: as many are under way in the
    first stage as there are stages."""
    size = ITEMSIZE[precision]
    shards = tensor * pipeline
    held = model.count * size / shards
    return Memory(
        parameters=held,
        gradients=held,
        optimizer=model.count * _OPTIMIZER_BYTES[precision] / shards,
        activations=model.activation_values * size / tensor,
        buffers=held,
        host_links=link_bytes(cluster),
    )
