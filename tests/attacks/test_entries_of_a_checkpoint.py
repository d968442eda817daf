"""Checkpoint entries that are not tensors: one worker pickles them and other ranks load them."""

from __future__ import annotations

import io
import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

from sealring.errors import VaultError
from sealring.vault import CheckpointReader, CheckpointWriter, Vault
from tests.attacks.test_planted_files import vault
from tests.vault.test_checkpoints import refused

__all__ = ["vault"]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def attack(path: str) -> str:
    Path(path).touch()
    return "the attacker's"


def stand_in(path: str) -> str:
    """The restricted unpickler is told to use this function in place of `attack`."""
    return "harmless"


class Runs:
    def __reduce__(self) -> Any:
        return attack, ("owned",)


class OwnLoads(DefaultLoadPlanner):
    """A planner that loads entries itself, as torch's page on planners shows."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=False)


@pytest.mark.parametrize("planner", [DefaultLoadPlanner, OwnLoads])
@pytest.mark.threat("P9")
def test_a_name_that_two_unpicklers_understand_differently(
    planner: type[DefaultLoadPlanner], vault: Vault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One unpickler checked the entry; another one loaded it and ran its code."""
    monkeypatch.chdir(tmp_path)
    with torch.serialization.safe_globals([(stand_in, f"{__name__}.attack")]):
        dcp.save({"entry": Runs()}, storage_writer=CheckpointWriter(vault, "run"))
        state = {"entry": None}
        dcp.load(state, storage_reader=CheckpointReader(vault, "run"), planner=planner())
    assert state["entry"] == "harmless"
    assert not (tmp_path / "owned").exists()


class NamesItsPickle:
    """An OrderedDict with an attribute that pickle takes for the method that pickles it."""

    def __reduce__(self) -> Any:
        return OrderedDict, (), {"__reduce_ex__": torch.Size}


@pytest.mark.threat("P9")
def test_an_entry_that_says_how_it_is_pickled(vault: Vault) -> None:
    dcp.save({"entry": NamesItsPickle()}, storage_writer=CheckpointWriter(vault, "run"))
    reader = CheckpointReader(vault, "run")
    refused(
        lambda: dcp.load({"entry": None}, storage_reader=reader), "vault.unsafe_entry", "'entry'"
    )


@pytest.mark.parametrize(
    ("run", "named"), [(os.system, "posix.system"), (attack, f"{__name__}.attack")]
)
def test_a_refusal_names_the_attack_and_does_not_advise_to_run_it(
    run: object, named: str, vault: Vault
) -> None:
    """The refusal once repeated torch's advice to use `weights_only=False`, with control codes."""

    class Names:
        def __reduce__(self) -> Any:
            return run, ("true",)

    with pytest.raises(CheckpointException) as failed:
        dcp.save({"entry": Names()}, storage_writer=CheckpointWriter(vault, "run"))
    found = failed.value.failures[0][0]
    assert isinstance(found, VaultError)
    assert found.code == "vault.unsafe_entry"
    assert named in str(found)
    assert "weights_only" not in str(found)
    assert str(found).isprintable()


def test_what_an_entry_may_hold_comes_back(vault: Vault) -> None:
    generator = torch.Generator().manual_seed(7)
    entry = OrderedDict(
        step=3, rates=(0.1, 1e300), name="cosine", raw=b"\0\xff", seen={1, 2},
        random=[generator.get_state()], nothing=None, flag=True, number=1j, size=torch.Size([2]),
    )  # fmt: skip
    dcp.save({"entry": [entry, 5]}, storage_writer=CheckpointWriter(vault, "run"))
    state: dict[str, Any] = {"entry": [OrderedDict(entry), 0]}
    dcp.load(state, storage_reader=CheckpointReader(vault, "run"))
    assert pickle.dumps(state["entry"]) == pickle.dumps([entry, 5])
