"""A vault in a store: workers save, load and read there, by ranges, as in a directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsspec.implementations.memory import MemoryFileSystem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.data import DataLoader

from sealring.errors import (
    ConfigurationError,
    ForeignPart,
    MissingPart,
    NoSuchObject,
    NotAVault,
    RolledBack,
    StoreFailed,
    TamperedChunk,
    TruncatedFile,
    Unsupported,
    VaultBusy,
    VaultError,
)
from sealring.vault import CheckpointReader, CheckpointWriter, Dataset, Vault, keys, trees
from sealring.vault.stores import Store, StorePath
from tests.codes import coded
from tests.vault.conftest import copy_to_store
from tests.vault.datasets import made
from tests.vault.test_checkpoints import load, refused, same, save, state
from tests.workers import SECRET, Workers

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ledgers").mkdir()
    monkeypatch.setenv("SEALRING_VAULT_LEDGER", str(tmp_path / "ledgers"))
    monkeypatch.setenv("SEALRING_SECRET", SECRET)
    monkeypatch.setenv("SEALRING_JOB", "tests")


@pytest.fixture
def stored(url: str, key: Path) -> Vault:
    return Vault.create(url, keys.key_file(key), "owner")


@pytest.fixture
def in_memory(request: pytest.FixtureRequest, key: Path) -> Vault:
    return Vault.create(f"memory://{request.node.name}", keys.key_file(key), "owner")


def again(vault: Vault, key: Path) -> Vault:
    """As another process opens it."""
    return Vault.open(str(vault.path), keys.key_file(key))


def test_checkpoints_are_saved_and_loaded(stored: Vault, key: Path) -> None:
    for seed in (1, 2, 3):
        save(stored, seed, keep=2, helper=seed == 3)
    assert same(load(again(stored, key)), state(3))
    assert same(load(stored, version=2), state(2))
    refused(lambda: load(stored, version=1), NoSuchObject, "it has 2, 3")
    with pytest.raises(VaultError, match="is there already", check=coded("vault.output_exists")):
        Vault.create(str(stored.path), keys.key_file(key), "owner")


def test_two_writers_take_two_numbers(stored: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if each has looked before the other has written."""
    monkeypatch.setattr(StorePath, "has_folder", lambda self: False)
    assert [stored.new_version("run").place.version for _ in range(2)] == [1, 2]


def test_a_bucket_is_not_made(s3: str, key: Path) -> None:
    with pytest.raises(StoreFailed, match=r"there is no mistyped\. Make it first"):
        Vault.create("s3://mistyped/vault", keys.key_file(key), "owner")
    assert not fsspec.filesystem("s3").exists("mistyped")


@pytest.mark.parametrize("kind", ["memory", "s3"])
@pytest.mark.threat("V10")
def test_parts_that_are_missing_cut_exchanged_or_changed(
    kind: str, request: pytest.FixtureRequest, key: Path
) -> None:
    """The errors are those of a disk (test_checkpoints)."""
    url = "memory://parts" if kind == "memory" else f"{request.getfixturevalue('s3')}/parts"
    vault = Vault.create(url, keys.key_file(key), "owner")
    for seed in (1, 2):
        save(vault, seed)
    store = Store(url)
    name, older = (
        str(vault.find("run", version).copy.folder / "rank-00000").removeprefix(f"{vault.path}/")
        for version in (2, 1)
    )
    good = store.read_range(name, 0, 1 << 20)
    for content, error in [
        (None, MissingPart),
        (good[:-1], TruncatedFile),
        (good + b"x", TruncatedFile),
        (store.read_range(older, 0, 1 << 20), ForeignPart),
        (bytes([good[0] ^ 1]) + good[1:], TamperedChunk),
        (good[:30000] + bytes([good[30000] ^ 1]) + good[30001:], TamperedChunk),
    ]:
        store.remove(name)
        if content is not None:
            store.put(name, content, new=True)
        refused(lambda: load(vault), error, "part rank-00000 of 'run' version 2")
    store.put(name, good, new=False)
    assert same(load(vault), state(2))
    store.remove(name.rpartition("/")[0].rpartition("/")[0])
    refused(lambda: load(again(vault, key)), RolledBack, "last written as version 2")


