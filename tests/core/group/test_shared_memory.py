"""Tensors of one call that share memory, with Gloo's results as the rule where it has any."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.core.group.beside_gloo import both, gloo_lacks, outcome
from tests.workers import Workers


def calls_of(rank: int, world: int) -> dict[str, Any]:
    def base(length: int = 8) -> torch.Tensor:
        return torch.arange(length, dtype=torch.float32) + 100 * rank + 1

    def all_reduce_twice(g: Any) -> Any:
        t = base()
        g.allreduce_coalesced([t, t]).wait()
        return t

    def all_reduce_views(g: Any) -> Any:
        t = base()
        g.allreduce_coalesced([t[:4], t[4:], t[2:6].clone()]).wait()
        return t

    def all_reduce_strided_twice(g: Any) -> Any:
        t = base()
        dist.all_reduce_coalesced([t[::2], t[::2]], group=g)
        return t

    def all_gather_into_one(g: Any) -> Any:
        t = torch.zeros(4)
        dist.all_gather([t] * world, base(4), group=g)
        return t

    def all_gather_in_place(g: Any) -> Any:
        outputs = [torch.zeros(4) for _ in range(world)]
        outputs[rank] += base(4)
        dist.all_gather(outputs, outputs[rank], group=g)
        return outputs

    def all_gather_from_a_peers_output(g: Any) -> Any:
        outputs = [base(4), base(4) * 2]
        dist.all_gather(outputs, outputs[1 - rank], group=g)
        return outputs

    def all_gather_over_part_of_the_input(g: Any) -> Any:
        t = base()
        dist.all_gather([t[2:6], torch.zeros(4)], t[:4], group=g)
        return t

    def all_gather_whole_in_place(g: Any) -> Any:
        t = base(4 * world)
        dist.all_gather_into_tensor(t, t[4 * rank : 4 * rank + 4], group=g)
        return t

    def all_gather_whole_from_elsewhere_in_it(g: Any) -> Any:
        t = base(4 * world)
        dist.all_gather_into_tensor(t, t[2:6], group=g)
        return t

    def reduce_scatter_in_place(g: Any) -> Any:
        t = base(4 * world)
        dist.reduce_scatter_tensor(t[4 * rank : 4 * rank + 4], t, group=g)
        return t[4 * rank : 4 * rank + 4]

    def reduce_scatter_elsewhere_in_the_input(g: Any) -> Any:
        t = base(4 * world)
        dist.reduce_scatter_tensor(t[2:6], t, group=g)
        return t[2:6]

    def reduce_scatter_of_one_tensor(g: Any) -> Any:
        t = base(4)
        dist.reduce_scatter(t, [t] * world, group=g)
        return t

    def all_to_all_in_place(g: Any) -> Any:
        parts = [base(4), base(4) * 2]
        dist.all_to_all(parts, list(parts), group=g)
        return parts

    def all_to_all_whole_in_place(g: Any) -> Any:
        t = base()
        dist.all_to_all_single(t, t, group=g)
        return t

    def all_to_all_into_one(g: Any) -> Any:
        t = torch.zeros(4)
        dist.all_to_all([t, t], [base(4), base(4) * 2], group=g)
        return t

    def gather_into_one(g: Any) -> Any:
        t = torch.zeros(4)
        dist.gather(base(4), [t] * world if rank == 0 else None, 0, group=g)
        return t

    def gather_in_place(g: Any) -> Any:
        t = base(4)
        dist.gather(t, [torch.zeros(4), t] if rank == 0 else None, 0, group=g)
        return t

    def scatter_in_place(g: Any) -> Any:
        t = base(4)
        dist.scatter(t, [t * 3, t] if rank == 0 else None, 0, group=g)
        return t

    def gather_several_crosswise(g: Any) -> Any:
        one, two = base(2), base(2) * 5
        outputs = [torch.zeros(4), torch.cat([one, two])]
        g.allgather_into_tensor_coalesced(outputs, [one, outputs[1][2:]]).wait()
        return outputs

    return {name: call for name, call in locals().items() if callable(call) and name != "base"}


WITHOUT_GLOO = {
    # Gloo writes some of the output before it has sent all of the input.
    "all_to_all_in_place",
    "all_to_all_whole_in_place",
    "scatter_in_place",
}


def compared(rank: int, world: int) -> dict[str, Any]:
    calls = calls_of(rank, world)
    with both(world) as groups:
        return {
            name: {each: outcome(call, group) for each, group in groups.items()}
            for name, call in calls.items()
        }


def test_shared_memory_gives_gloos_result(workers: Workers) -> None:
    by_rank = workers.run(compared, world=2)
    for rank, results in enumerate(by_rank):
        for name, outcomes in results.items():
            assert outcomes["sealring"][0] == "value", (name, outcomes)
            if name not in WITHOUT_GLOO and not gloo_lacks(outcomes["gloo"]):
                assert outcomes["sealring"] == outcomes["gloo"], (rank, name, outcomes)
    assert by_rank[0]["all_reduce_twice"]["sealring"][1][3] == [102.0 + 2 * n for n in range(8)]
    swapped = [each["all_to_all_whole_in_place"]["sealring"][1][3] for each in by_rank]
    first, second = [1.0, 2, 3, 4, 5, 6, 7, 8], [101.0, 102, 103, 104, 105, 106, 107, 108]
    assert swapped == [first[:4] + second[:4], first[4:] + second[4:]]
    scattered = [each["scatter_in_place"]["sealring"][1][3] for each in by_rank]
    assert scattered == [[3.0, 6.0, 9.0, 12.0], first[:4]]
