"""Batches opened in the order of a stream. A CPU plays the GPU: tests/gpu has the GPU itself."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from sealring.errors import (
    AlreadyClosed,
    ConfigurationError,
    TamperedChunk,
    Unsupported,
    VaultBusy,
    VaultError,
)
from sealring.vault import Dataset, Loader, keys, trees
from sealring.vault.datasets import shards
from sealring.vault.sealed import CHACHA
from sealring.vault.vault import Vault
from tests.codes import coded
from tests.vault.datasets import gpu_cases as cases
from tests.vault.datasets.made import sealed
from tests.vault.host_opener import HostLoader


@pytest.fixture
def tokens(vault: Vault, tmp_path: Path) -> Vault:
    cases.seal_tokens(vault, tmp_path / "tokens")
    return vault


@pytest.mark.parametrize(
    "options", [{}, {"shuffle": False}, {"batch_size": None}, {"batch_size": 300}, {"block": 7}]
)
def test_batches_and_states_are_those_of_the_loader_in_every_world(
    tokens: Vault, options: dict[str, Any]
) -> None:
    cases.check_every_world(HostLoader, tokens, tokens, **options)


def test_a_state_is_continued_exactly_on_any_world(tokens: Vault) -> None:
    cases.check_resumed(HostLoader, tokens, tokens)


def test_mixtures(tokens: Vault, tmp_path: Path) -> None:
    cases.check_mixture(HostLoader, tokens, tokens, tmp_path)


def test_types_and_documents(vault: Vault, tmp_path: Path) -> None:
    cases.check_types(HostLoader, vault, vault, tmp_path)


@pytest.fixture
def gpu_vault(tmp_path: Path, key: Path) -> Vault:
    return Vault.create(tmp_path / "for-gpus", keys.key_file(key), "owner", suite=CHACHA)


def test_arrays_as_they_are(gpu_vault: Vault, tmp_path: Path) -> None:
    cases.check_arrays(HostLoader, gpu_vault, gpu_vault, tmp_path / "rows")


def test_what_only_a_cpu_can_make_is_refused(
    gpu_vault: Vault, tokens: Vault, tmp_path: Path
) -> None:
    cases.seal_arrays(gpu_vault, tmp_path / "rows")
    sealed(gpu_vault, cases.token_file(tmp_path / "aes"), "aes", dtype="uint16",
           suite="AEAD_AES_256_GCM")  # fmt: skip
    refused = {
        "two": r"values \(array:int16\), n \(int64\) is decoded by the CPU",
        "raw": r"\(json\) is decoded by the CPU",
        "aes": "--suite chacha20-poly1305",
    }
    for name, about in refused.items():
        with pytest.raises(Unsupported, match=about):
            HostLoader(cases.stream(Dataset(gpu_vault, name)), gpu_vault)
    with pytest.raises(Unsupported, match="transform="):
        HostLoader(cases.stream(Dataset(tokens, "data", length=4, transform=str)), tokens)
    with cases.packed(tokens) as dataset:
        with pytest.raises(Unsupported, match="collate="):
            HostLoader(cases.stream(dataset, collate=list), tokens)
        for option, about in (
            ({"length": 7}, r"one name, type and length, .*length=7, documents=False\)\. Read"),
            ({"documents": True}, r"documents=False\), tokens \(.*documents=True\)\. Read"),
        ):
            with (
                cases.packed(tokens, **option) as other,
                pytest.raises(Unsupported, match=about),
            ):
                HostLoader(cases.stream([dataset, other]), tokens)
        with pytest.raises(ConfigurationError, match="ahead=1"):
            HostLoader(cases.stream(dataset), tokens, ahead=0)
    ragged = HostLoader(cases.stream(Dataset(gpu_vault, "ragged")), gpu_vault)
    with pytest.raises(ConfigurationError, match="'values' of a batch have different lengths"):
        next(iter(ragged))
    assert ragged.state_dict()["position"] == 0


def test_a_chunk_that_samples_share_is_opened_once(tokens: Vault) -> None:
    with cases.packed(tokens) as dataset:
        loader = HostLoader(cases.stream(dataset, block=1 << 14, batch_size=4), tokens)
        assert len(list(loader)) == 209
        assert dataset.bytes < loader.opener.opened_bytes < 1.05 * dataset.bytes
        loader.close()


def open_parts(vault: Vault) -> int:
    """Files below the vault that this process has open."""
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    found = [os.readlink(link) for link in links if os.path.islink(link)]
    return sum(one.startswith(str(vault.path)) for one in found)


def test_few_shards_are_open_at_the_same_time(
    tokens: Vault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "OPEN_SHARDS", 1)
    with cases.packed(tokens) as dataset, cases.packed(tokens) as same:
        assert len(dataset.shards) == 4
        loader = HostLoader(cases.stream(dataset), tokens)
        cases.assert_same_epochs(loader, Loader(cases.stream(same)), epochs=2)
        assert 0 < open_parts(tokens) <= 1 + 3  # of the other dataset, and of a group of batches
        loader.close()
        assert open_parts(tokens) == 1
    assert open_parts(tokens) == 0


def test_batches_from_a_store(
    tokens: Vault, tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fsspec")
    (tmp_path / "ledger").mkdir(mode=0o700)
    monkeypatch.setenv("SEALRING_VAULT_LEDGER", str(tmp_path / "ledger"))
    stored = Vault.open(f"file://{tokens.path}", keys.key_file(key))
    with cases.packed(stored) as dataset:
        loader = HostLoader(cases.stream(dataset), stored)
        cases.assert_same_epochs(loader, Loader(cases.stream(dataset)))
        loader.close()


def test_a_changed_chunk_is_named_and_the_state_is_that_of_the_batches_before(
    tokens: Vault,
) -> None:
    with cases.packed(tokens) as dataset:
        loader = HostLoader(cases.stream(dataset, shuffle=False), tokens)
        part = dataset.shards[2].part
        (path,) = tokens.path.local.rglob(part)
        with path.open("r+b") as file:
            file.seek(1000)
            file.write(b"changed")
        taken: list[Any] = []
        with pytest.raises(TamperedChunk, match=f"chunk 0 of part {part} of 'data'"):
            taken.extend(loader)
        assert loader.state_dict()["position"] == 5 * len(taken)
        loader.close()


def test_a_vault_that_is_rotated_meanwhile(tokens: Vault) -> None:
    with cases.packed(tokens) as dataset:
        loader = HostLoader(cases.stream(dataset), tokens)
        trees.rotate(tokens, lambda count: None)
        with pytest.raises(
            VaultBusy, match="open the dataset again", check=coded("vault.keys_changed")
        ):
            next(iter(loader))
        loader.close()


def test_a_loader_that_is_closed_is_refused_by_name(tokens: Vault) -> None:
    before = threading.active_count()
    with cases.packed(tokens) as dataset:
        loader = HostLoader(cases.stream(dataset), tokens)
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        loader.close()
        loader.close()
        assert loader.opener.closed == 1
        for use in (
            lambda: next(batches),
            lambda: next(iter(loader)),
            lambda: loader.load_state_dict(state),
        ):
            with pytest.raises(AlreadyClosed, match="was closed"):
                use()
        assert loader.state_dict() == state
    assert threading.active_count() == before


def test_a_loader_whose_dataset_is_closed_is_refused_by_name(tokens: Vault) -> None:
    with cases.packed(tokens) as dataset, HostLoader(cases.stream(dataset), tokens) as loader:
        next(iter(loader))
        dataset.close()
        with pytest.raises(AlreadyClosed, match="the dataset 'data' was closed"):
            next(iter(loader))


def test_iterations_that_a_later_one_or_a_state_has_ended(tokens: Vault) -> None:
    with cases.packed(tokens) as dataset:
        loader, other = HostLoader(cases.stream(dataset), tokens), Loader(cases.stream(dataset))
        first = iter(loader)
        next(first)
        state = loader.state_dict()
        second = iter(loader)
        next(second)
        with pytest.raises(AlreadyClosed, match="later one"):
            next(first)
        next(second)
        loader.load_state_dict(state)
        with pytest.raises(AlreadyClosed, match="a state that was loaded"):
            next(second)
        assert loader.state_dict() == state
        other.load_state_dict(state)
        cases.assert_same_epochs(loader, other)
        with pytest.raises(VaultError, check=coded("vault.wrong_position")):
            loader.load_state_dict(dict(state, data=state["data"] + 1))
        loader.close()


def test_a_loop_that_is_left_goes_on_where_it_stopped(tokens: Vault) -> None:
    with cases.packed(tokens) as dataset:
        loader, other = HostLoader(cases.stream(dataset), tokens), Loader(cases.stream(dataset))
        before = threading.active_count()
        for _ in loader:
            break
        assert threading.active_count() == before
        for _ in other:
            break
        cases.assert_same_epochs(loader, other, epochs=2)
        loader.close()
