"""One admitted worker, who has the vault's key, changes a checkpoint that all ranks signed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from sealring.errors import ForeignPart, RolledBack, Unsupported
from sealring.vault import CheckpointReader, CheckpointWriter, Vault, keys, signing
from sealring.vault import checkpoint_check as checking
from tests.workers import SECRET

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
Change = Callable[[Vault, dict[str, Any]], dict[str, Any]]


@pytest.fixture
def vault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Vault:
    monkeypatch.setenv("SEALRING_SECRET", SECRET)
    monkeypatch.setenv("SEALRING_JOB", "tests")
    keys.make_key_file(tmp_path / "vault.key")
    return Vault.create(tmp_path / "vault", keys.key_file(tmp_path / "vault.key"), "owner")


def save(vault: Vault, *states: dict[str, Any]) -> list[CheckpointWriter]:
    """Does what the ranks do in `dcp.save`, one rank after the other."""
    writers = [CheckpointWriter(vault, "run") for _ in states]
    planners = [DefaultSavePlanner() for _ in states]
    local = []
    for rank, (writer, planner) in enumerate(zip(writers, planners, strict=True)):
        planner.set_up_planner(states[rank], is_coordinator=rank == 0)
        writer.set_up_storage_writer(rank == 0)
        writer.rank, writer.world = rank, len(states)
        local.append(planner.create_local_plan())
    plans, metadata = planners[0].create_global_plan(local)
    plans = writers[0].prepare_global_plan(plans)
    results = [
        writer.write_data(planner.finish_plan(plan), planner).value()
        for writer, planner, plan in zip(writers, planners, plans, strict=True)
    ]
    writers[0].finish(metadata, results)
    return writers


def load(vault: Vault) -> dict[str, Any]:
    into = {"a": torch.zeros(8), "b": torch.zeros(8)}
    dcp.load(into, storage_reader=CheckpointReader(vault, "run"))
    return into


def signed_by_rank_1(document: dict[str, Any], world: int = 2) -> dict[str, str]:
    own = {name: one for name, one in document.items() if name not in signing.FIELDS}
    return asdict(signing.sign(signing.credentials_of(1, world), world, own))


def statements(content: dict[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(one["statement"]) for one in content["contributions"]]


def taking_all(content: dict[str, Any]) -> dict[str, Any]:
    """Returns rank 1's statement, changed to list the tensors of both ranks."""
    first, second = statements(content)
    moved = [one | {"start": one["start"]} for one in first["items"]]
    return second | {"items": [*moved, *second["items"]]}


def alone(vault: Vault, content: dict[str, Any]) -> dict[str, Any]:
    content["contributions"] = [signed_by_rank_1(taking_all(content))]
    return content


def twice(vault: Vault, content: dict[str, Any]) -> dict[str, Any]:
    content["contributions"] = [signed_by_rank_1(taking_all(content))] * 2
    return content


def beside_rank_0(vault: Vault, content: dict[str, Any]) -> dict[str, Any]:
    """Keeps rank 0's own signature and adds a tensor that is not in the plan that rank 0 signed."""
    _, second = statements(content)
    more = second["items"][0] | {"name": "c"}
    second["items"].append(more)
    content["contributions"][1] = signed_by_rank_1(second)
    return content


def with_its_own_plan(vault: Vault, content: dict[str, Any]) -> dict[str, Any]:
    first, second = statements(content)
    items = [[checking.Item(**one) for one in each["items"]] for each in (first, second)]
    items[1][0] = checking.Item(**(asdict(items[1][0]) | {"name": "c"}))
    second["items"] = [asdict(one) for one in items[1]]
    second["checkpoint"]["plan"] = checking.plan_digest(items, content["paths"])
    content["contributions"][1] = signed_by_rank_1(second)
    return content


def of_another_save(vault: Vault, content: dict[str, Any]) -> dict[str, Any]:
    """Mixes genuine statements of two attempts to save the same version."""
    _, second = statements(content)
    second["checkpoint"]["save"] = "00" * 16
    content["contributions"][1] = signed_by_rank_1(second)
    return content


