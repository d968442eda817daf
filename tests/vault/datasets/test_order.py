"""One global order for every world: shuffled, mixed, packed, and resumed anywhere."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from sealring import _native
from sealring.errors import ConfigurationError, VaultError
from sealring.vault import Dataset, Stream
from sealring.vault.datasets.order import MIXED, Mixture, ShardOrder, permutation, shares
from sealring.vault.vault import Vault
from tests.codes import coded
from tests.vault.datasets.made import COUNT, json_lines, numbers, sealed, tokens


def stream(dataset: Dataset | list[Dataset], rank: int, world: int, **others: Any) -> Stream:
    options: dict[str, Any] = {"batch_size": 1, "block": 16, "seed": 7, "collate": numbers}
    return Stream(dataset, rank=rank, world=world, **(options | others))


def steps(streams: list[Stream]) -> Iterator[list[int]]:
    """What all ranks get in one step, in the global order."""
    for batches in zip(*(iter(one) for one in streams), strict=True):
        yield [number for row in zip(*batches, strict=True) for number in row]


def world_of(dataset: Dataset, world: int, state: dict[str, int] | None = None) -> list[Stream]:
    made = [stream(dataset, rank, world) for rank in range(world)]
    if state is not None:
        for one in made:
            one.load_state_dict(state)
    return made


def test_every_world_has_the_same_order_and_each_sample_once(dataset: Dataset) -> None:
    (alone,) = world_of(dataset, 1)
    wanted = [number for step in steps([alone]) for number in step]
    assert sorted(wanted) == list(range(COUNT))
    assert wanted != sorted(wanted)
    second = [number for step in steps([alone]) for number in step]
    assert sorted(second) == list(range(COUNT))
    assert second != wanted
    for world in range(2, 9):
        found = [number for step in steps(world_of(dataset, world)) for number in step]
        assert found[:COUNT] == wanted
        assert found[COUNT:] == second[: -COUNT % world]  # the last step is filled up


@pytest.mark.parametrize("before", range(1, 9))
@pytest.mark.parametrize("after", range(1, 9))
def test_a_job_resumed_on_another_world_sees_what_it_has_not_seen(
    dataset: Dataset, before: int, after: int
) -> None:
    first = world_of(dataset, before)
    seen: list[int] = []
    running = steps(first)
    for _ in range(5):
        seen += next(running)
    states = [one.state_dict() for one in first]
    assert all(state == states[0] for state in states)
    assert all(type(value) is int for value in states[0].values())
    assert len(states[0]) == 5
    for step in steps(world_of(dataset, after, states[0])):
        seen += step
    assert sorted(seen[:COUNT]) == list(range(COUNT))
    (alone,) = world_of(dataset, 1)
    assert seen[:COUNT] == [number for step in steps([alone]) for number in step]


def test_batches_and_blocks_do_not_change_the_order(dataset: Dataset) -> None:
    wanted = [number for step in steps([stream(dataset, 0, 1)]) for number in step]
    for batch in (2, 5, 64, 1000):
        found = [number for step in steps([stream(dataset, 0, 1, batch_size=batch)])
                 for number in step]  # fmt: skip
        assert found[:COUNT] == wanted
        assert len(found) == -(-COUNT // batch) * batch


def test_without_shuffling_the_order_is_that_of_the_source(dataset: Dataset) -> None:
    plain = stream(dataset, 0, 1, shuffle=False, batch_size=None)
    assert [sample["n"] for sample in plain] == list(range(COUNT))


def test_a_permutation_is_fixed_for_good() -> None:
    assert permutation(8, "samples", 1, 2, 3).tolist() == [6, 3, 1, 5, 0, 2, 7, 4]
    order = ShardOrder([3, 0, 5, 2], seed=4, block=4)
    shards, inside = order.locate(np.arange(20))
    assert shards.tolist() == [2, 3, 3, 2, 2, 0, 2, 2, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 3, 3]
    assert inside.tolist() == [0, 0, 1, 1, 2, 0, 4, 3, 1, 2, 2, 1, 0, 0, 2, 1, 4, 3, 1, 0]


def test_shuffled_samples_stay_in_their_block(dataset: Dataset) -> None:
    order = ShardOrder([10, 10, 10], seed=1, block=5)
    shards, inside = order.locate(np.arange(30))
    for block in range(6):
        part = slice(5 * block, 5 * block + 5)
        assert len(set(shards[part].tolist())) == 1
        assert np.ptp(inside[part]) == 4


def test_a_mixture_has_its_weights_exactly(vault: Vault, tmp_path: Path) -> None:
    sealed(vault, json_lines(tmp_path / "a", count=90), "a")
    sealed(vault, json_lines(tmp_path / "b", count=30), "b")
    both = [Dataset(vault, "a"), Dataset(vault, "b")]
    mixture = Mixture([one.sizes for one in both], [3, 1], seed=1, block=16)
    sources, _, _ = mixture.locate(np.arange(3 * MIXED))
    for start in range(0, 3 * MIXED, MIXED):
        assert Counter(sources[start : start + MIXED].tolist()) == {0: 768, 1: 256}

    def named(batch: list[Any]) -> list[Any]:
        return [json.dumps(sample) for sample in batch]

    def mixed(rank: int, world: int) -> Stream:
        return Stream(both, weights=[3, 1], batch_size=1, seed=1, block=16, rank=rank,
                      world=world, collate=named)  # fmt: skip

    wanted = [one for step in steps([mixed(0, 1)]) for one in step]
    for world in (2, 3, 5):
        found = [one for step in steps([mixed(r, world) for r in range(world)]) for one in step]
        assert found[: len(wanted)] == wanted
    for one in both:
        one.close()


def test_weights_that_cannot_be_kept() -> None:
    assert shares([1, 1, 1]).sum() == MIXED
    for weights in ([0, 1], [-1, 2], [float("nan"), 1], [float("inf"), 1]):
        with pytest.raises(ConfigurationError, match="above 0"):
            shares(weights)
    with pytest.raises(ConfigurationError, match="below 1/1024"):
        shares([1e-9, 1])


def test_shares_are_those_of_exact_arithmetic() -> None:
    weights = [0.2, 0.3, 0.05, 1.1, 0.05, 1.1]  # rounded sums give 19 and 402
    assert shares(weights).tolist() == [73, 110, 18, 403, 18, 402]


def test_packed_sequences_hold_every_token_once(vault: Vault, tmp_path: Path) -> None:
    sealed(vault, tokens(tmp_path / "tokens", 1000), dtype="uint16", shard=700)
    packed = Dataset(vault, "data", length=64, pad=9999, documents=True)
    assert packed.sizes == [6, 6, 5]  # 350, 350 and 300 tokens
    found = torch.stack([packed[number]["tokens"] for number in range(len(packed))])
    assert found.dtype == torch.int64
    kept = found[found != 9999].tolist()
    assert kept == list(range(1000))
    last = packed[5]
    assert last["document"].tolist() == [0] * 30 + [-1] * 34
    shuffled = Stream(packed, batch_size=4, block=8, rank=0, world=1)
    batches = [batch["tokens"] for batch in shuffled]
    assert all(batch.shape == (4, 64) for batch in batches)
    tokens_seen = torch.cat(batches)[: len(packed)]
    assert sorted(tokens_seen[tokens_seen != 9999].tolist()) == list(range(1000))
    packed.close()


def test_documents_in_a_packed_sequence(vault: Vault, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = pa.array([[1, 2, 3], [], [4, 5], [6, 7, 8, 9]], pa.list_(pa.uint32()))
    pq.write_table(pa.table({"ids": rows}), tmp_path / "ids.parquet")
    sealed(vault, tmp_path / "ids.parquet")
    packed = Dataset(vault, "data", length=6, documents=True)
    assert [packed[0]["ids"].tolist(), packed[1]["ids"].tolist()] == [
        [1, 2, 3, 4, 5, 6], [7, 8, 9, 0, 0, 0]]  # fmt: skip
    assert packed[0]["document"].tolist() == [0, 0, 0, 1, 1, 2]
    assert packed[1]["document"].tolist() == [0, 0, 0, -1, -1, -1]
    packed.close()
    with pytest.raises(ConfigurationError, match="at least one token"):
        Dataset(vault, "data", length=0)


def test_only_integers_are_packed(dataset: Dataset, vault: Vault) -> None:
    with pytest.raises(ConfigurationError, match="can be packed"):
        Dataset(vault, "data", length=4)


def test_a_state_of_other_data_is_refused(dataset: Dataset, vault: Vault, tmp_path: Path) -> None:
    state = stream(dataset, 0, 1).state_dict()
    sealed(vault, json_lines(tmp_path / "other", count=COUNT + 1), "other")
    other = Dataset(vault, "other")
    with pytest.raises(
        VaultError, match="belongs to other data", check=coded("vault.wrong_position")
    ):
        stream(other, 0, 1).load_state_dict(state)
    with pytest.raises(
        VaultError, match="belongs to other data", check=coded("vault.wrong_position")
    ):
        stream([dataset, other], 0, 1).load_state_dict(state)
    for bad in ({}, state | {"more": 1}, state | {"epoch": -1}, state | {"epoch": "0"}):
        with pytest.raises(
            VaultError, match="is the numbers epoch, position", check=coded("vault.wrong_position")
        ):
            stream(dataset, 0, 1).load_state_dict(bad)
    other.close()


def test_numbers_of_numpy_and_torch_are_the_same_numbers(vault: Vault, tmp_path: Path) -> None:
    sealed(vault, tokens(tmp_path / "source"), dtype="uint16")

    def made(number: Any, weight: Any) -> Stream:
        packed = [Dataset(vault, "data", length=number(16), pad=number(7)) for _ in range(2)]
        weights, block = [weight(3), weight(1)], number(8)
        return stream(packed, 0, 1, weights=weights, seed=number(1), block=block, collate=list)

    state = made(int, float).state_dict()
    (first,) = next(iter(made(int, float)))
    for number, weight in ((np.int64, np.float32), (torch.tensor, torch.tensor), (int, int)):
        other = made(number, weight)
        assert other.state_dict() == state
        assert {type(value) for value in other.state_dict().values()} == {int}
        (found,) = next(iter(other))
        assert torch.equal(found["tokens"], first["tokens"])
    with pytest.raises(TypeError, match="integer"):
        made(float, float)


def test_the_seed_of_the_state_is_kept(dataset: Dataset) -> None:
    first = stream(dataset, 0, 1, seed=3)
    wanted = [number for step in steps([first]) for number in step]
    resumed = stream(dataset, 0, 1, seed=99)
    resumed.load_state_dict({**stream(dataset, 0, 1, seed=3).state_dict(), "position": 50})
    assert [number for step in steps([resumed]) for number in step] == wanted[50:]


@pytest.mark.parametrize(
    "options",
    [{"rank": 2}, {"block": 0}, {"batch_size": 0}, {"seed": -1}, {"weights": [1, 1]}],
)
def test_settings_that_make_no_stream(dataset: Dataset, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        Stream(dataset, **({"rank": 0, "world": 2} | options))


def test_items_by_number(dataset: Dataset) -> None:
    assert len(dataset) == COUNT
    assert [one["n"] for one in dataset.__getitems__([5, -1, 0, 5])] == [5, COUNT - 1, 0, 5]
    for bad in (COUNT, -COUNT - 1):
        with pytest.raises(IndexError):
            dataset[bad]


def test_several_threads_open_the_same_items(
    vault: Vault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealed(vault, tokens(tmp_path / "tokens", 60_000), dtype="uint16", shard=1 << 20)
    real, asked = _native.SealedFileReader, []

    def reader(*arguments: Any) -> Any:
        asked.append(arguments[5])
        return real(*arguments)

    monkeypatch.setattr(_native, "SealedFileReader", reader)
    found = []
    for threads in (1, 3, 0):
        dataset = Dataset(vault, "data", length=500, threads=threads)
        asked.clear()
        found.append([item["tokens"].tolist() for item in dataset.__getitems__(range(120))])
        assert asked == [threads]
        dataset.close()
    assert found[0] == found[1] == found[2]
    with pytest.raises(ConfigurationError, match="threads="):
        Dataset(vault, "data", threads=-1)


def test_items_do_not_change_when_others_are_read(vault: Vault, tmp_path: Path) -> None:
    """Reads of one thread use the same memory, and items are copies of it."""
    sealed(vault, tokens(tmp_path / "tokens", 2000), dtype="uint16", shard=1 << 20)
    sealed(vault, json_lines(tmp_path / "rows", count=20), "rows", shard=1 << 20)
    arrays, packed, rows = (
        Dataset(vault, "data"),
        Dataset(vault, "data", length=50),
        Dataset(vault, "rows"),
    )
    first = packed.__getitems__([0, 39]), arrays[0], rows[3]
    before = repr(first)
    for number in range(20):
        packed[number], arrays[0], rows[number]
    assert repr(first) == before
    assert packed[1]["tokens"].tolist() == list(range(50, 100))
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda number: int(packed[number]["tokens"][0]), range(40)))
    assert found == list(range(0, 2000, 50))
    for one in (arrays, packed, rows):
        one.close()


@pytest.mark.parametrize("documents", [False, True])
def test_batches_of_packed_sequences_are_what_torch_makes_of_the_items(
    vault: Vault, tmp_path: Path, documents: bool
) -> None:
    """With sequences that are filled up, by a number that the tokens' type does not have."""
    sealed(vault, tokens(tmp_path / "tokens", 1000), dtype="uint16", shard=700)
    packed = Dataset(vault, "data", length=64, pad=-1, documents=documents)

    def read(collate: Any) -> Any:
        return Stream(packed, batch_size=4, block=8, rank=0, world=1, collate=collate)

    def by_items(items: list[Any]) -> Any:
        return default_collate(items)

    batches = list(read(None))
    assert len(batches) == 5
    for found, expected in zip(batches, read(by_items), strict=True):
        assert list(found) == list(expected)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert all(found[name].dtype == expected[name].dtype for name in expected)
    # A batch is the caller's own.
    untouched = batches[1]["tokens"].clone()
    batches[0]["tokens"].fill_(5)
    assert torch.equal(batches[1]["tokens"], untouched)
    assert batches[0]["tokens"].untyped_storage().nbytes() == 4 * 64 * 8
    packed.close()
