"""torch's own calls on the sealed backend, compared with plain arithmetic."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from sealring.core.engine.collective import DType, ReduceKind
from sealring.core.group.arguments import DTYPES
from sealring.core.group.work import SealedWork
from sealring.core.schedule import Algorithm, Operation
from sealring.core.settings import with_settings
from sealring.errors import Unsupported
from sealring.limits import RECORD_BYTES
from tests.core.engine.cases import Case, expected, values
from tests.workers import Workers

WORLDS = (2, 3, 4)
LENGTHS = (0, 1, 7, 1000, 70_001)
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
INTEGER = tuple(t for t in DTYPES if t not in (*FLOATING, *COMPLEX, torch.bool))


def small_numbers(dtype: torch.dtype, length: int, rank: int) -> torch.Tensor:
    """Values whose sums and products over four ranks are exact in every dtype."""
    generator = torch.Generator().manual_seed(1000 * length + rank)
    numbers = torch.randint(0, 3, (length,), generator=generator)
    if dtype.is_complex:
        return torch.complex(numbers.double(), numbers.flip(0).double()).to(dtype)
    return numbers.to(dtype)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in a wide dtype, for which plain torch arithmetic is defined."""
    if tensor.dtype.is_complex:
        return tensor.to(torch.complex128)
    return tensor.to(torch.float64 if tensor.dtype.is_floating_point else torch.int64)


def expected_sum(dtype: torch.dtype, length: int, world: int) -> torch.Tensor:
    total = sum(wide(small_numbers(dtype, length, rank)) for rank in range(world))
    assert isinstance(total, torch.Tensor)
    return (total > 0).to(dtype) if dtype == torch.bool else total.to(dtype)


def sums(rank: int, world: int) -> None:
    for dtype, length in itertools.product(DTYPES, LENGTHS):
        tensor = small_numbers(dtype, length, rank)
        dist.all_reduce(tensor)
        assert torch.equal(wide(tensor), wide(expected_sum(dtype, length, world))), (dtype, length)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("world", WORLDS)
def test_all_reduce_sums_every_dtype_and_length(
    workers: Workers, world: int, transport: str
) -> None:
    workers.run(sums, world=world, env={"SEALRING_TRANSPORT": transport})


def every_op(rank: int, world: int) -> None:
    ranks = range(world)
    op = dist.ReduceOp
    for dtype, length in itertools.product((*FLOATING, torch.int32), (5, 70_001)):
        inputs = [small_numbers(dtype, length, r) + 1 for r in ranks]
        stack = torch.stack([wide(t) for t in inputs])
        cases = {
            op.PRODUCT: stack.prod(0),
            op.MIN: stack.amin(0),
            op.MAX: stack.amax(0),
        }
        if dtype.is_floating_point:
            cases[op.AVG] = (stack.sum(0) / world).to(dtype).to(stack.dtype)
        for kind, wanted in cases.items():
            tensor = inputs[rank].clone()
            dist.all_reduce(tensor, op=kind)
            assert torch.allclose(wide(tensor), wanted, rtol=1e-2 if dtype.itemsize == 2 else 0)
    for dtype in INTEGER:
        bits = [small_numbers(dtype, 999, r) for r in ranks]
        stack = torch.stack([wide(t) for t in bits])
        for kind, fold in (
            (op.BAND, torch.bitwise_and), (op.BOR, torch.bitwise_or), (op.BXOR, torch.bitwise_xor)
        ):  # fmt: skip
            wanted = stack[0]
            for row in stack[1:]:
                wanted = fold(wanted, row)
            tensor = bits[rank].clone()
            dist.all_reduce(tensor, op=kind)
            assert torch.equal(wide(tensor), wanted), (dtype, kind)
    tensor = torch.full((1000,), float(rank + 1))
    dist.all_reduce(tensor, op=dist._make_nccl_premul_sum(0.5))
    assert torch.equal(tensor, torch.full((1000,), 0.5 * world * (world + 1) / 2))


@pytest.mark.parametrize("world", [2, 4])
def test_all_reduce_serves_every_reduce_op(workers: Workers, world: int) -> None:
    workers.run(every_op, world=world)


def rounded_alike(rank: int, world: int) -> list[bytes]:
    out = []
    for dtype in FLOATING:
        for length in (100, 200_000):
            generator = torch.Generator().manual_seed(rank)
            tensor = torch.randn(length, generator=generator).to(dtype)
            dist.all_reduce(tensor)
            out.append(tensor.view(torch.uint8).numpy().tobytes())
    return out


def test_all_ranks_end_bit_identical(workers: Workers) -> None:
    results = workers.run(rounded_alike, world=4)
    assert all(result == results[0] for result in results)


