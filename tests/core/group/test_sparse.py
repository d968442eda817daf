"""all_reduce of sparse tensors, and checks of the entries that a peer announces."""

from __future__ import annotations

import importlib
import math

import pytest
import torch
import torch.distributed as dist

from sealring.core.group import sparse
from sealring.errors import GroupClosed, OutOfStep, Unsupported
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
    assert "gathered as rank 1's: 2 sparse dimensions of shape [4, 4]" in texts[0]
    assert "gathered as rank 0's: 2 sparse dimensions of shape [3, 3]" in texts[1]


# torch 2.11 warns that it does not check, where it was asked to.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize(
    ("step", "place", "value", "found"),
    [
        (0, 0, -2, r"-2 entries where 9 fit"),
        (0, 0, 10, r"10 entries where 9 fit"),
        (0, 2, 4, r"2 sparse dimensions of shape \[4, 3\], this rank has 2 of \[3, 3\]"),
        (1, (0, 0), 1 << 40, r"an index outside the shape \[3, 3\]"),
    ],
)
def test_what_is_gathered_is_checked_and_accuses_no_rank(
    monkeypatch: pytest.MonkeyPatch, step: int, place: int, value: int, found: str
) -> None:
    """A member that passes gathered bytes on can change them, so they prove nothing."""
    gathered: list[list[torch.Tensor]] = []

    def gather(_: object, parts: list[torch.Tensor], own: torch.Tensor) -> None:
        for part in parts:
            part.copy_(own)
        gathered.append(parts)

    monkeypatch.setattr(sparse, "_gathered", gather)
    tensor = torch.eye(3).to_sparse()
    steps = sparse.all_reduce(tensor, 2, lambda own, slots: None, lambda why: [])  # type: ignore[arg-type, return-value]
    for _ in range(step + 1):
        next(steps)
    gathered[step][1][place] = value
    with pytest.raises(OutOfStep, match=f"gathered as rank 1's: {found}. That rank sent") as caught:
        list(steps)
    assert caught.value.peer is None


def cannot_be_summed(rank: int, world: int, of_rank_1: str) -> str:
    """Rank 1's tensor makes torch's coalesce() raise; the other ranks' do not."""
    values = torch.zeros(2) if of_rank_1 == "outside" else torch.zeros(2).to(torch.uint16)
    places = torch.tensor([[0, 9 if of_rank_1 == "outside" and rank else 1 - rank]])
    tensor = torch.sparse_coo_tensor(
        places, values, (3,), is_coalesced=rank != 1, check_invariants=False
    )
    with pytest.raises(Unsupported) as caught:
        dist.all_reduce(tensor)
    dist.all_reduce(after := torch.ones(1))  # the group goes on, on every rank
    assert after.item() == world
    return str(caught.value)


@pytest.mark.parametrize(
    ("of_rank_1", "first", "why"),
    [("uncoalesced", 0, "not implemented"), ("outside", 1, "found index 9")],
)
def test_what_one_rank_cannot_sum_is_unsupported_on_every_rank(
    workers: Workers, of_rank_1: str, first: int, why: str
) -> None:
    texts = workers.run(cannot_be_summed, of_rank_1, world=3)
    assert len(set(texts)) == 1
    assert texts[0].startswith(f"rank {first}: all_reduce: this sparse tensor cannot be summed: ")
    assert why in texts[0]


def fails_between_two_steps(rank: int, world: int) -> tuple[str, int | None]:
    if rank == 1:

        def no_memory(*_: object) -> None:
            raise RuntimeError("not enough memory")

        sparse.agreed_counts = no_memory  # type: ignore[assignment]
    try:
        with pytest.raises(GroupClosed) as caught:
            dist.all_reduce(torch.eye(3).to_sparse())
    finally:
        importlib.reload(sparse)
    return str(caught.value), caught.value.reported_by


def test_what_fails_on_one_rank_between_two_steps_ends_the_group_on_all(workers: Workers) -> None:
    ended = workers.run(fails_between_two_steps, world=3)
    assert [by for _, by in ended] == [1, None, 1]
    assert all("all_reduce failed: RuntimeError: not enough memory" in text for text, _ in ended)


def in_inference_mode(rank: int, world: int) -> None:
    with torch.inference_mode():
        tensor = torch.eye(2).to_sparse()
    dist.all_reduce(tensor)
    assert torch.equal(tensor.to_dense(), world * torch.eye(2))


def test_an_inference_tensor_is_summed_like_any_other(workers: Workers) -> None:
    workers.run(in_inference_mode, world=2)
