"""all_reduce of sparse tensors, and what a peer says of its entries."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from sealring.errors import OutOfStep
from sealring.group import sparse
from tests.workers import Workers


def entries(rank: int, dtype: torch.dtype, dense: tuple[int, ...]) -> torch.Tensor:
    """Twice `rank` entries (so rank 0 has none), of which two are for one place."""
    places = torch.tensor(
        [[*range(rank), *range(rank)], [0] * rank + [1] * (rank - 1) + [0] * bool(rank)]
    )
    values = torch.arange(2 * rank * math.prod(dense)).reshape(2 * rank, *dense) + 10 * rank
    return torch.sparse_coo_tensor(
        places.long(), values.to(dtype), (5, 2, *dense), check_invariants=True
    )


def sums(rank: int, world: int) -> None:
    # Not complex: torch hands over a copy of such a sparse tensor, and the result stays there.
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for dense in ((), (3,), (2, 0)):
            every = [entries(r, dtype, dense).to_dense() for r in range(world)]
            expected = torch.stack(every).sum(0, dtype=dtype)
            tensor = entries(rank, dtype, dense)
            works = [
                dist.all_reduce(tensor, async_op=True),
                # The calls around it keep their order, on every rank.
                dist.all_reduce(other := torch.ones(3), async_op=True),
            ]
            for work in works:
                work.wait()
            assert tensor.is_sparse
            assert torch.equal(tensor.to_dense(), expected), (dtype, dense)
            assert torch.equal(other, torch.full((3,), float(world)))
    empty = torch.sparse_coo_tensor(size=(4, 4))  # type: ignore[call-arg]  # the stub lacks this
    dist.all_reduce(empty)
    assert empty._nnz() == 0


@pytest.mark.parametrize("world", [2, 4])
def test_sparse_sums_are_those_of_the_dense_tensors(workers: Workers, world: int) -> None:
    workers.run(sums, world=world)


def another_shape(rank: int, world: int) -> str:
    with pytest.raises(OutOfStep) as caught:
        dist.all_reduce(torch.eye(3 + rank).to_sparse())
    with pytest.raises(RuntimeError):
        dist.barrier()
    return str(caught.value)


def test_another_shape_is_out_of_step_on_every_rank(workers: Workers) -> None:
    texts = workers.run(another_shape, world=2, env={"SEALRING_TRANSPORT": "tcp"})
    assert "rank 1 has 2 sparse dimensions of shape [4, 4]" in texts[0]
    assert "rank 0 has 2 sparse dimensions of shape [3, 3]" in texts[1]


@pytest.mark.parametrize("count", [-1, 11])
def test_a_peers_count_is_believed_only_where_it_fits(count: int) -> None:
    own = torch.tensor([3, 1, 10])
    with pytest.raises(OutOfStep, match="rank 1 says that it has") as caught:
        sparse._agreed_counts([own, torch.tensor([count, 1, 10])], own)
    assert caught.value.peer == 1


def test_a_peers_index_outside_the_tensor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.eye(3).to_sparse()
    gathered: list[list[torch.Tensor]] = []

    def gather(_: object, parts: list[torch.Tensor], own: torch.Tensor) -> None:
        for part in parts:
            part.copy_(own)
        gathered.append(parts)

    monkeypatch.setattr(sparse, "_gathered", gather)
    steps = sparse.all_reduce(tensor, 2, lambda own, slots: None)  # type: ignore[arg-type, return-value]
    next(steps), next(steps)
    gathered[1][1][0, 0] = 1 << 40
    with pytest.raises(RuntimeError, match="size is inconsistent with indices"):
        list(steps)
