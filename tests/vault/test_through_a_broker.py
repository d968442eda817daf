"""A vault that opens only in workers that a broker admits, and only where its policy grants it."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from sealring import _native
from sealring.errors import NoSuchResource
from sealring.vault import CheckpointReader, CheckpointWriter, Vault, keys, released_key
from tests.broker.local import Place, running
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
        except NoSuchResource as problem:
            return float(weight.sum()), type(problem).__name__
        return float(weight.sum()), "released"
    finally:
        dist.destroy_process_group()


def test_the_vaults_key_is_released_to_admitted_workers(workers: Workers, tmp_path: Path) -> None:
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
    with running(place) as broker:
        results = workers.run(
            trains,
            str(tmp_path / "vault"),
            "gpt/key/other",
            world=2,
            group=False,
            env=place.environment(broker.port),
        )
    assert results == [(3000.0, "NoSuchResource")] * 2
    # The owner reads what the workers saved, signed under the broker's authority.
    fresh = Vault.open(tmp_path / "vault", keys.key_file(tmp_path / "owner"))
    reader = CheckpointReader(fresh, "run", authorities=[place.keys.authority], job="job")
    assert reader.read_metadata().state_dict_metadata.keys() == {"weight", "rank"}
    assert reader._failure is None
