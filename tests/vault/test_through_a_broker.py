"""A vault that opens only in workers that a broker admits, and only where its policy grants it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from sealring import _native
from sealring.errors import BrokerRefusal, ConfigurationError, RolledBack
from sealring.vault import CheckpointReader, CheckpointWriter, Vault, keys, released_key
from tests.attest.broker.local import Place, running
from tests.workers import Workers

RESOURCE = "gpt/key/vault"


def trains(rank: int, world: int, folder: str, also: str) -> tuple[float, str]:
    """Saves and loads with the key that the broker released; what came back, and a refusal."""
    dist.init_process_group("sealring")
    try:
        vault = Vault.open(Path(folder), released_key(RESOURCE))
        state = {"weight": torch.full((1000,), 3.0), "rank": rank}
        dcp.save(state, storage_writer=CheckpointWriter(vault, "run"))
        loaded = {"weight": torch.zeros(1000), "rank": -1}
        dcp.load(loaded, storage_reader=CheckpointReader(vault, "run"))
        weight = loaded["weight"]
        assert isinstance(weight, torch.Tensor)
        try:
            released_key(also)
        except BrokerRefusal as problem:
            return float(weight.sum()), problem.code
        return float(weight.sum()), "released"
    finally:
        dist.destroy_process_group()


def granted(tmp_path: Path) -> tuple[Place, Vault]:
    """A broker's files, and a vault that is open to its workers."""
    place = Place(tmp_path)
    for name in (RESOURCE, "gpt/key/other"):
        path = place.data_keys / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(_native.Secret.random(32)))
        path.chmod(0o600)
    place.write_policy(f'[[resources]]\npath = "{RESOURCE}"\n')
    keys.make_key_file(tmp_path / "owner")
    vault = Vault.create(tmp_path / "vault", keys.key_file(tmp_path / "owner"), "owner")
    data = _native.Secret((place.data_keys / RESOURCE).read_bytes())
    worker = keys.broker_key(RESOURCE, data)
    vault.grant("workers", worker)
    (tmp_path / "vault" / "ledger.json").unlink()
    return place, vault


@pytest.mark.threat("V45")
def test_the_vaults_key_is_released_to_admitted_workers(workers: Workers, tmp_path: Path) -> None:
    place, _ = granted(tmp_path)
    with running(place) as broker:
        results = workers.run(
            trains,
            str(tmp_path / "vault"),
            "gpt/key/other",
            world=2,
            group=False,
            env=place.environment(broker.port),
        )
    assert results == [(3000.0, "broker.no_such_resource")] * 2
    # The owner reads what the workers saved, signed under the broker's authority.
    fresh = Vault.open(tmp_path / "vault", keys.key_file(tmp_path / "owner"))
    reader = CheckpointReader(fresh, "run", authorities=[place.keys.authority], job="job")
    assert reader.read_metadata().state_dict_metadata.keys() == {"weight", "rank"}


def rolls_back(rank: int, world: int, folder: str) -> list[str]:
    """Saves three times; the disk's owner puts older states back, with all that lies there."""
    dist.init_process_group("sealring")
    path = Path(folder)

    def restore(copy: str) -> None:
        dist.barrier()
        if rank == 0:
            shutil.rmtree(path)
            shutil.copytree(path.with_name(copy), path)
        dist.barrier()

    def keep(copy: str) -> None:
        dist.barrier()
        if rank == 0:
            shutil.copytree(path, path.with_name(copy))
        dist.barrier()

    def load(version: int | None = None) -> str:
        state = {"weight": torch.zeros(1000)}
        try:
            fresh = Vault.open(path, released_key(RESOURCE))
            dcp.load(state, storage_reader=CheckpointReader(fresh, "run", version=version))
        except CheckpointException as problem:
            return type(problem.failures[rank][0]).__name__
        except RolledBack as problem:
            by_broker = "the broker https://127.0.0.1" in str(problem)
            return f"{problem.code} of the header, by the broker: {by_broker}"
        return str(int(state["weight"][0]))

    try:
        results = []
        for step in (1, 2, 3):
            vault = Vault.open(path, released_key(RESOURCE))
            state = {"weight": torch.full((1000,), float(step))}
            dcp.save(state, storage_writer=CheckpointWriter(vault, "run"))
            keep(f"after-{step}")
        results.append(load())
        restore("after-2")
        results += [load(), load(version=2)]
        restore("after-3")
        results.append(load())
        if rank == 0:
            Vault.open(path, released_key(RESOURCE)).rekey()
        restore("after-3")
        results.append(load())
        return results
    finally:
        dist.destroy_process_group()


@pytest.mark.threat("V11")
def test_a_disk_that_is_put_back_whole_is_seen_by_the_brokers_ledger(
    workers: Workers, tmp_path: Path
) -> None:
    place, _ = granted(tmp_path)
    with running(place) as broker:
        environment = place.environment(broker.port) | {"SEALRING_VAULT_LEDGER": "broker"}
        results = workers.run(
            rolls_back, str(tmp_path / "vault"), world=2, group=False, env=environment
        )
    assert not (tmp_path / "vault" / "ledger.json").exists()
    assert (
        results
        == [["3", "RolledBack", "2", "3", "vault.rolled_back of the header, by the broker: True"]]
        * 2
    )


def test_the_brokers_ledger_needs_a_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEALRING_VAULT_LEDGER", "broker")
    monkeypatch.delenv("SEALRING_BROKER", raising=False)
    keys.make_key_file(tmp_path / "owner")
    with pytest.raises(ConfigurationError, match="set SEALRING_BROKER"):
        Vault.create(tmp_path / "vault", keys.key_file(tmp_path / "owner"), "owner")
    assert not (tmp_path / "vault").exists()
