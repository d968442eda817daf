"""torch.compile breaks the graph where it does with Gloo, and nowhere else."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo as dynamo
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.nn.parallel import DistributedDataParallel

from tests.core.group.beside_gloo import both, outcome
from tests.workers import Workers


def functions(group: Any, rank: int, world: int) -> dict[str, Callable[[torch.Tensor], Any]]:
    def many(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.zeros_like(x) for _ in range(world)]

    def in_place(call: Callable[..., Any], *args: Any) -> Callable[[torch.Tensor], Any]:
        def step(x: torch.Tensor) -> Any:
            y = x * 2
            call(y, *args, group=group)
            return y + 1

        return step

    def waited(call: Callable[..., Any], *args: Any) -> Callable[[torch.Tensor], Any]:
        def step(x: torch.Tensor) -> Any:
            y = x * 2
            work = call(y, *args, group=group, async_op=True)
            work.wait()
            return y + 1

        return step

    def barrier(x: torch.Tensor) -> Any:
        y = x * 2
        dist.barrier(group=group)
        return y + 1

    def message(x: torch.Tensor) -> Any:
        y = x * 2
        if rank == 0:
            dist.send(y, 1, group=group)
        else:
            dist.recv(y, 0, group=group)
        return y + 1

    def into(call: Callable[..., Any], length: int) -> Callable[[torch.Tensor], Any]:
        def step(x: torch.Tensor) -> Any:
            output = torch.zeros(length)
            call(output, x * 2, group=group)
            return output + 1

        return step

    def all_gather(x: torch.Tensor) -> Any:
        outputs = many(x)
        dist.all_gather(outputs, x * 2, group=group)
        return outputs[0] + outputs[1]

    def gather(x: torch.Tensor) -> Any:
        dist.gather(x * 2, many(x) if rank == 0 else None, 0, group=group)
        return x + 1

    def scatter(x: torch.Tensor) -> Any:
        y = x * 2
        dist.scatter(y, many(x) if rank == 0 else None, 0, group=group)
        return y + 1

    def reduce(x: torch.Tensor) -> Any:
        dist.reduce(x * 2, 0, group=group)
        return x + 1

    def object_api(x: torch.Tensor) -> Any:
        group.allreduce([y := x * 2]).wait()
        return y + 1

    return {
        "all_reduce": in_place(dist.all_reduce),
        "all_reduce waited for": waited(dist.all_reduce),
        "broadcast": in_place(dist.broadcast, 0),
        "broadcast waited for": waited(dist.broadcast, 0),
        "barrier": barrier,
        "message": message,
        "all_gather": all_gather,
        "gather": gather,
        "scatter": scatter,
        "reduce": reduce,
        "object API": object_api,
        "all_gather whole": into(dist.all_gather_into_tensor, 4 * world),
        "reduce_scatter whole": into(dist.reduce_scatter_tensor, 4 // world),
        "all_to_all whole": into(dist.all_to_all_single, 4),
        "functional": lambda x: funcol.all_reduce(funcol.broadcast(x * 2, 0, group), "sum", group),
    }


def compiled(rank: int, world: int) -> list[tuple[str, Any, Any]]:
    differ = []
    with both(world) as groups:
        ours, gloos = groups.values()
        for name in functions(ours, rank, world):

            def counted(group: Any, name: str = name) -> Any:
                dynamo.reset()
                dynamo.utils.counters.clear()
                step = torch.compile(functions(group, rank, world)[name], backend="eager")
                value = step(torch.arange(4.0) + rank)
                counters = dynamo.utils.counters
                breaks = sum(counters["graph_break"].values())
                return value, breaks, counters["stats"]["unique_graphs"]

            results = outcome(counted, ours), outcome(counted, gloos)
            kinds = [kind for kind, _ in results]
            if results[0] != results[1] and (kinds[0] != kinds[1] or kinds[0] == "value"):
                differ.append((name, *results))
    return differ


@pytest.mark.timeout(300)
def test_graphs_break_where_they_do_with_gloo(workers: Workers) -> None:
    assert workers.run(compiled, world=2) == [[], []]


def trained(rank: int, world: int, backend: str) -> None:
    """DDP with BatchNorm broadcasts its buffers before each forward pass."""
    with warnings.catch_warnings(), both(world) as groups:
        warnings.simplefilter("ignore")
        states = []
        for group in groups.values():
            dynamo.reset()
            torch.manual_seed(3)
            layers = (torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
            model = DistributedDataParallel(torch.nn.Sequential(*layers), process_group=group)
            step: Any = torch.compile(model, backend=backend)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for number in range(3):
                torch.manual_seed(10 * number + rank)
                step(torch.randn(6, 4)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            states.append({key: value.clone() for key, value in model.state_dict().items()})
        for key, value in states[0].items():
            torch.testing.assert_close(value, states[1][key], msg=key)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_ddp_with_batchnorm_trains_as_with_gloo(workers: Workers, backend: str) -> None:
    workers.run(trained, backend, world=2)
