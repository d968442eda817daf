"""After close(): keys are wiped, files and threads are gone, and every use is AlreadyClosed."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.context import get_spawning_popen, set_spawning_popen
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils.data import DataLoader

from sealring import _native
from sealring.errors import AlreadyClosed, WorkerFailed
from sealring.vault import CheckpointReader, CheckpointWriter, Dataset, Stream
from sealring.vault.datasets.reading_keys import ReadingKeys
from sealring.vault.keys import key_file
from sealring.vault.sealed import AES
from sealring.vault.vault import Vault
from tests.attacks.key_search import masked
from tests.own_memory import places
from tests.vault.datasets.made import json_lines, numbers, sealed
from tests.workers import SECRET

_FILE_KEY = """
import sys
from cryptography.hazmat.primitives.hashes import SHA512
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from tests.attacks.key_search import masked, unmasked
key, salt, context = sys.stdin.read().split()
info = b"c2sp.org/chunked-encryption@v1+AEAD_AES_256_GCM\\0" + bytes.fromhex(salt + context)
print(masked(HKDFExpand(SHA512(), 76, info).derive(unmasked(key))[:32]))
"""


def file_key(part_key: _native.Secret, salt: bytes, context: bytes) -> str:
    """What the file's chunks are sealed with, masked; computed where this memory is not."""
    given = f"{masked(part_key)} {salt.hex()} {context.hex()}"
    command = [sys.executable, "-c", _FILE_KEY]
    return subprocess.run(
        command, input=given, check=True, capture_output=True, text=True
    ).stdout.strip()


def open_files(folder: Path) -> list[str]:
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    found = [os.readlink(link) for link in links if os.path.islink(link)]
    return [path for path in found if path.startswith(str(folder))]


@pytest.fixture
def filled(vault: Vault, tmp_path: Path) -> Vault:
    """With the dataset `data`."""
    sealed(vault, json_lines(tmp_path / "source", 20, 1))
    return vault


# ---- datasets --------------------------------------------------------------------------------


def uses(dataset: Dataset) -> list[Callable[[], Any]]:
    stream = Stream(dataset, batch_size=2, collate=numbers)
    return [
        lambda: dataset[0],
        lambda: dataset[10**9],
        lambda: dataset.__getitems__([0, 1]),
        lambda: dataset.shard(0),
        lambda: dataset.new_reader(0),
        lambda: dataset.form(),
        lambda: dataset.__enter__(),
        lambda: Stream(dataset),
        lambda: next(iter(stream)),
        lambda: next(iter(DataLoader(dataset))),
        lambda: pickle.dumps(dataset),
    ]


def test_a_closed_dataset_raises_at_every_use_and_says_what_it_was(filled: Vault) -> None:
    with Dataset(filled, "data") as dataset:
        shard, later = dataset.shard(0), uses(dataset)
        assert dataset[0]["n"] == 0
        assert open_files(filled.path.local)
    assert not open_files(filled.path.local)
    for use in later:
        with pytest.raises(AlreadyClosed, match="the dataset 'data' was closed: open it again"):
            use()
    with pytest.raises(AlreadyClosed, match=f"{shard.name} was closed"):
        shard.offsets  # noqa: B018
    with pytest.raises(AlreadyClosed, match=f"{shard.name} was closed"):
        list(shard.samples())
    assert (len(dataset), dataset.name, dataset.version) == (20, "data", 1)
    dataset.close()  # once more
    with Dataset(filled, "data") as again:
        assert again[3]["n"] == 3


def test_no_key_of_a_closed_dataset_is_in_memory(filled: Vault) -> None:
    dataset = Dataset(filled, "data")
    assert dataset[0]["n"] == 0
    stored = filled.find("data")
    part = stored.manifest.parts[0]
    key = stored.copy.place.part_key(part.name)
    header = (stored.copy.folder / part.name).local.read_bytes()[:24]
    wanted = {
        "the part's": masked(key),
        "the file's": file_key(key, header, stored.copy.place.context(part.name)),
        "the object's": masked(stored.copy.place.key),
    }
    del stored, key
    assert [name for name in wanted if places(wanted[name])] == ["the part's", "the file's"]
    dataset.close()
    assert [name for name in wanted if places(wanted[name])] == []


def test_a_forked_worker_of_a_closed_dataset_raises_the_same(filled: Vault) -> None:
    dataset = Dataset(filled, "data")
    loader = DataLoader(dataset, num_workers=1, multiprocessing_context="fork")
    dataset.close()
    with pytest.raises(AlreadyClosed, match="the dataset 'data' was closed"):
        list(loader)


def test_a_spawned_worker_of_a_closed_dataset_is_not_started(filled: Vault) -> None:
    dataset = Dataset(filled, "data")
    loader = DataLoader(dataset, num_workers=1, multiprocessing_context="spawn")
    dataset.close()
    with pytest.raises(AlreadyClosed, match="the dataset 'data' was closed"):
        list(loader)


