"""Checkpoints of several ranks: other worlds, other layouts, and saving in the background."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from sealring.errors import RolledBack, TamperedChunk, Unsupported
from sealring.vault import CheckpointReader, CheckpointWriter, Vault, keys
from tests.workers import Workers

Layout = list[Any]
ROWS, COLUMNS = [Shard(0)], [Shard(1)]
WHOLE = [Replicate()]


def opened(folder: str) -> Vault:
    return Vault.open(Path(folder, "vault"), keys.key_file(Path(folder, "vault.key")))


def whole(rows: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    return {
        "weight": torch.randn(rows, 1024, generator=made),
        "bias": torch.randn(rows, generator=made),
        "odd": torch.randn(37, 5, generator=made),
    }


def laid_out(tensors: dict[str, torch.Tensor], layout: Layout) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        name: distribute_tensor(
            tensor, mesh, [Replicate()] if layout == COLUMNS and tensor.dim() == 1 else layout
        )
        for name, tensor in tensors.items()
    }


def save(rank: int, world: int, folder: str, rows: int, layout: Layout) -> None:
    state = laid_out(whole(rows), layout) | {"step": 12}
    dcp.save(state, storage_writer=CheckpointWriter(opened(folder), "run"))


def load(rank: int, world: int, folder: str, rows: int, layout: Layout) -> tuple[bool, int, int]:
    """Whether each local tensor is what it must be, and the bytes that were read and needed."""
    wanted = laid_out(whole(rows), layout)
    state: dict[str, Any] = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()} | {
        "step": 0
    }
    reader = CheckpointReader(opened(folder), "run")
    dcp.load(state, storage_reader=reader)
    good = all(torch.equal(_local(state[name]), _local(tensor)) for name, tensor in wanted.items())
    return good and state["step"] == 12, reader.bytes_read, reader.bytes_needed


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def test_other_worlds_read_only_what_they_need(
    vault: Vault, workers: Workers, tmp_path: Path
) -> None:
    rows = 8192
    workers.run(save, str(tmp_path), rows, ROWS, world=4)
    assert len(vault.find("run").manifest.parts) == 8  # with the digests of each
    for world in (2, 3, 1):
        results = workers.run(load, str(tmp_path), rows, ROWS, world=world)
        assert all(good for good, _, _ in results)
        read, needed = (sum(one[index] for one in results) for index in (1, 2))
        assert needed >= rows * 1025 * 4
        assert read <= 1.05 * needed


@pytest.mark.parametrize("saved", [ROWS, COLUMNS, WHOLE], ids=["rows", "columns", "whole"])
@pytest.mark.parametrize("wanted", [ROWS, COLUMNS, WHOLE], ids=["rows", "columns", "whole"])
def test_any_layout_loads_into_any_other(
    saved: Layout, wanted: Layout, vault: Vault, workers: Workers, tmp_path: Path
) -> None:
    workers.run(save, str(tmp_path), 50, saved, world=4)
    for world in (3, 2):
        results = workers.run(load, str(tmp_path), 50, wanted, world=world)
        assert all(good for good, _, _ in results)


def test_more_ranks_than_rows(vault: Vault, workers: Workers, tmp_path: Path) -> None:
    """Some ranks have pieces without elements, at the same place."""
    workers.run(save, str(tmp_path), 2, ROWS, world=4)
    for world in (4, 1):
        results = workers.run(load, str(tmp_path), 2, ROWS, world=world)
        assert all(good for good, _, _ in results)


def save_in_background(rank: int, world: int, folder: str, helper: bool) -> None:
    state = laid_out(whole(64), ROWS) | {"step": 12}
    group = dist.new_group(backend="sealring")
    writer = CheckpointWriter(opened(folder), "run", helper=helper)
    pending: Any = dcp.async_save(state, storage_writer=writer, process_group=group)
    # The training's own collectives go on meanwhile, and what is trained may change.
    for _ in range(20):
        total = torch.ones(1000)
        dist.all_reduce(total)
        assert total[0] == world
    for name in ("weight", "bias"):
        state[name].to_local().zero_()
    pending.result()
    dist.destroy_process_group(group)


@pytest.mark.parametrize("helper", [False, True])
@pytest.mark.threat("P12")
def test_saving_in_the_background(
    helper: bool, vault: Vault, workers: Workers, tmp_path: Path
) -> None:
    workers.run(save_in_background, str(tmp_path), helper, world=2)
    results = workers.run(load, str(tmp_path), 64, ROWS, world=2)
    assert all(good for good, _, _ in results)


def save_by_torchs_process(rank: int, world: int, folder: str) -> str:
    state = {"weight": torch.ones(3)}
    try:
        response: Any = dcp.async_save(
            state,
            storage_writer=CheckpointWriter(opened(folder), "run"),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        response.result()
    except BaseException as problem:
        return f"{type(problem).__name__}: {problem}"
    return "saved"


def fail_on_one(rank: int, world: int, folder: str) -> list[tuple[int, str]]:
    writer = CheckpointWriter(opened(folder), "run")
    if rank == 1:

        def broken(copy: object, name: str, buffers: object, hash: object) -> Any:
            raise OSError(28, "no room")

        writer.seal = broken
    try:
        dcp.save(laid_out(whole(16), ROWS), storage_writer=writer)
    except CheckpointException as problem:
        return [(one, str(error[0])) for one, error in problem.failures.items()]
    return []


@pytest.mark.threat("P11")
def test_an_error_of_one_rank_reaches_all(vault: Vault, workers: Workers, tmp_path: Path) -> None:
    for failures in workers.run(fail_on_one, str(tmp_path), world=2):
        assert failures == [(1, "[Errno 28] no room")]
    assert list(vault.newest()) == []


def load_tampered(rank: int, world: int, folder: str) -> list[tuple[int, str, str]]:
    state = {name: torch.zeros_like(one) for name, one in laid_out(whole(64), ROWS).items()}
    try:
        dcp.load(state, storage_reader=CheckpointReader(opened(folder), "run"))
    except CheckpointException as problem:
        return [
            (one, type(error[0]).__name__, str(error[0])) for one, error in problem.failures.items()
        ]
    return []


@pytest.mark.threat("P1")
def test_a_changed_part_names_the_rank_that_wrote_it(
    vault: Vault, workers: Workers, tmp_path: Path
) -> None:
    workers.run(save, str(tmp_path), 64, ROWS, world=2)
    part = vault.find("run").copy.folder / "rank-00001"
    content = bytearray(part.local.read_bytes())
    content[100] ^= 1
    part.local.write_bytes(content)
    for failures in workers.run(load_tampered, str(tmp_path), world=2):
        assert {(name, rank) for rank, name, _ in failures} == {(TamperedChunk.__name__, 1)}
        assert "part rank-00001 of 'run' version 1" in failures[0][2]


def load_from_copies(rank: int, world: int, folder: str) -> list[tuple[int, str, str]]:
    ledgers = Path(folder, f"ledger-{rank}")
    ledgers.mkdir()
    os.environ["SEALRING_VAULT_LEDGER"] = str(ledgers)
    place = Path(folder, "vault" if rank == 0 else "older")
    vault = Vault.open(place, keys.key_file(Path(folder, "vault.key")))
    state: dict[str, Any] = laid_out({"weight": torch.zeros(8, 4)}, ROWS)
    try:
        dcp.load(state, storage_reader=CheckpointReader(vault, "run"))
    except CheckpointException as problem:
        return [
            (one, type(error[0]).__name__, str(error[0])) for one, error in problem.failures.items()
        ]
    finally:
        del os.environ["SEALRING_VAULT_LEDGER"]
    return []


def save_twice(rank: int, world: int, folder: str) -> None:
    for value in (1.0, 2.0):
        state = laid_out({"weight": torch.full((8, 4), value)}, ROWS)
        dcp.save(state, storage_writer=CheckpointWriter(opened(folder), "run"))
        if rank == 0 and value == 1:
            shutil.copytree(Path(folder, "vault"), Path(folder, "older"))
        dist.barrier()


@pytest.mark.threat("P6")
def test_ranks_that_see_different_copies_of_the_vault(
    vault: Vault, workers: Workers, tmp_path: Path
) -> None:
    """Each rank's state would be genuine, and the whole would be a mixture."""
    workers.run(save_twice, str(tmp_path), world=2)
    for failures in workers.run(load_from_copies, str(tmp_path), world=2):
        assert [name for _, name, _ in failures] == [RolledBack.__name__]
        assert "rank 1 found version 1 of 'run', and rank 0 version 2" in failures[0][2]


@pytest.mark.threat("P12")
def test_torchs_own_helper_process_is_refused_by_name(
    vault: Vault, workers: Workers, tmp_path: Path
) -> None:
    """It would talk to its peers over Gloo, in plaintext."""
    said = "EADDRINUSE"
    while "EADDRINUSE" in said:  # torch asks for a free port first, and opens it later
        (said,) = workers.run(save_by_torchs_process, str(tmp_path), world=1)
    assert Unsupported.__name__ in said
    assert "helper=True" in said
    assert list(vault.newest()) == []