class Killed(BaseException):
    pass


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.threat("V40")
def test_killed_at_every_step_of_a_save_the_one_before_is_whole(
    half: bool, in_memory: Vault, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`half`: a part is uploaded before the process ends, and before it knows."""
    save(in_memory, 1)
    steps, last = [0], [0]

    def counted(method: str) -> None:
        real = getattr(Store, method)

        def step(*args: Any, **kwargs: Any) -> Any:
            steps[0] += 1
            if steps[0] == last[0]:
                if half:
                    real(*args, **kwargs)
                raise Killed
            return real(*args, **kwargs)

        monkeypatch.setattr(Store, method, step)

    for method in ("put", "upload"):
        counted(method)
    found = []
    for last[0] in range(1, 50):
        steps[0] = 0
        try:
            save(in_memory, 2)
        except BaseException:
            last[0] = 0
            loaded = load(again(in_memory, key))
            assert same(loaded, state(loaded["step"]))
            found.append(loaded["step"])
            last[0] = steps[0]
        else:
            break
    assert found == [1, 1, 1, 1, 1 + half]  # the number, the key, two parts and the manifest
    last[0] = 0
    assert same(load(again(in_memory, key)), state(2))


def test_what_killed_saves_have_left_is_removed_when_a_later_one_is_complete(
    in_memory: Vault,
) -> None:
    left = in_memory.new_version("run").folder.parent
    save(in_memory, 1)
    assert left in in_memory.incomplete("run")  # another process could have been writing it
    save(in_memory, 2)
    assert in_memory.incomplete("run") == []
    assert same(load(in_memory), state(2))


@pytest.mark.threat("V25")
def test_a_new_key_while_a_save_commits(
    in_memory: Vault, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can be held in a store, so what was committed meanwhile is taken back."""
    save(in_memory, 1)
    real = Store.put

    def put(self: Store, path: str, content: bytes, *, new: bool) -> None:
        if path.endswith("/manifest"):
            monkeypatch.setattr(Store, "put", real)
            again(in_memory, key).rekey()
        real(self, path, content, new=new)

    monkeypatch.setattr(Store, "put", put)
    refused(lambda: save(in_memory, 2), VaultBusy, "save it again")
    assert same(load(again(in_memory, key)), state(1))
    save(in_memory, 2)
    trees.rotate(in_memory, lambda _: None)
    assert same(load(again(in_memory, key)), state(2))


def test_a_store_that_fails_while_it_is_read(
    in_memory: Vault, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(in_memory, 1)
    real = Store.read_range

    def read_range(self: Store, path: str, start: int, end: int) -> bytes:
        if path.endswith("rank-00000") and start > 56:
            raise StoreFailed("the network is down")
        return real(self, path, start, end)

    monkeypatch.setattr(Store, "read_range", read_range)
    refused(lambda: load(in_memory), StoreFailed, "the network is down")


@pytest.mark.threat("V27")
def test_a_store_that_answers_with_more_than_it_was_asked_for(
    in_memory: Vault, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that ignores ranges sends the whole file."""
    save(in_memory, 1)
    monkeypatch.setattr(
        MemoryFileSystem, "cat_file", lambda self, path, start, end: self.store[path].getvalue()
    )
    refused(lambda: load(in_memory), StoreFailed, "were asked for, and")


def test_a_store_that_fails_hides_no_newer_checkpoint(
    in_memory: Vault, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not open is left out, because an attacker may have put it there; but not this."""
    save(in_memory, 1)
    older = str(in_memory.find("run").copy.folder.parent).removeprefix(f"{in_memory.path}/")
    save(in_memory, 2)
    (tmp_path / "fresh").mkdir()  # a ledger that knows neither
    monkeypatch.setenv("SEALRING_VAULT_LEDGER", str(tmp_path / "fresh"))
    real = Store.size

    def size(self: Store, path: str) -> int | None:
        if path.endswith(failing[0]) and not path.startswith(older):
            raise StoreFailed("the network is down")
        return real(self, path)

    monkeypatch.setattr(Store, "size", size)
    failing = [""]
    for failing[0] in ("key.json", "manifest"):
        refused(lambda: load(again(in_memory, key)), StoreFailed, "the network is down")


def test_what_a_store_cannot_do_is_refused_by_name(
    in_memory: Vault, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for work in (lambda: made.sealed(in_memory, made.json_lines(tmp_path / "rows")),):
        with pytest.raises(Unsupported, match="lies in a store"):
            work()
    with pytest.raises(NotAVault, match="there is no vault in memory://nowhere"):
        Vault.open("memory://nowhere", keys.key_file(key))
    monkeypatch.delenv("SEALRING_VAULT_LEDGER")
    with pytest.raises(ConfigurationError, match="set SEALRING_VAULT_LEDGER to a folder"):
        again(in_memory, key)


def counting(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes that came from the store, of each file."""
    counts: dict[str, int] = {}
    real = Store.read_range

    def read_range(self: Store, path: str, start: int, end: int) -> bytes:
        content = real(self, path, start, end)
        name = path.rpartition("/")[2]
        counts[name] = counts.get(name, 0) + len(content)
        return content

    monkeypatch.setattr(Store, "read_range", read_range)
    return counts


def test_a_dataset_is_read_by_ranges(
    vault: Vault, key: Path, s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is ingested in a directory and copied, the manifest last."""
    url = f"{s3}/{tmp_path.name}"
    rows = 40
    content = torch.arange(rows * 32768, dtype=torch.int32).to(torch.uint16)
    source = tmp_path / "tokens"
    source.mkdir()
    (source / "a.bin").write_bytes(content.numpy().tobytes())
    made.sealed(vault, source, shard=4 << 20, dtype="uint16")
    copy_to_store(vault, url)
    counts = counting(monkeypatch)
    dataset = Dataset(Vault.open(url, keys.key_file(key)), "data", length=32768)
    assert len(dataset) == rows
    wanted = list(range(5, 25))
    for number, item in zip(wanted, dataset.__getitems__(wanted), strict=True):
        assert torch.equal(item["tokens"], content[number * 32768 :][:32768].long())
    needed = len(wanted) * 65536
    assert needed < counts["shard-00000000"] <= 1.05 * needed
    # Workers that are forked, or spawned, connect by themselves.
    for start, count in (("fork", 2), ("spawn", 1)):
        loader = DataLoader(dataset, 4, num_workers=count, multiprocessing_context=start)
        found = torch.cat([batch["tokens"] for batch in loader])
        assert torch.equal(found.reshape(-1), content.long())


def sharded(world: int, fill: float | None) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world,))
    made = torch.arange(1536 << 10, dtype=torch.float32).reshape(1536, 1024)
    weight = made if fill is None else torch.full_like(made, fill)
    return {"weight": distribute_tensor(weight, mesh, [Shard(0)])}


def saves(rank: int, world: int, url: str, key: str) -> None:
    vault = Vault.open(url, keys.key_file(Path(key)))
    dcp.save(sharded(world, None), storage_writer=CheckpointWriter(vault, "run"))


def loads(rank: int, world: int, url: str, key: str) -> tuple[bool, int, int]:
    """Whether the state is right, the bytes that came from the store, and those needed."""
    with pytest.MonkeyPatch.context() as patch:
        counts = counting(patch)
        reader = CheckpointReader(Vault.open(url, keys.key_file(Path(key))), "run")
        wanted = sharded(world, 0.0)
        dcp.load(wanted, storage_reader=reader)
    right = torch.equal(wanted["weight"].to_local(), sharded(world, None)["weight"].to_local())
    dist.barrier()
    came = sum(count for name, count in counts.items() if name.startswith("rank-"))
    return right, came, reader.bytes_needed


def test_another_world_reads_what_it_needs(
    workers: Workers, s3: str, key: Path, tmp_path: Path
) -> None:
    url = f"{s3}/world-{tmp_path.name}"
    Vault.create(url, keys.key_file(key), "owner")
    env = {name: os.environ[name] for name in os.environ if name.startswith("AWS_")}
    env["SEALRING_VAULT_LEDGER"] = os.environ["SEALRING_VAULT_LEDGER"]
    workers.run(saves, url, str(key), world=2, env=env)
    results = workers.run(loads, url, str(key), world=3, env=env)
    for right, came, needed in results:
        assert right
        assert needed == (2 << 20)
        assert came <= 1.05 * needed