def read_and_close(dataset: Dataset, answers: Any) -> None:
    said = [dataset[1]["n"]]
    dataset.close()
    try:
        dataset[1]
    except AlreadyClosed:
        said.append("AlreadyClosed")
    said.append(len(open_files(Path(os.environ["CLOSING_VAULT"]))))
    answers.put(said)


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_a_worker_closes_its_own_and_not_its_parents(
    filled: Vault, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLOSING_VAULT", str(filled.path))
    context: Any = multiprocessing.get_context(how)
    with Dataset(filled, "data") as dataset:
        dataset[0]  # so that a forked worker has a file of its parent's
        answers = context.SimpleQueue()
        worker = context.Process(target=read_and_close, args=(dataset, answers))
        worker.start()
        assert answers.get() == [1, "AlreadyClosed", 0]
        worker.join()
        assert dataset[2]["n"] == 2


def test_a_worker_that_has_not_fetched_its_keys_when_the_dataset_is_closed_gets_none() -> None:
    before = threading.active_count()
    key = _native.Secret.random(32)
    wanted = masked(key)
    keys = ReadingKeys("the dataset", [key])
    del key
    spawning = get_spawning_popen()
    popen: Any = object()
    set_spawning_popen(popen)
    try:
        state = pickle.dumps(keys)
    finally:
        set_spawning_popen(spawning)
    assert threading.active_count() == before + 1, "a thread waits for the worker"
    assert places(wanted)
    keys.close()
    assert threading.active_count() == before
    assert not places(wanted)
    worker = pickle.loads(state)
    with pytest.raises(WorkerFailed, match=r"did not get the dataset's keys: .*refused"):
        worker.key(0)


def test_a_read_that_is_under_way_ends_before_its_file_is_closed(vault: Vault) -> None:
    place = vault.new_version("x").place
    content = os.urandom(40_000)
    whole = place.seal("part", content)
    inside, go_on = threading.Event(), threading.Event()
    go_on.set()

    def read(offset: int, size: int) -> bytes:
        inside.set()
        go_on.wait()
        return whole[offset : offset + size]

    reader = place.reader(read, "part", "the file", 1, len(whole))
    inside.clear()
    go_on.clear()
    into = bytearray(len(content))
    reading = threading.Thread(target=reader.read_into, args=(0, into))
    reading.start()
    inside.wait()
    closing = threading.Thread(target=reader.close)
    closing.start()
    go_on.set()
    reading.join()
    closing.join()
    assert into == content
    for use in (
        lambda: reader.read_into(0, into),
        lambda: reader.verify(0, 1),
        lambda: reader.read_runs(bytes(8), bytes(8), bytearray()),
    ):
        with pytest.raises(AlreadyClosed, match="the file was closed: open it again"):
            use()
    assert reader.length == len(content)


# ---- vaults and checkpoints ------------------------------------------------------------------


def test_a_closed_vault_raises_at_every_use_and_its_keys_are_wiped(
    filled: Vault, key: Path
) -> None:
    opener = key_file(key)
    with Vault.open(filled.path, opener) as vault:
        wanted = [masked(vault.ring.key), masked(vault.ring.names)]
        copy = vault.find("data").copy
        version = copy.folder.parent
        with Dataset(vault, "data") as dataset:
            vault.close()
            assert dataset[0]["n"] == 0, "a dataset has keys of its own"
    filled.close()
    assert not any(places(one) for one in wanted)
    for use in (
        lambda: vault.find("data"),
        lambda: list(vault.newest()),
        lambda: list(vault.copies([])),
        lambda: list(vault.stored([])),
        lambda: vault.new_version("other"),
        lambda: vault.folder_of("data"),
        lambda: vault.remove_version(version),
        lambda: vault.incomplete("data", abandoned=True),
        lambda: vault.refresh(),
        lambda: vault.reading().__enter__(),
        lambda: vault.held(alone=False),
        lambda: vault.grant("more", opener),
        lambda: vault.revoke("owner"),
        lambda: vault.rekey(),
        lambda: vault.require_writer(),
        lambda: vault.commit(copy, "files", "data", [], ""),
        lambda: Dataset(vault, "data"),
        lambda: CheckpointWriter(vault, "run"),
    ):
        with pytest.raises(AlreadyClosed, match=f"the vault {vault.path} was closed"):
            use()
    assert version.local.is_dir()
    assert Vault.open(filled.path, opener).find("data"), "the opener is the caller's"


@pytest.fixture
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEALRING_SECRET", SECRET)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.usefixtures("identity")
def test_closed_checkpoint_storage(vault: Vault) -> None:
    state = {"w": torch.arange(5000.0)}
    with CheckpointWriter(vault, "run") as writer:
        dcp.save(state, storage_writer=writer, no_dist=True)
    loaded = {"w": torch.zeros(5000)}
    with CheckpointReader(vault, "run") as reader:
        dcp.load(loaded, storage_reader=reader, no_dist=True)
    assert torch.equal(loaded["w"], state["w"])
    key = vault.find("run").copy.place.key
    wanted = masked(key)
    assert places(wanted)
    del key
    assert not places(wanted)
    with pytest.raises(CheckpointException, match="the writer of 'run' was closed") as refused:
        dcp.save(state, storage_writer=writer, no_dist=True)
    assert [type(one) for one, _ in refused.value.failures.values()] == [AlreadyClosed]
    with pytest.raises(CheckpointException, match="the reader of 'run' was closed") as refused:
        dcp.load(loaded, storage_reader=reader, no_dist=True)
    assert [type(one) for one, _ in refused.value.failures.values()] == [AlreadyClosed]
    assert reader.loaded[0] == "run@1"
    with CheckpointReader(vault, "run") as again:
        vault.close()
        with pytest.raises(CheckpointException, match=f"the vault {vault.path} was closed"):
            dcp.load(loaded, storage_reader=again, no_dist=True)


def test_a_writer_wipes_its_key_when_the_file_is_finished(vault: Vault) -> None:
    place = vault.new_version("x").place
    assert place.suite == AES
    writer = place.writer(-1, "part", 1)
    writer.write([bytes(20_000)])
    salt = writer.take()[:24]
    wanted = file_key(place.part_key("part"), salt, place.context("part"))
    assert places(wanted)
    writer.finish()
    assert not places(wanted)
