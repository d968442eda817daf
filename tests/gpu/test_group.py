"""Process groups with CUDA tensors: several ranks on one GPU, through host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sealring.core.settings import with_settings
from sealring.errors import OutOfStep
from sealring.lab.bench.workers import Report, run_workers
from tests.gpu.shared_gpu import each_wire, enter, environment_of


def in_group(ranks: int, body: Callable[..., Any], **environment: str) -> list[Any]:
    """Returns what body(rank) returns on each rank of a group on one GPU."""
    found: dict[int, Any] = {}
    for rank, value in run_workers(ranks, _member, body, environment=environment):
        found[rank] = value
    return [found[rank] for rank in range(ranks)]


def _member(rank: int, report: Report, body: Callable[..., Any]) -> None:
    enter(rank)
    dist.init_process_group("sealring")
    report(body(rank))
    dist.barrier()
    dist.destroy_process_group()


# ---- collectives --------------------------------------------------------------------------------


def every_collective(rank: int) -> list[str]:
    """Runs each call on CUDA tensors and on equal CPU tensors; returns those that differ."""
    world, wrong = dist.get_world_size(), []

    def differ(name: str, make: Callable[[str], list[torch.Tensor]]) -> None:
        gpu, cpu = make("cuda"), make("cpu")
        if not all(torch.equal(a.cpu(), b) for a, b in zip(gpu, cpu, strict=True)):
            wrong.append(name)

    def tensor(size: int, device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        random = torch.Generator().manual_seed(rank * 1000 + size)
        return (torch.randn(size, generator=random) * 8).to(dtype).to(device)

    def all_reduce(size: int, dtype: torch.dtype, op: Any, device: str) -> list[torch.Tensor]:
        data = tensor(size, device, dtype)
        dist.all_reduce(data, op)
        return [data]

    for size in (1, 1000, 300_001, 5_000_000):
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
                name = f"all_reduce {size} {dtype} {op}"
                differ(name, lambda d, s=size, t=dtype, o=op: all_reduce(s, t, o, d))

    def gathered(device: str) -> list[torch.Tensor]:
        parts = [torch.empty(70_001, device=device) for _ in range(world)]
        dist.all_gather(parts, tensor(70_001, device))
        return parts

    def scattered_sum(device: str) -> list[torch.Tensor]:
        out = torch.empty(90_000, device=device)
        dist.reduce_scatter_tensor(out, tensor(90_000 * world, device))
        return [out]

    def gathered_into_one(device: str) -> list[torch.Tensor]:
        out = torch.empty(90_000 * world, device=device)
        dist.all_gather_into_tensor(out, tensor(90_000, device))
        return [out]

    def sent_around(device: str) -> list[torch.Tensor]:
        data = tensor(200_000, device)
        dist.broadcast(data, world - 1)
        return [data]

    def reduced(device: str) -> list[torch.Tensor]:
        data = tensor(50_000, device)
        dist.reduce(data, 0)
        return [data]

    def exchanged(device: str) -> list[torch.Tensor]:
        data = tensor(world * 1001, device)
        out = torch.empty_like(data)
        dist.all_to_all_single(out, data)
        return [out]

    def rooted(device: str) -> list[torch.Tensor]:
        data, back = tensor(3000, device), torch.empty(3000, device=device)
        parts = [torch.empty(3000, device=device) for _ in range(world)] if rank == 0 else None
        dist.gather(data, parts, 0)
        dist.scatter(back, parts, 0)
        return [back]

    def not_contiguous(device: str) -> list[torch.Tensor]:
        data = tensor(400 * 300, device).view(400, 300).t()
        dist.all_reduce(data)
        return [data.contiguous()]

    for make in (gathered, scattered_sum, gathered_into_one, sent_around, reduced, exchanged,
                 rooted, not_contiguous):  # fmt: skip
        differ(make.__name__, make)
    return wrong


@pytest.mark.parametrize(("ranks", "transport"), [(2, "shm"), (3, "tcp"), (4, "shm")])
def test_every_collective_gives_what_it_gives_on_the_cpu(ranks: int, transport: str) -> None:
    # The bits are equal only by the same algorithm, and a wire between GPUs may choose another.
    same = {"SEALRING_TRANSPORT": transport, **with_settings({}, algorithm="ring")}
    assert in_group(ranks, every_collective, **same) == [[]] * ranks


@pytest.mark.parametrize("wire", ["auto", "nccl"])
def test_keys_go_forward_on_the_gpu_too(wire: str) -> None:
    environment = environment_of(wire, **with_settings({}, rekey_bytes=100000))
    assert in_group(2, every_collective, **environment) == [[]] * 2


# ---- streams ------------------------------------------------------------------------------------


def after_the_callers_stream(rank: int) -> bool:
    """The call waits for its stream's earlier work, and wait() makes the result usable."""
    side = torch.cuda.Stream()
    good = True
    with torch.cuda.stream(side):
        for turn in range(20):
            data = torch.zeros(3_000_000, device="cuda")
            torch.cuda._sleep(2_000_000)
            data += turn + rank
            work = dist.all_reduce(data, async_op=True)
            work.wait()
            doubled = data * 2
            del data
            torch.empty(3_000_000, device="cuda").fill_(-1)
            good &= bool((doubled == 2 * (2 * turn + 1)).all())
    return good


@each_wire
def test_streams(wire: str) -> None:
    assert in_group(2, after_the_callers_stream, **environment_of(wire)) == [True, True]


# ---- training -----------------------------------------------------------------------------------


def trained(rank: int) -> list[float]:
    """Trains by DDP on the GPU; one process on all the data must have the same losses."""
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    torch.use_deterministic_algorithms(False)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 512), torch.nn.Tanh(), torch.nn.Linear(512, 8)
    ).cuda()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).cuda()
    aims = torch.randn(64, 8, generator=torch.Generator().manual_seed(2)).cuda()
    world = dist.get_world_size()
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(wrapped(data[rank::world]), aims[rank::world])
        loss.backward()
        optimizer.step()
        whole = loss.detach().clone()
        dist.all_reduce(whole, dist.ReduceOp.AVG)
        losses.append(float(whole))
    return losses


@pytest.mark.parametrize("wire", ["auto", "nccl"])
def test_ddp(wire: str) -> None:
    alone = in_group(1, trained)[0]
    for losses in in_group(2, trained, **environment_of(wire)):
        assert losses == pytest.approx(alone, rel=1e-4)


def sharded(rank: int) -> float:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    model.cuda()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).cuda()
    for _ in range(3):
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(loss)


@pytest.mark.parametrize("wire", ["auto", "nccl"])
def test_fsdp2(wire: str) -> None:
    one, two = in_group(2, sharded, **environment_of(wire))
    assert one == two
    assert one == pytest.approx(in_group(1, sharded)[0], rel=1e-4)


# ---- what is refused ----------------------------------------------------------------------------


def with_mixed_devices(rank: int, report: Report) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("sealring")
    try:
        dist.all_reduce(torch.ones(100_000, device="cuda" if rank else "cpu"))
    except OutOfStep as error:
        report(str(error))


def test_a_mixed_job_is_told_so() -> None:
    errors = dict(run_workers(2, with_mixed_devices))
    assert sorted(errors) == [0, 1]
    for text in errors.values():
        assert "on a GPU" in text
        assert "on the same kind of device" in text
