"""Batches of a vault's stream that the GPU opens equal those of the CPU's loader, bit by bit."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from sealring.core.engine.streams import new_stream
from sealring.errors import AlreadyClosed, TamperedChunk
from sealring.vault import GpuLoader, Loader, Vault, keys
from sealring.vault.sealed import CHACHA
from tests.vault.datasets import gpu_cases as cases


@pytest.fixture
def vault(tmp_path: Path) -> Vault:
    keys.make_key_file(tmp_path / "key")
    return Vault.create(tmp_path / "vault", keys.key_file(tmp_path / "key"), "owner", suite=CHACHA)


@pytest.fixture
def tokens(vault: Vault, tmp_path: Path) -> Vault:
    cases.seal_tokens(vault, tmp_path / "tokens")
    return vault


def test_batches_and_states_are_those_of_the_loader_in_every_world(tokens: Vault) -> None:
    cases.check_every_world(GpuLoader, "cuda", tokens)


def test_a_state_is_continued_exactly_on_any_world(tokens: Vault) -> None:
    cases.check_resumed(GpuLoader, "cuda", tokens)


def test_mixtures(tokens: Vault, tmp_path: Path) -> None:
    cases.check_mixture(GpuLoader, "cuda", tokens, tmp_path)


def test_types_and_documents(vault: Vault, tmp_path: Path) -> None:
    cases.check_types(GpuLoader, "cuda", vault, tmp_path)


def test_arrays_as_they_are(vault: Vault, tmp_path: Path) -> None:
    cases.check_arrays(GpuLoader, "cuda", vault, tmp_path / "rows")


def test_a_batch_is_whole_on_each_stream_that_takes_it(tokens: Vault) -> None:
    """The stream changes between batches that were opened together."""
    with cases.packed(tokens) as dataset:
        loader, expected = GpuLoader(cases.stream(dataset)), Loader(cases.stream(dataset))
        streams = [new_stream(torch.device("cuda")) for _ in range(2)]
        taken, batches = [], iter(loader)
        for step in range(len(expected)):
            with torch.cuda.stream(streams[step % 2]):
                taken.append(next(batches))
        torch.cuda.synchronize()
        for found, batch in zip(taken, expected, strict=True):
            cases.assert_same(found, batch)
        loader.close()


def test_a_changed_chunk_is_named(tokens: Vault) -> None:
    with cases.packed(tokens) as dataset:
        part = dataset.shards[2].part
        (path,) = tokens.path.local.rglob(part)
        with path.open("r+b") as file:
            file.seek(1000)
            file.write(b"changed")
        loader = GpuLoader(cases.stream(dataset, shuffle=False))
        with pytest.raises(TamperedChunk, match=f"chunk 0 of part {part} of 'data'"):
            list(loader)
        loader.close()


def test_a_loader_that_is_closed_is_refused_by_name(tokens: Vault) -> None:
    before = threading.active_count()
    with cases.packed(tokens) as dataset:
        loader = GpuLoader(cases.stream(dataset))
        batches = iter(loader)
        next(batches)
        loader.close()
        with pytest.raises(AlreadyClosed, match="was closed"):
            next(batches)
    assert threading.active_count() == before