COMPLEX_SUM = Case(Operation.ALL_REDUCE, Algorithm.RING, 5, DType.COMPLEX128, ReduceKind.SUM)


def complex_sums(rank: int, world: int, seeds: int) -> list[bytes]:
    sums = []
    for seed in range(seeds):
        tensor = torch.from_numpy(values(COMPLEX_SUM, COMPLEX_SUM.elements, rank, seed))
        dist.all_reduce(tensor)
        sums.append(tensor.numpy().tobytes())
    return sums


def test_complex_numbers_are_cut_as_the_reals_that_torch_makes_of_them(workers: Workers) -> None:
    """Results equal the reference's for reals bit for bit. For complex numbers the reference adds
    in another order."""
    came, *others = workers.run(complex_sums, 20, world=4, env=with_settings({}, algorithm="ring"))
    assert others == [came] * 3

    def right(*, as_reals: bool) -> list[bytes]:
        case = replace(COMPLEX_SUM, as_reals=as_reals)
        return [b"".join(expected(case, 4, seed, RECORD_BYTES)[0]) for seed in range(20)]

    assert came == right(as_reals=True)
    assert came != right(as_reals=False)


def other_collectives(rank: int, world: int) -> None:
    for dtype, length in itertools.product((*DTYPES, torch.float8_e4m3fn), (0, 1, 7, 50_001)):
        own = torch.full((length,), rank + 1).to(dtype)
        gathered = [torch.zeros(length).to(dtype) for _ in range(world)]
        dist.all_gather(gathered, own)
        flat = torch.zeros(world * length).to(dtype)
        dist.all_gather_into_tensor(flat, own)
        for peer in range(world):
            same = torch.full((length,), peer + 1).to(dtype).view(torch.uint8)
            assert torch.equal(gathered[peer].view(torch.uint8), same)
            assert torch.equal(flat[peer * length : (peer + 1) * length].view(torch.uint8), same)
        for root in range(world):
            tensor = torch.full((length,), rank).to(dtype)
            dist.broadcast(tensor, src=root)
            assert torch.equal(
                tensor.view(torch.uint8), torch.full((length,), root).to(dtype).view(torch.uint8)
            )
    for length in (0, 1, 7, 50_001):
        inputs = [torch.full((length,), float(rank + peer)) for peer in range(world)]
        before = [tensor.clone() for tensor in inputs]
        output = torch.zeros(length)
        expected = torch.full((length,), float(sum(r + rank for r in range(world))))
        dist.reduce_scatter(output, inputs)
        assert torch.equal(output, expected)
        output.zero_()
        dist.reduce_scatter_tensor(output, torch.cat(inputs))
        assert torch.equal(output, expected)
        dist.reduce_scatter(output, inputs, op=dist.ReduceOp.AVG)
        assert torch.equal(output, expected / world)
        assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
    dist.barrier()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("world", WORLDS)
def test_gather_broadcast_scatter_and_barrier(workers: Workers, world: int, transport: str) -> None:
    workers.run(other_collectives, world=world, env={"SEALRING_TRANSPORT": transport})


