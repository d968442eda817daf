"""A state changes its layout between running workers: bit-identical, and no byte moves twice."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from sealring.errors import Unsupported, VaultError, WorkerFailed
from sealring.vault import reshard
from tests.workers import Workers

MESHES = ([0, 1, 2, 3], [0, 1, 2], [0, 1], [2, 3], [2], [0], [1])


def whole() -> dict[str, Any]:
    """Weights, an optimizer's moments, the place in the data and a random generator."""
    made = torch.Generator().manual_seed(5)
    weights = {
        "a": torch.randn(37, 12, generator=made),
        "b": torch.randn(16, 10, generator=made).to(torch.bfloat16),
        "c": torch.randn(9, generator=made),
        "d": torch.randint(0, 2, (5, 7), generator=made).bool(),
    }
    moments = {
        f"{name}.mean": torch.randn(one.shape, generator=made) for name, one in weights.items()
    }
    return {
        "model": weights,
        "optimizer": moments,
        "count": torch.tensor(12),
        "rng": torch.Generator().manual_seed(9).get_state(),
        "data": {"epoch": 3, "sample": 1417},
    }


def placed(tensor: torch.Tensor, mesh: DeviceMesh, placement: Any) -> Any:
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, [placement])
    local = tensor
    for axis, (size, start) in enumerate(zip(shape, offset, strict=True)):
        local = local.narrow(axis, start if size else 0, size)
    return DTensor.from_local(
        local.clone(),
        mesh,
        [placement],
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def laid_out(kind: str, count: int, rank: int, meshes: dict[tuple[int, ...], DeviceMesh]) -> Any:
    """This rank's share of the whole state on the first `count` ranks."""
    if rank >= count:
        return {}
    state = whole()
    ranks = list(range(count))
    for group in ("model", "optimizer"):
        for number, (name, tensor) in enumerate(list(state[group].items())):
            if kind == "fsdp":
                state[group][name] = placed(tensor, meshes[tuple(ranks)], Shard(0))
            elif kind == "tp x pp":
                stage = ranks[: -(-count // 2)] if number % 2 == 0 else ranks[-(-count // 2) :]
                if rank not in stage:
                    del state[group][name]
                    continue
                how = Shard(1) if tensor.dim() == 2 else Replicate()
                state[group][name] = placed(tensor, meshes[tuple(stage)], how)
    return state


def tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    flat = {f"{group}.{name}": one for group in ("model", "optimizer")
            for name, one in state.get(group, {}).items()}  # fmt: skip
    flat |= {name: state[name] for name in ("count", "rng") if name in state}
    return {n: one.to_local() if isinstance(one, DTensor) else one for n, one in flat.items()}


def emptied(state: dict[str, Any]) -> dict[str, Any]:
    for one in tensors(state).values():
        one.zero_()
    if state:
        state["data"] = {"epoch": 0, "sample": 0}
    return state


def changes(
    rank: int, world: int, steps: list[tuple[str, int]]
) -> list[tuple[bool, int, int, int]]:
    meshes = {tuple(ranks): DeviceMesh("cpu", ranks) for ranks in MESHES}
    results = []
    for (old, before), (new, after) in pairwise(steps):
        held = laid_out(old, before, rank, meshes)
        expected = laid_out(new, after, rank, meshes)
        wanted = emptied(laid_out(new, after, rank, meshes))
        moved = reshard(held, wanted)
        found, right = tensors(wanted), tensors(expected)
        good = found.keys() == right.keys() and all(
            torch.equal(found[name], right[name]) for name in right
        )
        good = good and wanted.get("data") == expected.get("data")
        results.append((good, moved.bytes_needed, moved.bytes_received, moved.bytes_kept))
    return results


def test_any_layout_becomes_any_other(workers: Workers) -> None:
    steps = [
        ("ddp", 4), ("ddp", 3), ("fsdp", 3), ("tp x pp", 2), ("fsdp", 4), ("tp x pp", 4),
        ("tp x pp", 3), ("ddp", 2), ("fsdp", 2), ("fsdp", 3), ("ddp", 4),
    ]  # fmt: skip
    results = workers.run(changes, steps, world=4)
    for number in range(len(steps) - 1):
        ranks = [one[number] for one in results]
        assert all(good for good, _, _, _ in ranks), steps[number : number + 2]
        needed, received = (sum(one[index] for one in ranks) for index in (1, 2))
        assert received <= 1.05 * needed
        # From ddp to fewer ranks, or to fsdp on the same: each holds what it wants.
        assert (received == 0) == (number in (0, 1, 7))


def fails(rank: int, world: int) -> list[str]:
    def attempt(held: dict[str, Any], wanted: dict[str, Any]) -> str:
        try:
            reshard(held, wanted)
        except (VaultError, Unsupported, WorkerFailed) as problem:
            return f"{problem.code}: {problem}"
        return "moved"

    memory = torch.zeros(8)
    return [
        # A tensor that no rank holds.
        attempt({}, {"w": torch.zeros(3)}),
        # One rank alone cannot take part: all are told, and the next call works.
        attempt({"w": torch.zeros(3).to_sparse()} if rank == 1 else {}, {}),
        attempt({"w": memory[:4]}, {"w": memory[4:]}),
        attempt({"w": torch.ones(3)} if rank == 0 else {}, {"w": torch.zeros(3)}),
        # A type that would run code.
        attempt({"x": Path()} if rank == 0 else {}, {}),
    ]


def test_what_cannot_be_moved_is_named_on_every_rank(workers: Workers) -> None:
    first, second = workers.run(fails, world=2)
    assert first[0].startswith(
        "vault.missing_part: no rank holds 3 elements of 'w' that rank 0 wants"
    )
    assert second[0] == first[0]
    assert second[1].startswith("configuration.unsupported: w is sparse")
    assert first[1].startswith("worker_failed: rank 1 cannot take part in this change of layout")
    assert all(
        one[2].startswith("configuration.unsupported: the wanted 'w' shares its memory")
        for one in (first, second)
    )
    assert first[3] == second[3] == "moved"
    assert first[4].startswith("vault.unsafe_entry: the entry 'x'")
    assert second[4].startswith("worker_failed: rank 0 cannot take part")


def model_on(mesh: DeviceMesh) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(33, 50), torch.nn.ReLU(), torch.nn.Linear(50, 33))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    inputs = torch.randn(8, 33, generator=torch.Generator().manual_seed(number))
    loss = model(inputs).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, at: int) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "step": at}


