"""all_reduce of sparse tensors: the ranks' entries are gathered and added up on every rank.

How many entries the others have is known only once they have said so: one call, several
collectives. What a peer says of its entries is checked before memory is made or indexed by it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from sealring.engine.collective import Collective
from sealring.errors import OutOfStep, Unsupported
from sealring.group import arguments
from sealring.group.memory import Slot, slot

Gather = Callable[[torch.Tensor, list[Slot]], Collective]
"""The all_gather of one tensor per rank, all of one size; the last slot is our own's."""


def check(tensor: torch.Tensor, op: Any) -> None:
    if tensor.layout is not torch.sparse_coo:
        raise Unsupported(
            f"all_reduce: {tensor.layout} tensors are not supported. "
            "Use .to_sparse_coo() or .to_dense() first."
        )
    if (op.op if hasattr(op, "op") else op) != dist.ReduceOp.SUM:
        raise Unsupported("all_reduce: sparse tensors can be summed only. Use .to_dense() first.")
    arguments.check_on_cpu(tensor, "all_reduce of the sparse entries of")


def all_reduce(tensor: torch.Tensor, world: int, gather: Gather) -> Iterator[Collective]:
    """The collectives of one call, each to be run before the next is asked for."""
    own = tensor.detach().coalesce()
    facts = torch.tensor([own._nnz(), own.sparse_dim(), *own.shape])
    told = [torch.empty_like(facts) for _ in range(world)]
    yield _gathered(gather, told, facts)
    counts = _agreed_counts(told, facts)

    # all_gather moves equal parts, so each is filled up to the longest.
    longest = max(counts)
    indices = own.indices().new_zeros((own.sparse_dim(), longest))
    indices[:, : own._nnz()] = own.indices()
    values = own.values().new_zeros((longest, *own.values().shape[1:]))
    values[: own._nnz()] = own.values()
    all_indices = [torch.empty_like(indices) for _ in range(world)]
    all_values = [torch.empty_like(values) for _ in range(world)]
    if longest:
        yield _gathered(gather, all_indices, indices)
        yield _gathered(gather, all_values, values)

    total = torch.sparse_coo_tensor(
        torch.cat([part[:, :count] for part, count in zip(all_indices, counts, strict=True)], 1),
        torch.cat([part[:count] for part, count in zip(all_values, counts, strict=True)]),
        own.shape,
        # Without it, an index that a peer made up would be an address in this process.
        check_invariants=True,
    )
    with torch.no_grad():
        tensor.copy_(total.coalesce())


def _gathered(gather: Gather, parts: list[torch.Tensor], own: torch.Tensor) -> Collective:
    return gather(own, [*(slot(part, written=True) for part in parts), slot(own)])


def _agreed_counts(told: list[torch.Tensor], own: torch.Tensor) -> list[int]:
    """The number of entries by rank; every rank sees the same and so decides the same."""
    _, sparse_dim, *shape = own.tolist()
    most = math.prod(shape[:sparse_dim])
    counts = []
    for rank, facts in enumerate(told):
        count, *rest = facts.tolist()
        if rest != [sparse_dim, *shape]:
            raise OutOfStep(
                f"all_reduce of a sparse tensor: rank {rank} has {rest[0]} sparse dimensions of "
                f"shape {rest[1:]}, this rank {sparse_dim} of {shape}. The group is closed.",
                peer=rank,
            )
        if not 0 <= count <= most:
            raise OutOfStep(
                f"all_reduce of a sparse tensor: rank {rank} says that it has {count} entries "
                f"where {most} fit. The group is closed.",
                peer=rank,
            )
        counts.append(count)
    return counts
