"""Code that watches or unwraps Gloo's collectives in torch's dispatcher does the same with ours."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._C import _distributed_c10d as c10d
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from sealring.core.group.process_group import SealedProcessGroup
from sealring.errors import Unsupported
from tests.core.group.beside_gloo import both, gloo_lacks, outcome, plain
from tests.workers import Workers


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def calls_of(rank: int, world: int) -> dict[str, Callable[[Any], Any]]:
    def own(length: int = 2) -> torch.Tensor:
        return torch.arange(length, dtype=torch.float32) + rank

    def many(length: int = 2) -> list[torch.Tensor]:
        return [own(length) for _ in range(world)]

    def result(call: Callable[..., Any], output: Any, *args: Any, **kwargs: Any) -> Any:
        work = call(output, *args, **kwargs)
        if kwargs.get("async_op"):
            work.wait()
        return output

    def object_of(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call(objects := [None] * world, *args, **kwargs)
        return objects

    def message(g: Any) -> Any:
        if rank == 0:
            dist.send(own(), 1, group=g)
            dist.recv(tensor := own(), 1, group=g)
        else:
            dist.recv(tensor := own(), 0, group=g)
            dist.send(own() * 2, 0, group=g)
        return tensor

    def batch(g: Any) -> Any:
        tensor, peer = own() * 3, 1 - rank
        ops = [dist.P2POp(dist.isend, own(), peer, g), dist.P2POp(dist.irecv, tensor, peer, g)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return tensor

    root = rank == 0
    return {
        "all_reduce": lambda g: result(dist.all_reduce, own(), group=g),
        "all_reduce async": lambda g: result(dist.all_reduce, own(), group=g, async_op=True),
        "coalesced": lambda g: result(dist.all_reduce_coalesced, many(), group=g),
        "broadcast": lambda g: result(dist.broadcast, own(), 1, group=g),
        "reduce": lambda g: (
            result(dist.reduce, own(), 0, group=g) if root else dist.reduce(own(), 0, group=g)
        ),
        "all_gather": lambda g: result(dist.all_gather, many(), own(), group=g),
        "all_gather whole": lambda g: result(
            dist.all_gather_into_tensor, own(2 * world), own(), group=g
        ),
        "gather": lambda g: dist.gather(own(), many() if root else None, group=g),
        "scatter": lambda g: result(dist.scatter, own(), many() if root else None, group=g),
        "reduce_scatter": lambda g: result(dist.reduce_scatter, own(), many(), group=g),
        "reduce_scatter whole": lambda g: result(
            dist.reduce_scatter_tensor, own(), own(2 * world), group=g
        ),
        "all_to_all": lambda g: result(dist.all_to_all, many(), many(), group=g),
        "all_to_all whole": lambda g: result(dist.all_to_all_single, own(4), own(4) * 2, group=g),
        "barrier": lambda g: dist.barrier(group=g),
        "monitored barrier": lambda g: dist.monitored_barrier(g),
        "messages": message,
        "batch": batch,
        "all_gather_object": lambda g: object_of(dist.all_gather_object, {"rank": rank}, group=g),
        "broadcast_object_list": lambda g: dist.broadcast_object_list([rank], 0, group=g),
        "functional all_reduce": lambda g: funcol.all_reduce(own(), "sum", g) + 0,
        "functional all_gather": lambda g: funcol.all_gather_tensor(own(), 0, g) + 0,
        "functional reduce_scatter": lambda g: (
            funcol.reduce_scatter_tensor(own(4), "sum", 0, g) + 0
        ),
        "functional broadcast": lambda g: funcol.broadcast(own(), 0, g) + 0,
        "functional all_to_all": lambda g: funcol.all_to_all_single(own(4), None, None, g) + 0,
        "functional coalesced": lambda g: [
            each + 0 for each in funcol.all_reduce_coalesced([own(), own()], "sum", g)
        ],
    }


def watched(rank: int, world: int) -> list[tuple[str, Any, Any]]:
    def under_modes(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def run(group: Any) -> Any:
            with Names() as names, CommDebugMode() as counts:
                value = call(group)
            comms = {str(op): count for op, count in counts.get_comm_counts().items() if count}
            return value, names.seen, comms

        return run

    def profiled(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def run(group: Any) -> Any:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
                call(group)
            return sorted(
                (event.key, event.count)
                for event in trace.key_averages()
                if event.key.startswith(("c10d::", "_c10d_functional::"))
            )

        return run

    differ = []
    with both(world) as groups:
        for name, call in calls_of(rank, world).items():
            for how in (under_modes, profiled):
                ours, gloos = (outcome(how(call), group) for group in groups.values())
                if ours[0] != "value" or (ours != gloos and not gloo_lacks(gloos)):
                    differ.append((name, ours, gloos))
    return differ


@pytest.mark.timeout(300)
def test_modes_counters_and_profiler_see_the_same_operators(workers: Workers) -> None:
    assert workers.run(watched, world=2) == [[], []]


def wrapped(rank: int, world: int) -> None:
    both_parts = TwoTensor(torch.full((3,), rank + 1.0), torch.full((3,), rank + 10.0))
    dist.all_reduce(both_parts)
    assert both_parts.a.tolist() == [3.0] * 3
    assert both_parts.b.tolist() == [21.0] * 3

    large = TwoTensor(torch.full((10**6,), rank + 1.0), torch.full((10**6,), rank + 10.0))
    work = dist.all_reduce(large, async_op=True)
    assert work is not None
    work.wait()
    assert bool((large.a == 3).all()), "done when all of its tensors are"
    assert bool((large.b == 21).all()), "done when all of its tensors are"

    def in_place(tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(doubled := tensor * 2)
        return doubled + 1

    assert torch.func.functionalize(in_place)(torch.ones(2)).tolist() == [5.0, 5.0]

    class Kept(TorchDispatchMode):
        works: list[Any] = []  # noqa: RUF012 (a test's own)

        def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = f(*args, **(kwargs or {}))
            if f.namespace == "c10d":
                self.works.append(result[1])
            return result

    with Kept() as mode:
        dist.all_reduce(torch.ones(2))
    # The script has dropped the work; the mode's object can still be waited for.
    assert c10d.Work.unbox(mode.works[0]).wait()

    group = dist.group.WORLD
    assert group is not None
    tensors, work = torch.ops.c10d.broadcast_([torch.full((2,), float(rank))], group.boxed(), 1, 0)
    assert c10d.Work.unbox(work).wait()
    assert tensors[0].tolist() == [1.0, 1.0]

    tripled = torch.ones(2)
    with Names():
        dist.all_reduce(tripled, dist._make_nccl_premul_sum(3.0))
    assert tripled.tolist() == [3.0 * world] * 2

    # An error of the collective reaches the caller unchanged.
    with Names(), pytest.raises(Unsupported, match="BAND is not defined"):
        dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND)


def test_wrappers_are_unwrapped_and_works_outlive_the_call(workers: Workers) -> None:
    workers.run(wrapped, world=2)


def without_watchers(rank: int, world: int) -> tuple[list[str], Any]:
    detours = []
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        for name, call in calls_of(rank, world).items():
            noted = staticmethod(lambda name=name: detours.append(name))
            patch.setattr(SealedProcessGroup, "_register_operators", noted)
            call(dist.group.WORLD)
    with both(world) as groups, Names():
        dist.all_reduce(tensor := torch.ones(2), group=groups["sealring"])
        dist.all_reduce(tensor, group=groups["gloo"])
    return detours, plain(tensor)


def test_only_what_is_watched_takes_the_detour(workers: Workers) -> None:
    for detours, tensor in workers.run(without_watchers, world=2):
        assert detours == [], "torch.distributed's own calls reach the collectives at once"
        assert tensor[3] == [4.0, 4.0], "another backend's calls pass through our kernels"