def goes_on(rank: int, world: int, folder: str) -> tuple[list[float], list[float]]:
    """Trains on four ranks, then on three of them: from memory, and from a plain checkpoint."""
    four, three = DeviceMesh("cpu", [0, 1, 2, 3]), DeviceMesh("cpu", [0, 1, 2])
    model, optimizer = model_on(four)
    for number in range(3):
        step(model, optimizer, number)
    held = state_of(model, optimizer, 3)
    dcp.save(held, storage_writer=FileSystemWriter(folder))
    losses: list[list[float]] = []
    for from_memory in (True, False):
        wanted: dict[str, Any] = {}
        if rank < 3:
            smaller, its_optimizer = model_on(three)
            step(smaller, its_optimizer, 99)
            wanted = state_of(smaller, its_optimizer, 0)
        if from_memory:
            moved = reshard(held, wanted)
            assert moved.bytes_received <= 1.05 * moved.bytes_needed
        elif rank < 3:
            dcp.load(
                wanted, storage_reader=FileSystemReader(folder), process_group=three.get_group()
            )
        losses.append([])
        if rank < 3:
            assert wanted["step"] == 3
            set_state_dict(
                smaller, its_optimizer,
                model_state_dict=wanted["model"], optim_state_dict=wanted["optimizer"],
            )  # fmt: skip
            losses[-1] = [step(smaller, its_optimizer, number) for number in range(3, 6)]
    return losses[0], losses[1]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_training_goes_on_from_memory_as_from_a_checkpoint(
    workers: Workers, tmp_path: Path
) -> None:
    results = workers.run(goes_on, str(tmp_path / "plain"), world=4)
    for moved, loaded in results:
        assert moved == loaded  # to the last bit
    assert [len(moved) for moved, _ in results] == [3, 3, 3, 0]
    assert len(set(results[0][0])) == 3
