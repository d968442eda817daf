"""What sealring must do with every supported torch. `make torch-versions` runs it with each.

    sealring run -n 4 tests/torch_versions/checks.py RESULTS [CHECK ...]

Each check has a process group of its own. Every rank writes RESULTS/CHECK.RANK.json: "ok", the last
line of an error, or why this torch has no such thing.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint as dcp
import torch.distributed.distributed_c10d as c10d
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

WORLD: Final = 4


class NotAvailable(Exception):
    """This torch does not have what the check is about."""


def model() -> Any:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def batches() -> torch.Tensor:
    return torch.arange(WORLD * 3 * 8, dtype=torch.float32).reshape(WORLD, 3, 8) / 100


def trained(module: Any, inputs: torch.Tensor, steps: int = 2) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        module(inputs).square().mean().backward()
        optimizer.step()
    return module


def on_one_process() -> list[torch.Tensor]:
    """The weights after the same training, with all batches in one process."""
    return [weight.detach() for weight in trained(model(), batches().reshape(-1, 8)).parameters()]


def require_equal(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected)


def ddp(rank: int, _folder: Path) -> None:
    module = trained(DistributedDataParallel(model()), batches()[rank])
    require_equal([weight.detach() for weight in module.parameters()], on_one_process())


def fsdp2(rank: int, _folder: Path) -> None:
    module = model()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    for layer in module:
        fully_shard(layer, mesh=mesh)
    trained(fully_shard(module, mesh=mesh), batches()[rank])
    whole = [weight.full_tensor().detach() for weight in module.parameters()]
    require_equal(whole, on_one_process())


def objects(rank: int, _folder: Path) -> None:
    gathered: list[Any] = [None] * WORLD
    dist.all_gather_object(gathered, {"rank": rank})
    require_equal([each["rank"] for each in gathered], list(range(WORLD)))
    told = [f"from {rank}"]
    dist.broadcast_object_list(told, src=1)
    assert told == ["from 1"]
    received: list[Any] = [None]
    dist.scatter_object_list(received, [f"to {each}" for each in range(WORLD)], src=0)
    assert received == [f"to {rank}"]
    collected: list[Any] | None = [None] * WORLD if rank == 2 else None
    dist.gather_object(rank, collected, dst=2)
    assert collected is None or collected == list(range(WORLD))


def subgroups(rank: int, _folder: Path) -> None:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=halves[rank // 2])
    assert tensor.item() == (1.0 if rank < 2 else 5.0)
    own, _all = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    gathered = [torch.zeros(1) for _ in range(2)]
    dist.all_gather(gathered, torch.tensor([float(rank)]), group=own)
    assert [each.item() for each in gathered] == [rank % 2, rank % 2 + 2]
    if rank in (0, 3):
        message = torch.tensor([7.0]) if rank == 0 else torch.zeros(1)
        _ = dist.send(message, 3) if rank == 0 else dist.recv(message, 0)
        assert message.item() == 7.0


def functional(rank: int, _folder: Path) -> None:
    group: Any = dist.group.WORLD
    tensor = torch.arange(4.0) + rank
    total = torch.arange(4.0) * WORLD + 6
    require_equal(funcol.all_reduce(tensor, "sum", group) + 0, total)
    gathered = funcol.all_gather_tensor(tensor, 0, group) + 0
    require_equal(gathered, torch.cat([torch.arange(4.0) + each for each in range(WORLD)]))
    scattered = funcol.reduce_scatter_tensor(tensor, "sum", 0, group) + 0
    require_equal(scattered, total[rank : rank + 1])
    turned = funcol.all_to_all_single(tensor, None, None, group) + 0
    require_equal(turned, torch.tensor([float(rank + each) for each in range(WORLD)]))
    several = funcol.all_reduce_coalesced([tensor, tensor * 2], "sum", group)
    require_equal([each + 0 for each in several], [total, total * 2])
    parts = funcol.all_gather_into_tensor_coalesced([tensor, tensor * 2], group)
    require_equal([each + 0 for each in parts], [gathered, gathered * 2])


def dtensor(_rank: int, _folder: Path) -> None:
    mesh = init_device_mesh("cpu", (WORLD,))
    whole = torch.arange(64.0).reshape(8, 8)
    rows: Any = distribute_tensor(whole, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    require_equal(columns.full_tensor(), whole)
    product = rows @ distribute_tensor(whole, mesh, [Replicate()])
    require_equal(product.full_tensor(), whole @ whole)
    require_equal((columns.sum() + 0).full_tensor(), whole.sum())


def checkpoint(rank: int, folder: Path) -> None:
    from sealring.vault import CheckpointReader, CheckpointWriter, Vault, key_file
    from sealring.vault.keys import make_key_file

    if rank == 0:
        make_key_file(folder / "vault.key")
        Vault.create(folder / "vault", key_file(folder / "vault.key"), "owner")
    dist.barrier()
    vault = Vault.open(folder / "vault", key_file(folder / "vault.key"))
    module = fully_shard(model(), mesh=init_device_mesh("cpu", (WORLD,)))
    saved: dict[str, Any] = {"model": trained(module, batches()[rank]).state_dict(), "step": 2}
    before = [value.full_tensor().clone() for value in saved["model"].values()]
    dcp.save(saved, storage_writer=CheckpointWriter(vault, "run"))
    other: Any = fully_shard(
        model(), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))
    )
    wanted = {"model": other.state_dict(), "step": 0}
    dcp.load(wanted, storage_reader=CheckpointReader(vault, "run"))
    require_equal([value.full_tensor() for value in wanted["model"].values()], before)
    assert wanted["step"] == 2


def compile_(rank: int, _folder: Path) -> None:
    group: Any = dist.group.WORLD

    def step(tensor: torch.Tensor) -> torch.Tensor:
        return funcol.all_reduce(tensor * 2, "sum", group) + 1

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    require_equal(compiled(torch.ones(4)), torch.full((4,), 2.0 * WORLD + 1))
    module: Any = torch.compile(DistributedDataParallel(model()), backend="aot_eager")
    trained(module, batches()[rank])
    require_equal([weight.detach() for weight in module.parameters()], on_one_process())


def reconfigure_query(_rank: int, _folder: Path) -> None:
    if not hasattr(dist.ProcessGroup, "supports_reconfigure"):
        raise NotAvailable("from torch 2.14 on")
    assert dist.group.WORLD.supports_reconfigure is False  # type: ignore[union-attr]
    ask: Any = getattr(dist, "_supports_reconfigure", None)
    assert ask is None or ask() is False


def hooks(_rank: int, _folder: Path) -> None:
    if not hasattr(dist.ProcessGroup, "register_pre_hook"):
        raise NotAvailable("from torch 2.14 on")
    seen: list[tuple[str, str]] = []
    group: Any = dist.new_group()
    group.register_pre_hook(1, lambda call: seen.append(("before", call.name.name)))
    group.register_post_hook(1, lambda call: seen.append(("after", call.name.name)))
    work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
    assert work is not None
    work.wait()
    assert work.is_completed()
    dist.barrier(group=group)
    expected = [(when, name) for name in ("ALLREDUCE", "BARRIER") for when in ("before", "after")]
    assert seen == expected, seen


def flight_recorder(rank: int, _folder: Path) -> None:
    if not hasattr(c10d, "_maybe_attach_flight_recorder"):
        raise NotAvailable("from torch 2.15 on")
    recorder: Any = torch._C._distributed_c10d
    recorder._reset_fr_trace(backend="sealring")
    pair = dist.new_group([0, 1], group_desc="a pair")
    dist.all_reduce(torch.ones(4, 2))
    if rank < 2:
        dist.all_gather_into_tensor(torch.empty(6), torch.ones(3), group=pair)
        _ = dist.send(torch.ones(5), 1) if rank == 0 else dist.recv(torch.empty(5), 0)
    dump = json.loads(recorder._dump_fr_trace_json(backend="sealring"))
    found = [
        (entry["profiling_name"], entry["process_group"][1], entry["input_sizes"])
        for entry in dump["entries"]
    ]
    expected = [("sealring:all_reduce", "default_pg", [[4, 2]])]
    if rank < 2:
        expected.append(("sealring:_all_gather_base", "a pair", [[3]]))
        message = "send 0->1" if rank == 0 else "recv 1<-0"
        expected.append((f"sealring:{message}", "default_pg", [[5]] if rank == 0 else []))
        assert [0, 1] in [json.loads(each["ranks"]) for each in dump["pg_config"].values()]
    assert found == expected, found


CHECKS: Final[dict[str, Callable[[int, Path], None]]] = {
    "DDP": ddp,
    "FSDP2": fsdp2,
    "objects": objects,
    "subgroups": subgroups,
    "functional": functional,
    "DTensor": dtensor,
    "checkpoint": checkpoint,
    "compile": compile_,
    "reconfigure": reconfigure_query,
    "hooks": hooks,
    "flight recorder": flight_recorder,
}


def run(check: str, folder: Path) -> dict[str, str]:
    try:
        dist.init_process_group("sealring", timeout=timedelta(seconds=120))
        CHECKS[check](dist.get_rank(), folder)
        dist.barrier()
    except NotAvailable as reason:
        return {"status": "not available", "text": str(reason)}
    except Exception as error:
        traceback.print_exc()
        return {"status": "failed", "text": f"{type(error).__name__}: {error}".splitlines()[-1]}
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return {"status": "ok", "text": ""}


def main(results: str, *checks: str) -> None:
    rank = os.environ["RANK"]
    for check in checks or CHECKS:
        found = run(check, Path(results))
        (Path(results) / f"{check}.{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