def odd_layouts(rank: int, world: int) -> None:
    base = torch.zeros(40, 50)
    view = base.t()[3:30:2, ::3]
    view.fill_(rank + 1)
    dist.all_reduce(view)
    assert torch.equal(view, torch.full(view.shape, float(world * (world + 1) // 2)))
    assert base.sum() == view.sum(), "nothing outside the view may change"
    target = torch.zeros(6, 4).t()
    dist.broadcast(target if rank else target.fill_(3), src=0)
    assert torch.equal(target, torch.full((4, 6), 3.0))
    scalar = torch.tensor(2.0)
    dist.all_reduce(scalar)
    assert scalar == 2.0 * world
    whole = torch.full((world, 5), -1.0)
    whole[rank] = rank
    dist.all_gather_into_tensor(whole, whole[rank])  # in place, as FSDP does
    assert torch.equal(whole, torch.arange(world).float().repeat_interleave(5).view(world, 5))


def test_views_scalars_and_in_place_gathers(workers: Workers) -> None:
    workers.run(odd_layouts, world=3)


def asynchronous(rank: int, world: int) -> None:
    tensors = [torch.full((1000 * n + 1,), float(rank)) for n in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    futures = [work.get_future() for work in works]
    values = torch.futures.collect_all(futures).wait()
    total = float(sum(range(world)))
    for tensor, work, value in zip(tensors, works, values, strict=True):
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert value.wait()[0] is tensor or torch.equal(value.wait()[0], tensor)
        assert torch.equal(tensor, torch.full_like(tensor, total))


def test_async_work_and_futures(workers: Workers) -> None:
    workers.run(asynchronous, world=3)


def test_a_waiter_passing_through_does_not_hide_that_the_work_is_done() -> None:
    result = [torch.ones(1)]
    work = SealedWork(result, give_up=lambda: None)
    work.finish()
    work.pending.acquire()  # as every waiter does for a moment
    assert work.is_completed()
    assert work.is_success()
    future = work.get_future()
    assert future.done()
    assert future.wait() == result


def calls_from_a_callback(rank: int, world: int) -> float:
    first, second = torch.ones(10), torch.ones(10)

    def go_on(_: object) -> torch.Tensor:
        dist.all_reduce(second)  # synchronous, on the thread that finished the first
        return second

    future = dist.all_reduce(first, async_op=True).get_future().then(go_on)
    return float(future.wait()[0])


def test_a_futures_callback_may_call_a_collective(workers: Workers) -> None:
    assert workers.run(calls_from_a_callback, world=2) == [2.0, 2.0]


def waits_in_a_callback(rank: int, world: int) -> list[float]:
    """PowerSGD waits so. The number of collectives queued by then differs from rank to rank."""
    first, second, third = torch.ones(1 << 18), torch.ones(1 << 16), torch.ones(100)

    def reduce_again(_: object) -> torch.Tensor:
        again = dist.all_reduce(second, async_op=True).get_future()
        return again.wait()[0]

    dist.barrier()
    work = dist.all_reduce(first, async_op=True)
    if rank == 0:
        work.wait()  # here the callback runs on this thread, elsewhere on the group's
    done = work.get_future().then(reduce_again)
    last = dist.all_reduce(third, async_op=True)
    reduced = done.wait()
    last.wait()
    return [first[0].item(), reduced[0].item(), third[0].item()]


def test_a_futures_callback_may_wait_for_a_collective_of_its_own(workers: Workers) -> None:
    for _ in range(5):
        assert workers.run(waits_in_a_callback, world=3) == [[3.0] * 3] * 3


def rekeyed(rank: int, world: int) -> None:
    for length in (10, 100_000, 333):
        for _ in range(5):
            tensor = torch.full((length,), float(rank))
            dist.all_reduce(tensor)
            assert torch.equal(tensor, torch.full((length,), float(sum(range(world)))))


@pytest.mark.parametrize("rekey_bytes", [1, 5000])
def test_rekeying_goes_unnoticed(workers: Workers, rekey_bytes: int) -> None:
    workers.run(rekeyed, world=3, env=with_settings({}, rekey_bytes=rekey_bytes))


def huge(rank: int, world: int) -> int:
    tensor = torch.full(((1 << 32) + 3,), rank + 1, dtype=torch.uint8)
    dist.all_reduce(tensor)
    assert tensor[0] == tensor[1 << 31] == tensor[-1] == 3
    assert bool((tensor[:: 1 << 20] == 3).all())
    account = dist.group.WORLD.account()  # type: ignore[union-attr]
    return int(account["memory_bytes"])


@pytest.mark.timeout(300)
def test_more_than_four_gibibytes(workers: Workers) -> None:
    assert max(workers.run(huge, world=2)) < 16 << 20


def refused(rank: int, world: int) -> list[str]:
    texts = []
    for call in (
        lambda: dist.all_reduce(torch.ones(3, dtype=torch.bool), op=dist.ReduceOp.AVG),
        lambda: dist.all_reduce(torch.ones(3), op=dist.ReduceOp.BAND),
        lambda: dist.all_reduce(torch.zeros(4).to(torch.float8_e4m3fn)),
        lambda: dist.all_reduce(torch.ones(2, 2).to_sparse_csr()),
        lambda: dist.all_reduce(torch.ones(2, 2).to_sparse(), op=dist.ReduceOp.MAX),
        lambda: dist.all_gather_into_tensor(torch.zeros(5), torch.zeros(3)),
    ):
        with pytest.raises(Unsupported) as caught:
            call()
        texts.append(str(caught.value))
    dist.barrier()  # the group lives on: nothing was started
    return texts


def test_what_has_no_meaning_is_refused_before_it_starts(workers: Workers) -> None:
    texts = workers.run(refused, world=2)[0]
    assert "AVG is not defined for torch.bool" in texts[0]
    assert "BAND is not defined for torch.float32" in texts[1]
    assert "can be moved but not reduced" in texts[2]
    assert "to_dense" in texts[3]
    assert "can be summed only" in texts[4]
    assert "5 elements" in texts[5]
