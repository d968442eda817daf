"""all_reduce of sparse tensors: the ranks' entries are gathered and added up on every rank.

How many entries the others have is known only once they have said so: one call, several
collectives. What a peer says of its entries is checked before memory is made or indexed by it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch
import torch.distributed as dist

from sealring.core.engine.collective import Collective
from sealring.core.group import arguments
from sealring.core.group.memory import Slot, slot
from sealring.errors import OutOfStep, Unsupported

Gather = Callable[[torch.Tensor, list[Slot]], Collective]
"""The all_gather of one tensor per rank, all of one size; the last slot is our own's."""

Agree = Callable[[str], Iterable[Collective]]
"""The collectives that raise Unsupported on all ranks, if one has an objection other than ''."""

_OBJECTS: Final = -1
"""In place of the number of entries: this rank cannot sum its tensor."""


def check(tensor: torch.Tensor, op: Any) -> None:
    if tensor.layout is not torch.sparse_coo:
        raise Unsupported(
            f"all_reduce: {tensor.layout} tensors are not supported. "
            "Use .to_sparse_coo() or .to_dense() first."
        )
    if (op.op if hasattr(op, "op") else op) != dist.ReduceOp.SUM:
        raise Unsupported("all_reduce: sparse tensors can be summed only. Use .to_dense() first.")
    arguments.check_on_cpu(tensor, "all_reduce of the sparse entries of")


def all_reduce(
    tensor: torch.Tensor, world: int, gather: Gather, agree: Agree
) -> Iterator[Collective]:
    """The collectives of one call, each to be run before the next is asked for.

    A tensor that one rank cannot sum is Unsupported on all ranks, and the group goes on.
    """
    own, objection = _prepared(tensor)
    count = _OBJECTS if objection else own._nnz()
    facts = torch.tensor([count, own.sparse_dim(), *own.shape], dtype=torch.int64)
    told = [torch.empty_like(facts) for _ in range(world)]
    yield _gathered(gather, told, facts)
    if any(each[0] == _OBJECTS for each in told):  # on all ranks alike
        yield from agree(objection)
    counts = agreed_counts(told, facts)

    # all_gather moves equal parts, so each is filled up to the longest.
    longest = max(counts)
    indices = own.indices().new_zeros((own.sparse_dim(), longest))
    indices[:, :count] = own.indices()
    values = own.values().new_zeros((longest, *own.values().shape[1:]))
    values[:count] = own.values()
    all_indices = [torch.empty_like(indices) for _ in range(world)]
    all_values = [torch.empty_like(values) for _ in range(world)]
    if longest:
        yield _gathered(gather, all_indices, indices)
        yield _gathered(gather, all_values, values)

    their_indices = [part[:, :count] for part, count in zip(all_indices, counts, strict=True)]
    for rank, each in enumerate(their_indices):
        _check_indices(rank, each, own)
    their_values = [part[:count] for part, count in zip(all_values, counts, strict=True)]
    total = _sparse(torch.cat(their_indices, 1), torch.cat(their_values), own.shape)
    # An inference tensor can be written in inference mode alone; any other one must not be.
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.copy_(total.coalesce())


def _prepared(tensor: torch.Tensor) -> tuple[torch.Tensor, str]:
    """The tensor with each place once, and why this rank cannot sum such tensors, or ''."""
    try:
        own = tensor.detach()
        _sparse(own._indices(), own._values(), own.shape)
        own = own.coalesce()
        # Adds two entries: coalesce() does nothing where no place has more than one.
        twice, dense = own.indices().new_zeros((own.sparse_dim(), 2)), own.values().shape[1:]
        place = torch.Size((*[1] * own.sparse_dim(), *dense))
        _sparse(twice, own.values().new_zeros((2, *dense)), place).coalesce()
    except RuntimeError as problem:
        return tensor, f"all_reduce: this sparse tensor cannot be summed: {problem}"
    return own, ""


def _sparse(indices: torch.Tensor, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    # Without the check, an index outside the shape would be an address in this process.
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)


def _gathered(gather: Gather, parts: list[torch.Tensor], own: torch.Tensor) -> Collective:
    return gather(own, [*(slot(part, written=True) for part in parts), slot(own)])


def agreed_counts(told: list[torch.Tensor], own: torch.Tensor) -> list[int]:
    """The number of entries by rank; every rank sees the same and so decides the same."""
    _, sparse_dim, *shape = own.tolist()
    most = math.prod(shape[:sparse_dim])
    counts = []
    for rank, facts in enumerate(told):
        count, *rest = facts.tolist()
        if rest != [sparse_dim, *shape]:
            found = f"{rest[0]} sparse dimensions of shape {rest[1:]}"
            raise _out_of_step(rank, f"{found}, this rank has {sparse_dim} of {shape}")
        if not 0 <= count <= most:
            raise _out_of_step(rank, f"{count} entries where {most} fit")
        counts.append(count)
    return counts


def _check_indices(rank: int, indices: torch.Tensor, own: torch.Tensor) -> None:
    sizes = torch.tensor(own.shape[: own.sparse_dim()], dtype=torch.int64).unsqueeze(1)
    if bool(((indices < 0) | (indices >= sizes)).any()):
        raise _out_of_step(rank, f"an index outside the shape {list(own.shape)}")


def _out_of_step(rank: int, found: str) -> OutOfStep:
    # Not about that rank: what is gathered is not signed, and members pass it on.
    return OutOfStep(
        f"all_reduce of a sparse tensor: gathered as rank {rank}'s: {found}. That rank sent it, or "
        "a member that passed it on changed it. The group is closed."
    )