def other_names(vault: Vault, content: dict[str, Any]) -> dict[str, Any]:
    content["paths"] = {"a": ["b"], "b": ["a"]}
    return content


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (alone, "number 0 is that of rank 1 of 2"),
        (twice, "number 0 is that of rank 1 of 2"),
        (beside_rank_0, "another plan"),
        (with_its_own_plan, "rank 1 signed is of another checkpoint"),
        (of_another_save, "rank 1 signed is of another checkpoint"),
        (other_names, "another plan"),
    ],
)
@pytest.mark.threat("P5")
def test_a_rank_that_replaces_more_than_its_own_bytes(
    change: Change, words: str, vault: Vault
) -> None:
    save(vault, {"a": torch.arange(8.0)}, {"b": torch.ones(8)})
    assert bool((load(vault)["b"] == 1).all())
    stored = vault.find("run")
    content = json.dumps(change(vault, json.loads(stored.manifest.content)))
    parts = stored.manifest.parts
    # The liar also updates the ledger, as if it could reach every ledger.
    vault.commit(stored.copy, "checkpoint", "run", parts, content)
    with pytest.raises(CheckpointException) as raised:
        load(vault)
    ((problem, _),) = raised.value.failures.values()
    assert type(problem) is ForeignPart
    assert words in str(problem)


@pytest.mark.threat("P5")
def test_a_rank_that_replaces_its_own_bytes_after_the_save(vault: Vault) -> None:
    """The changed bytes are validly signed; only the ledger of the ranks that saved shows it."""
    save(vault, {"a": torch.arange(8.0)}, {"b": torch.ones(8)})
    stored = vault.find("run")
    content = json.loads(stored.manifest.content)
    name = checking.part_of(1)
    for file in (name, checking.list_of(name)):
        (stored.copy.folder / file).local.unlink()
    part = stored.copy.write_part(name, torch.full((8,), 666.0).numpy().tobytes())
    digests = hashlib.sha256(torch.full((8,), 666.0).numpy().tobytes()).digest()
    listed = stored.copy.write_part(checking.list_of(name), digests)
    content["contributions"][1] = signed_by_rank_1(
        statements(content)[1] | {"hash": part.hash, "digests": part.digest}
    )
    parts = [*stored.manifest.parts[:2], part, listed]
    stored.copy.commit("checkpoint", "run", parts, json.dumps(content))
    with pytest.raises(CheckpointException) as raised:
        load(vault)
    ((problem, _),) = raised.value.failures.values()
    assert type(problem) is RolledBack
    (vault.path / "ledger.json").local.unlink()
    loaded = load(Vault.open(vault.path, keys.key_file(vault.path.local.parent / "vault.key")))
    assert torch.equal(loaded["a"], torch.arange(8.0))  # and nothing of rank 0 has changed
    assert bool((loaded["b"] == 666).all())


@pytest.mark.threat("P5")
def test_ranks_that_have_nothing_to_save_sign_too(vault: Vault) -> None:
    save(vault, {"a": torch.arange(8.0), "b": torch.ones(8)}, {}, {})
    content = json.loads(vault.find("run").manifest.content)
    assert [one["rank"] for one in statements(content)] == [0, 1, 2]
    assert [len(one["items"]) for one in statements(content)] == [2, 0, 0]
    assert torch.equal(load(vault)["a"], torch.arange(8.0))


@pytest.mark.threat("P5")
def test_some_ranks_alone_save_nothing(vault: Vault) -> None:
    writer = CheckpointWriter(vault, "run")
    writer.set_up_storage_writer(True)
    writer.world = 2
    planner = DefaultSavePlanner()
    planner.set_up_planner({"a": torch.ones(1)}, is_coordinator=True)
    with pytest.raises(Unsupported, match="1 of 2 ranks save 'run'"):
        writer.prepare_global_plan([planner.create_local_plan()])
