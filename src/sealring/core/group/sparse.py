"""all_reduce of sparse tensors: every rank gathers the entries of all ranks and adds them up.

A call runs several collectives, because the ranks first tell each other how many entries they have.
What a peer tells is checked before memory is allocated or indexed by it.
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
"""Makes an all_gather of one tensor per rank, all of one size. The last slot is this rank's."""

Agree = Callable[[str], Iterable[Collective]]
"""Makes the collectives that raise Unsupported on all ranks if one has an objection other than
''."""

_OBJECTS: Final = -1
"""Sent instead of the number of entries by a rank that cannot sum its tensor."""


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
    """Yields the collectives of one call. Run each before asking for the next.

    If one rank cannot sum its tensor, this raises Unsupported on all ranks, and the group goes on.
    """
    own, objection = _prepared(tensor)
    count = _OBJECTS if objection else own._nnz()
    facts = torch.tensor([count, own.sparse_dim(), *own.shape], dtype=torch.int64)
    told = [torch.empty_like(facts) for _ in range(world)]
    yield _gathered(gather, told, facts)
    if any(each[0] == _OBJECTS for each in told):  # on all ranks alike
        yield from agree(objection)
    counts = agreed_counts(told, facts)

    # all_gather moves parts of equal length, so each part is padded to the longest.
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
    # An inference tensor can be written only in inference mode, any other only outside of it.
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.copy_(total.coalesce())


def _prepared(tensor: torch.Tensor) -> tuple[torch.Tensor, str]:
    """Returns the coalesced tensor, and why this rank cannot sum such tensors, or ''."""
    try:
        own = tensor.detach()
        _sparse(own._indices(), own._values(), own.shape)
        own = own.coalesce()
        # Tries a sum of two entries, because coalesce() adds nothing if no place has two.
        twice, dense = own.indices().new_zeros((own.sparse_dim(), 2)), own.values().shape[1:]
        place = torch.Size((*[1] * own.sparse_dim(), *dense))
        _sparse(twice, own.values().new_zeros((2, *dense)), place).coalesce()
    except RuntimeError as problem:
        return tensor, f"all_reduce: this sparse tensor cannot be summed: {problem}"
    return own, ""


def _sparse(indices: torch.Tensor, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    # Without the check, an index outside the shape would write to other memory of this process.
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)


def _gathered(gather: Gather, parts: list[torch.Tensor], own: torch.Tensor) -> Collective:
    return gather(own, [*(slot(part, written=True) for part in parts), slot(own)])


def agreed_counts(told: list[torch.Tensor], own: torch.Tensor) -> list[int]:
    """Checks what the ranks told; returns the number of entries by rank.

    Every rank sees the same values and so raises the same error.
    """
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
    # The error does not blame that rank: gathered bytes are not signed, and members forward them.
    return OutOfStep(
        f"all_reduce of a sparse tensor: gathered as rank {rank}'s: {found}. That rank sent it, or "
        "a member that passed it on changed it. The group is closed."
    )
