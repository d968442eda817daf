"""What provenance learns of datasets: signed transformations, and which samples a rank has read."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sealring.errors import ConfigurationError, ForgedStatement
from sealring.record.recording.noted import Notes
from sealring.record.statements.forms import Transformation
from sealring.record.statements.run_folder import create_run, open_run
from sealring.record.statements.signing import create_owner, read_owner, verify_statement
from sealring.vault import Dataset, Stream
from sealring.vault.datasets.order import ShardOrder
from sealring.vault.vault import Vault
from tests.vault.datasets.made import json_lines, sealed
from tests.vault.datasets.test_pipeline import PIPELINE
from tests.vault.test_commands import Shell

COUNT = 31


@pytest.fixture
def sh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    shell = Shell(tmp_path, key="k")
    shell("init", "v")
    json_lines(tmp_path / "raw")
    (tmp_path / "pipeline.py").write_text(PIPELINE)
    create_owner(tmp_path / "owner")
    create_owner(tmp_path / "other")
    create_run(tmp_path / "run", "job")
    return shell


def recorded(folder: Path, owner: str = "owner.pub") -> dict[str, Transformation]:
    found = {}
    for _, envelope in open_run(folder / "run").statements():
        content = verify_statement(envelope, [], owners=[read_owner(folder / owner)]).content
        assert isinstance(content, Transformation)
        found[content.name] = content
    return found


def test_ingest_and_stages_are_signed_and_lead_from_one_to_the_next(sh: Shell) -> None:
    how = ["--record", "run", "--owner-key", "owner"]
    for _ in range(2):  # a second run adds nothing
        sh("ingest", "v", "raw", *how)
        sh("build", "v", "pipeline.py", *how)
    found = recorded(sh.folder)
    assert {name: one.kind for name, one in found.items()} == {
        "raw": "ingest", "cleaned": "stage", "tokenised": "stage"}  # fmt: skip
    assert found["raw"].outputs == found["cleaned"].inputs
    assert found["cleaned"].outputs == found["tokenised"].inputs
    assert found["cleaned"].parameters.text == '{"shortest":7}'
    (code,) = found["cleaned"].code
    assert (code.name, code.sha256) == ("clean", hashlib.sha256(PIPELINE.encode()).hexdigest())
    assert found["raw"].inputs[0].name == "raw"
    with pytest.raises(ForgedStatement):
        recorded(sh.folder, "other.pub")


def test_another_content_is_another_statement(sh: Shell) -> None:
    how = ["--record", "run", "--owner-key", "owner"]
    sh("ingest", "v", "raw", *how)
    with open(sh.folder / "raw" / "0.jsonl", "a") as file:
        file.write('{"n": 100}\n')
    sh("ingest", "v", "raw", *how)
    assert len(open_run(sh.folder / "run").statement_names()) == 2


def test_what_is_recorded_is_signed_into_a_run(sh: Shell) -> None:
    with pytest.raises(ConfigurationError, match="--record and --owner-key go together"):
        sh("ingest", "v", "raw", "--record", "run")
    with pytest.raises(ConfigurationError, match="can be used by others than its owner"):
        sh("ingest", "v", "raw", "--record", "run", "--owner-key", "owner.pub")
    assert not list((sh.folder / "v").rglob("manifest"))


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_the_samples_of_each_rank_are_noted_as_it_read_them(
    vault: Vault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: int
) -> None:
    sealed(vault, json_lines(tmp_path / "source", count=COUNT))
    dataset = Dataset(vault, "data")
    order = ShardOrder(dataset.sizes, seed=5, block=8)
    every: list[tuple[int, int]] = []
    for rank in range(world):
        notes = Notes()
        recording: Any = SimpleNamespace(notes=notes)
        monkeypatch.setattr("sealring.record.recording.run.current", lambda: recording)  # noqa: B023
        stream = Stream(dataset, batch_size=None, seed=5, block=8, rank=rank, world=world)
        seen = [sample["n"] for _ in range(2) for sample in stream]
        ranges = notes.take().data
        assert len(ranges) <= 4  # they do not grow with the steps
        places = []
        for one in ranges:
            assert (one.name, one.sha256, one.seed) == ("data", dataset.digest, 5)
            assert one.share is not None
            own = range(one.first + one.share.offset, one.end, one.share.period)
            places += [(one.epoch, place) for place in own]
        assert len(places) == len(seen)
        found = np.asarray([epoch * COUNT + place for epoch, place in places])
        shards, inside = order.locate(found)
        assert [sample["n"] for sample in dataset.fetch(shards, inside)] == seen
        every += places
    assert len(set(every)) == len(every) >= 2 * COUNT  # no item twice, and all of two epochs
    dataset.close()


def test_a_dataset_that_is_read_by_number_is_named(
    vault: Vault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a run could train on it, and state only what it has read by a stream."""
    sealed(vault, json_lines(tmp_path / "source", count=3))
    recording: Any = SimpleNamespace(notes=Notes())
    monkeypatch.setattr("sealring.record.recording.run.current", lambda: recording)
    dataset = Dataset(vault, "data")
    (named,) = recording.notes.take().data
    assert (named.name, named.sha256, named.first, named.end) == ("data", dataset.digest, 0, 0)
    dataset.close()
