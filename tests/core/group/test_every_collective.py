"""All other forms of torch's collectives on the sealed backend, compared with plain arithmetic."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.distributed_c10d import _coalescing_manager

from sealring.core.group.arguments import DTYPES
from sealring.core.group.entry import SINGLE
from sealring.core.schedule import Algorithm
from sealring.core.settings import with_settings
from sealring.errors import OutOfStep, Unsupported
from tests.workers import Workers

LENGTHS = (0, 1, 7, 50_001)
MOVED = (*DTYPES, torch.float8_e4m3fn)


def filled(length: int, value: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((length,), value).to(dtype)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def to_and_from_a_root(rank: int, world: int) -> None:
    for dtype, length in itertools.product(MOVED, LENGTHS):
        for root in range(world) if length < 10 else (world - 1,):
            own = filled(length, rank + 1, dtype)
            lists = [filled(length, 99, dtype) for _ in range(world)] if rank == root else None
            dist.gather(own, lists, dst=root)
            for peer, got in enumerate(lists or []):
                assert same(got, filled(length, peer + 1, dtype)), (dtype, length)
            parts = [filled(length, p + 2, dtype) for p in range(world)] if rank == root else None
            out = filled(length, 99, dtype)
            dist.scatter(out, parts, src=root)
            assert same(out, filled(length, rank + 2, dtype)), (dtype, length)
    total = world * (world + 1) // 2
    for dtype, length in itertools.product(DTYPES, LENGTHS):
        for root in range(world):
            tensor = filled(length, rank + 1, dtype)
            dist.reduce(tensor, dst=root)
            wanted = filled(length, total if rank == root else rank + 1, dtype)
            assert same(tensor, wanted), (dtype, length, root)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_reduce_gather_and_scatter(workers: Workers, world: int, transport: str) -> None:
    workers.run(to_and_from_a_root, world=world, env={"SEALRING_TRANSPORT": transport})


def rows(sender: int, receiver: int) -> int:
    return (3 * sender + 5 * receiver) % 4 * (1 if sender != receiver else 9_000)


def exchanges(rank: int, world: int) -> None:
    for dtype in (torch.float32, torch.int64, torch.bool, torch.float8_e4m3fn):
        sent = [filled(rows(rank, to) * 3, rank + to, dtype).view(-1, 3) for to in range(world)]
        wanted = [filled(rows(of, rank) * 3, of + rank, dtype).view(-1, 3) for of in range(world)]
        out = [filled(each.numel(), 7, dtype).view(-1, 3) for each in wanted]
        dist.all_to_all(out, sent)
        assert all(same(a, b) for a, b in zip(out, wanted, strict=True))
        whole = filled(sum(map(len, wanted)) * 3, 7, dtype).view(-1, 3)
        work = dist.all_to_all_single(
            whole, torch.cat(sent), [len(w) for w in wanted], [len(s) for s in sent], async_op=True
        )
        assert work is not None
        work.wait()
        assert same(whole, torch.cat(wanted))
    for length in (0, 1, 40_000):
        source = torch.arange(world * length) + 1000 * rank
        equal = torch.zeros_like(source)
        dist.all_to_all_single(equal, source)
        parts = [
            torch.arange(rank * length, (rank + 1) * length) + 1000 * of for of in range(world)
        ]
        assert torch.equal(equal, torch.cat(parts))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_all_to_all_with_equal_and_unequal_splits(
    workers: Workers, world: int, transport: str
) -> None:
    workers.run(exchanges, world=world, env={"SEALRING_TRANSPORT": transport})


def coalesced(rank: int, world: int) -> None:
    total = float(world * (world + 1) // 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors = [torch.full((n,), rank + 1.0) for n in (0, 3, 70_000)]
        dist.all_reduce_coalesced(tensors)
        outputs = [[torch.zeros(n) for n in (2, 5)] for _ in range(world)]
        dist.all_gather_coalesced(outputs, [torch.full((n,), rank + 1.0) for n in (2, 5)])
    assert all(bool((tensor == total).all()) for tensor in tensors)
    for peer, got in enumerate(outputs):
        assert all(bool((tensor == peer + 1).all()) for tensor in got)

    for asynchronous in (False, True):
        sums = [torch.full((n,), rank + 1.0) for n in (3, 70_000)]
        with _coalescing_manager(async_ops=asynchronous) as manager:
            for tensor in sums:
                dist.all_reduce(tensor)
        gathered = [torch.zeros(world * n) for n in (3, 7)]
        with _coalescing_manager(async_ops=asynchronous) as second:
            for tensor, n in zip(gathered, (3, 7), strict=True):
                dist.all_gather_into_tensor(tensor, torch.full((n,), float(rank)))
        scattered = [torch.zeros(n) for n in (3, 7)]
        with _coalescing_manager(async_ops=asynchronous) as third:
            for tensor, n in zip(scattered, (3, 7), strict=True):
                dist.reduce_scatter_tensor(tensor, torch.full((world * n,), rank + 1.0))
        if asynchronous:
            for each in (manager, second, third):
                each.wait()
        assert all(bool((tensor == total).all()) for tensor in (*sums, *scattered))
        for tensor, n in zip(gathered, (3, 7), strict=True):
            assert torch.equal(tensor, torch.arange(world).float().repeat_interleave(n))

    tensor = torch.ones(5)
    with _coalescing_manager(device=torch.device("cpu"), async_ops=True) as fourth:
        dist.broadcast(tensor.mul_(rank + 1), src=1)
    fourth.wait()
    assert torch.equal(tensor, torch.full((5,), 2.0))
    with _coalescing_manager(device=torch.device("cpu")):
        pass  # nothing is done at once


def test_coalesced_forms(workers: Workers) -> None:
    workers.run(coalesced, world=3)


def odd_layouts(rank: int, world: int) -> None:
    strided = torch.full((6, 4), float(rank)).t()[:, ::2]
    lists = [torch.zeros(3, 4).t() for _ in range(world)] if rank == 0 else None
    dist.gather(strided, lists, dst=0)
    for peer, got in enumerate(lists or []):
        assert torch.equal(got, torch.full((4, 3), float(peer)))
    parts = [torch.full((3, 4), p + 1.0).t() for p in range(world)] if rank == 1 else None
    base = torch.zeros(8, 3)
    dist.scatter(base[::2], parts, src=1)
    assert torch.equal(base[::2], torch.full((4, 3), rank + 1.0))
    assert not base[1::2].any(), "nothing outside the view may change"
    view = torch.full((5, 5), float(rank)).t()
    dist.reduce(view, dst=2, op=dist.ReduceOp.MAX)
    assert torch.equal(view, torch.full((5, 5), 2.0 if rank == 2 else float(rank)))
    out = torch.zeros(4, world).t()
    dist.all_to_all_single(out, torch.full((4, world), float(rank)).t())
    assert torch.equal(out, torch.arange(world).float().view(-1, 1).expand(world, 4))


def test_views(workers: Workers) -> None:
    workers.run(odd_layouts, world=3)


def futures(rank: int, world: int) -> None:
    """get_future() resolves to the tensors that the caller gave for the result, as a list."""
    one, whole = torch.ones(3), torch.ones(3 * world)
    lists = [torch.zeros(3) for _ in range(world)] if rank == 0 else None
    cases = [
        (dist.reduce(one, 0, async_op=True), [one]),
        (dist.gather(one.clone(), lists, 0, async_op=True), lists or []),
        (dist.scatter(one, [one.clone()] * world if rank == 0 else None, 0, async_op=True), [one]),
        (dist.all_to_all_single(whole, whole.clone(), async_op=True), [whole]),
    ]
    for work, tensors in cases:
        value = work.get_future().wait()
        assert isinstance(value, list)
        assert len(value) == len(tensors)
        assert all(a.data_ptr() == b.data_ptr() for a, b in zip(value, tensors, strict=True))


def test_futures_hold_the_results(workers: Workers) -> None:
    workers.run(futures, world=2)


def functional(rank: int, world: int) -> None:
    total = float(world * (world + 1) // 2)
    ranks = list(range(world))
    own = torch.full((4,), rank + 1.0)
    assert torch.equal(funcol.all_reduce(own, "sum", ranks) + 0, torch.full((4,), total))
    everyone = torch.arange(1, world + 1).float().repeat_interleave(4)
    assert torch.equal(funcol.all_gather_tensor(own, 0, ranks) + 0, everyone)
    part = funcol.reduce_scatter_tensor(own.repeat(world), "sum", 0, ranks)
    assert torch.equal(part + 0, torch.full((4,), total))
    assert torch.equal(funcol.broadcast(own, 1, ranks) + 0, torch.full((4,), 2.0))
    swapped = funcol.all_to_all_single(own.repeat(world), None, None, ranks)
    assert torch.equal(swapped + 0, everyone)
    several = funcol.all_reduce_coalesced([own, own * 2], "sum", ranks)
    assert torch.equal(several[1] + 0, torch.full((4,), 2 * total))
    gathered = funcol.all_gather_into_tensor_coalesced([own, own], ranks)
    assert torch.equal(gathered[1] + 0, everyone)
    scattered = funcol.reduce_scatter_tensor_coalesced(
        [own.repeat(world)] * 2, "sum", [0, 0], ranks
    )
    assert torch.equal(scattered[0] + 0, torch.full((4,), total))


def test_functional_collectives(workers: Workers) -> None:
    workers.run(functional, world=2)


def compiled(rank: int, world: int, backend: str) -> None:
    group: Any = dist.group.WORLD

    def step(tensor: torch.Tensor) -> torch.Tensor:
        reduced = funcol.all_reduce(tensor * 2, "sum", group)
        return funcol.all_gather_tensor(reduced + 1, 0, group) * 3

    own = torch.full((4,), rank + 1.0)
    torch._dynamo.reset()
    wanted = step(own)
    assert torch.equal(torch.compile(step, backend=backend, fullgraph=True)(own), wanted)
    assert torch.equal(wanted, torch.full((4 * world,), (2.0 * 3 + 1) * 3))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_functional_collectives_inside_torch_compile(workers: Workers, backend: str) -> None:
    workers.run(compiled, backend, world=2)


def wrong(rank: int, world: int) -> list[str]:
    group = dist.group.WORLD
    assert group is not None
    pair = [torch.ones(2), torch.ones(2)]
    gather = getattr(group, SINGLE["all_gather_single_coalesced"])
    calls = {
        "splits": lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4), [1, 2], [2, 2]),
        "rows": lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3)),
        "kept": lambda: dist.all_to_all([torch.ones(1 + rank), torch.ones(2 - rank)], pair),
        "dtypes": lambda: group.alltoall(pair, [torch.ones(2), torch.ones(2).double()]),
        "list": lambda: group.alltoall(pair, pair[:1]),
        "size": lambda: dist.gather(torch.ones(3), pair if rank == 0 else None, dst=0),
        "none": lambda: group.allreduce_coalesced([]),
        "numbers": lambda: gather([torch.ones(4)], pair),
    }
    texts = []
    for name, call in calls.items():
        if name == "size" and rank != 0:
            continue
        try:
            call()
        except Unsupported as error:
            texts.append(f"{name}: {error}")
    # Nothing was sent, so the group lives on.
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((3,), float(world)))
    return texts


def test_wrong_arguments_are_refused_by_name(workers: Workers) -> None:
    first = workers.run(wrong, world=2)[0]
    assert first == [
        "splits: all_to_all: output_split_sizes [1, 2] are not 2 numbers of rows that make up the "
        "output's 4",
        "rows: all_to_all: the output's 3 rows cannot be split equally between 2 ranks; give "
        "output_split_sizes",
        "kept: all_to_all: rank 0 keeps 2 elements for itself but expects 1",
        "dtypes: all_to_all: tensors of torch.float64 and torch.float32; all must have one dtype",
        "list: all_to_all needs 2 input tensors, one per rank, not 1",
        "size: gather: all tensors must have one size and dtype; got 2 elements of torch.float32 "
        "beside 3 of torch.float32",
        "none: all_reduce_coalesced needs at least one tensor",
        "numbers: all_gather_into_tensor_coalesced: 1 outputs do not go with 2 inputs",
    ]


def disagree(rank: int, world: int, about: str) -> None:
    tensor = torch.ones(6)
    if about == "root":
        dist.reduce(tensor, dst=int(rank == 2))
    elif about == "split":
        sizes = [2] * world
        output = [2 + (peer == 1 and rank == 0) for peer in range(world)]
        dist.all_to_all_single(torch.ones(sum(output)), tensor, output, sizes)
    elif about == "size":
        dist.gather(torch.ones(3 + rank), None if rank else [torch.ones(3)] * world, dst=0)
    elif rank:
        dist.reduce(tensor, dst=0)
    else:
        dist.scatter(tensor, [tensor.clone()] * world, src=0)
    dist.barrier()


@pytest.mark.parametrize("about", ["root", "split", "size", "operation"])
def test_ranks_that_disagree_are_all_out_of_step(workers: Workers, about: str) -> None:
    errors = workers.run(disagree, about, world=3, errors=True)
    assert [type(error) for error in errors] == [OutOfStep] * 3, errors


def by_every_algorithm(rank: int, world: int) -> None:
    total = float(world * (world + 1) // 2)
    for length in (0, 1, 5, 100_003):
        tensor = torch.full((length,), rank + 1.0)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.full((length,), total))
        dist.reduce(tensor, dst=1, op=dist.ReduceOp.AVG)
        assert torch.equal(tensor, torch.full((length,), total))
        dist.broadcast(tensor.fill_(rank), src=2)
        assert torch.equal(tensor, torch.full((length,), 2.0))


@pytest.mark.parametrize("algorithm", [each.name.lower() for each in Algorithm])
def test_every_algorithm_serves_what_it_can(workers: Workers, algorithm: str) -> None:
    workers.run(by_every_algorithm, world=4, env=with_settings({}, algorithm=algorithm))
