"""Data-loader workers: the same order, and keys that come through a socket once."""

from __future__ import annotations

import os
import pickle
import socket
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.utils.data import DataLoader

from sealring.errors import ForkedProcess, Unsupported
from sealring.vault import Dataset, Loader, Stream
from sealring.vault.children import Door, connect_to_parent, is_child
from sealring.vault.vault import Vault
from tests.vault.datasets.made import COUNT, json_lines, numbers, sealed


def stream(dataset: Dataset) -> Stream:
    return Stream(dataset, batch_size=3, block=16, collate=numbers)


@pytest.mark.parametrize(("workers", "how"), [(1, "fork"), (2, "fork"), (1, "spawn")])
def test_workers_give_the_same_batches(dataset: Dataset, workers: int, how: str) -> None:
    wanted = list(stream(dataset))
    loader = Loader(stream(dataset), num_workers=workers, multiprocessing_context=how)
    assert len(loader) == len(wanted) == -(-COUNT // 3)
    assert list(loader) == wanted
    begun = {"epoch": 1, "position": -COUNT % 3}  # the last batch is filled from the next epoch
    assert loader.state_dict() == {**stream(dataset).state_dict(), **begun}
    if how == "fork":
        again = stream(dataset)
        list(again)
        assert list(loader) == list(again)  # the next epoch


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_workers_get_the_keys_of_many_shards(vault: Vault, tmp_path: Path, how: str) -> None:
    built = sealed(vault, json_lines(tmp_path / "source", count=300), shard=30)
    assert built.shards > 2 * 128
    wanted = list(stream(Dataset(vault, "data")))
    made = stream(Dataset(vault, "data"))
    assert list(Loader(made, num_workers=1, multiprocessing_context=how)) == wanted


def late(worker: int) -> None:
    time.sleep(worker)


def test_a_worker_that_begins_when_another_has_ended(dataset: Dataset) -> None:
    """As at the end of an epoch, where a worker has few batches or none."""
    state = {**stream(dataset).state_dict(), "position": COUNT - 5}
    alone = stream(dataset)
    alone.load_state_dict(state)
    loader = Loader(stream(dataset), num_workers=2, worker_init_fn=late)
    loader.load_state_dict(state)
    assert list(loader) == list(alone)


def test_the_state_counts_what_was_taken_and_not_what_workers_read_ahead(dataset: Dataset) -> None:
    wanted = list(stream(dataset))
    loader = Loader(stream(dataset), num_workers=2, prefetch_factor=4)
    running = iter(loader)
    taken = [next(running) for _ in range(5)]
    state = loader.state_dict()
    assert state["position"] == 15
    del running
    resumed = Loader(stream(dataset), num_workers=1)
    resumed.load_state_dict(state)
    assert taken + list(resumed) == wanted


def test_map_style_in_torchs_own_loader(dataset: Dataset) -> None:
    loader = DataLoader(dataset, batch_size=8, num_workers=2, collate_fn=numbers)
    assert [number for batch in loader for number in batch] == list(range(COUNT))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_torchdatas_stateful_loader(dataset: Dataset) -> None:
    module = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is missing")
    wanted = list(stream(dataset))
    for workers in (0, 2):
        for cut in (0, 1, 6, 16):
            options = {"batch_size": None, "num_workers": workers}
            loader = module.StatefulDataLoader(stream(dataset), **options)
            running = iter(loader)
            taken = [next(running) for _ in range(cut)]
            state = loader.state_dict()
            del running
            resumed = module.StatefulDataLoader(stream(dataset), **options)
            resumed.load_state_dict(state)
            assert taken + list(resumed) == wanted, (workers, cut)


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_an_epoch_is_not_repeated_by_a_loader_that_does_not_count(
    dataset: Dataset, how: str
) -> None:
    """torch's own loader gives its workers the stream as it was before the first epoch."""
    read = stream(dataset)
    wanted = list(stream(dataset))
    loader = DataLoader(read, batch_size=None, num_workers=1, multiprocessing_context=how)
    assert list(loader) == wanted
    with pytest.raises(Unsupported, match=r"Use sealring\.vault\.Loader"):
        list(loader)
    if how == "fork":
        read.load_state_dict(stream(dataset).state_dict())  # to read it again is wanted now
        assert list(loader) == wanted
        kept = DataLoader(stream(dataset), batch_size=None, num_workers=2, persistent_workers=True)
        both = stream(dataset)
        assert [list(kept), list(kept)] == [list(both), list(both)]  # workers that stay count


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_nor_by_torchdatas(dataset: Dataset) -> None:
    module = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is missing")
    loader = module.StatefulDataLoader(stream(dataset), batch_size=None, num_workers=2)
    assert list(loader) == list(stream(dataset))
    with pytest.raises(Unsupported, match=r"Use sealring\.vault\.Loader"):
        list(loader)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_position_is_part_of_a_checkpoint(dataset: Dataset, tmp_path: Path) -> None:
    first = Loader(stream(dataset))
    running = iter(first)
    taken = [next(running) for _ in range(4)]
    dcp.save({"data": first, "w": torch.ones(2)}, checkpoint_id=tmp_path / "saved", no_dist=True)
    second = Loader(stream(dataset))
    dcp.load({"data": second, "w": torch.ones(2)}, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert taken + list(second) == list(stream(dataset))


@pytest.mark.threat("P19")
def test_keys_are_in_no_pickle(dataset: Dataset) -> None:
    with pytest.raises(Unsupported, match="put into no pickle"):
        pickle.dumps(dataset)
    with pytest.raises(Unsupported, match="put into no pickle"):
        pickle.dumps(stream(dataset))


@pytest.mark.threat("P19")
def test_a_child_that_no_loader_made_has_no_keys(dataset: Dataset) -> None:
    child = os.fork()
    if child == 0:
        try:
            dataset[0]
        except ForkedProcess:
            os._exit(17)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
    assert dataset[0]["n"] == 0  # the parent still has them


@pytest.mark.threat("P19")
def test_neither_environment_nor_arguments_have_keys(dataset: Dataset, vault: Vault) -> None:
    stored = vault.find("data")
    parts = [bytes(stored.copy.place.part_key(part.name)) for part in stored.manifest.parts]
    secrets = [*parts, bytes(stored.copy.place.key), bytes(vault.ring.key)]
    loader = Loader(stream(dataset), num_workers=1, multiprocessing_context="spawn")
    running = iter(loader)
    next(running)
    children = [pid for pid in os.listdir("/proc") if pid.isdigit() and is_child(int(pid))]
    assert children
    for pid in children:
        shown = b"".join(
            Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ")
        )
        for secret in secrets:
            assert secret not in shown
            assert secret.hex().encode() not in shown
    del running


@pytest.mark.threat("P19")
def test_a_process_that_is_no_child_gets_no_keys(dataset: Dataset) -> None:
    """A stranger connects to the address of a worker; the worker itself still gets its keys."""
    door = Door()
    child = os.fork()
    if child == 0:
        grandchild = os.fork()
        if grandchild == 0:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as there:
                there.connect(b"\0" + door.address.encode())
                os._exit(0 if there.recv(1) == b"" else 1)
        status = os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1])
        if status == 0:
            with connect_to_parent(door.address) as parent:
                os._exit(0 if parent.recv(1) == b"k" else 2)
        os._exit(status)
    with door.accept(is_child) as here:
        here.sendall(b"k")
    door.close()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_address_works_once() -> None:
    door = Door()
    door.close()
    with pytest.raises(ConnectionRefusedError):
        connect_to_parent(door.address)


def test_a_loader_takes_no_settings_that_break_its_state(dataset: Dataset) -> None:
    for options in ({"persistent_workers": True}, {"batch_size": 4}):
        with pytest.raises(Unsupported, match="the stream makes the batches"):
            Loader(stream(dataset), num_workers=1, **options)
