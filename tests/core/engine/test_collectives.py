"""The native engine against the reference, bit for bit, over TCP and over shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sealring.core.engine.collective import Collective, DType, ReduceKind, supported_kinds
from sealring.core.schedule import ALGORITHMS, REDUCING, ROOTED, Algorithm, Operation
from sealring.limits import RECORD_BYTES
from tests.core.engine.attacker import EVERYONE, Record, Tap, triples
from tests.core.engine.cases import PROGRAMS, Case, each_program, expected, tensors_of
from tests.core.engine.local_world import LocalWorld, slot

SMALL_RECORD_BYTES = 256
"""Small, so that a tensor of a few KB takes more segments than the engine's window holds."""
LINK_MEMORY_BYTES = 16 << 20
TRANSPORTS = ("tcp", "shm")


class Worlds:
    """Worlds are made once per size and used by all tests, as a training run uses its group."""

    def __init__(self) -> None:
        self._worlds: dict[tuple[int, str], LocalWorld] = {}

    def run(self, case: Case, world: int, transport: str, seed: int = 0) -> None:
        """Runs the case and compares the results. A world that had an error is not used again."""
        key = (world, transport)
        if key not in self._worlds:
            self._worlds[key] = LocalWorld(
                world,
                transport,
                record_bytes=SMALL_RECORD_BYTES,
                rekey_bytes=5_000,
                hosts=[rank // 2 % 3 for rank in range(world)],
            )
        try:
            check(self._worlds[key], case, seed)
        except BaseException:
            self._worlds.pop(key).close()
            raise

    def close(self) -> None:
        for world in self._worlds.values():
            world.close()


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    worlds = Worlds()
    yield worlds
    worlds.close()


def check(world: LocalWorld, case: Case, seed: int = 0) -> None:
    tensors = tensors_of(case, world.world, seed)
    errors = world.run([each.collective() for each in tensors], timeout_s=30)
    assert errors == [None] * world.world
    topology = world.engines[0].topology
    must_be = expected(case, world.world, seed, world.record_bytes, topology)
    for rank, each in enumerate(tensors):
        assert each.bits() == must_be[rank], f"{case} on rank {rank} of {world.world}"


def kinds(operation: Operation, dtype: DType) -> list[ReduceKind]:
    if operation in REDUCING:
        return sorted(supported_kinds(dtype))
    return [ReduceKind.NONE]


# ---- results ------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
@each_program
def test_every_dtype_and_reduction(
    worlds: Worlds, operation: Operation, algorithm: Algorithm, transport: str
) -> None:
    world = 3
    for dtype in DType:
        for kind in kinds(operation, dtype):
            worlds.run(Case(operation, algorithm, 37, dtype, kind), world, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
@each_program
def test_ragged_sizes(
    worlds: Worlds, operation: Operation, algorithm: Algorithm, world: int, transport: str
) -> None:
    kind = ReduceKind.SUM if operation in REDUCING else ReduceKind.NONE
    for elements in (0, 1, world - 1, world + 1, 63, 64, 65, 1023):
        for dtype in (DType.FLOAT32, DType.INT8):
            case = Case(operation, algorithm, elements, dtype, kind, root=0)
            worlds.run(case, world, transport, seed=elements)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Case, int, str, int]:
    operation, algorithm = draw(st.sampled_from(PROGRAMS))
    world = draw(st.integers(1, 9))
    dtype = draw(st.sampled_from(list(DType) if operation not in REDUCING else list(DType)[:-1]))
    case = Case(
        operation,
        algorithm,
        draw(st.integers(0, 3000)),
        dtype,
        draw(st.sampled_from(kinds(operation, dtype))),
        root=draw(st.integers(0, world - 1)) if operation in ROOTED else 0,
        factor=draw(st.sampled_from([0.5, 1 / 3, -2.0])),
    )
    return case, world, draw(st.sampled_from(TRANSPORTS)), draw(st.integers(0, 999))


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(cases())
def test_any_collective_in_any_world(worlds: Worlds, drawn: tuple[Case, int, str, int]) -> None:
    case, world, transport, seed = drawn
    worlds.run(case, world, transport, seed)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("root", range(4))
@pytest.mark.parametrize("algorithm", ALGORITHMS[Operation.BROADCAST])
def test_every_root_broadcasts(
    worlds: Worlds, algorithm: Algorithm, root: int, transport: str
) -> None:
    case = Case(Operation.BROADCAST, algorithm, 999, DType.BYTES, root=root)
    worlds.run(case, 4, transport, seed=root)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("algorithm", ALGORITHMS[Operation.ALL_GATHER])
def test_in_place_gather_and_scatter(algorithm: Algorithm, transport: str) -> None:
    """The input may be the memory of this rank's part of the output, and the other way round."""
    world, elements = 3, 700
    with LocalWorld(world, transport, record_bytes=SMALL_RECORD_BYTES) as local:
        for operation, reduction in (
            (Operation.ALL_GATHER, ReduceKind.NONE),
            (Operation.REDUCE_SCATTER, ReduceKind.SUM),
        ):
            whole = [
                np.arange(world * elements, dtype=np.float32) * (rank + 1) for rank in range(world)
            ]
            parts = [np.split(each, world) for each in whole]
            before = [each.copy() for each in whole]
            calls = [
                Collective(
                    operation,
                    algorithm,
                    [*(slot(part) for part in parts[rank]), slot(parts[rank][rank])],
                    whole[rank].nbytes,
                    DType.FLOAT32,
                    reduction,
                )
                for rank in range(world)
            ]
            assert local.run(calls) == [None] * world
            for rank in range(world):
                if operation is Operation.ALL_GATHER:
                    own = [np.split(before[owner], world)[owner] for owner in range(world)]
                    assert np.array_equal(whole[rank], np.concatenate(own))
                else:
                    total = sum(np.split(each, world)[rank] for each in before)
                    assert np.array_equal(parts[rank][rank], total)


def test_different_algorithms_follow_each_other(worlds: Worlds) -> None:
    """A published record may come over one link now and over another in the next collective."""
    for round_number in range(12):
        for operation, algorithm in PROGRAMS[round_number % 3 :] + PROGRAMS[: round_number % 3]:
            kind = ReduceKind.SUM if operation in REDUCING else ReduceKind.NONE
            root = round_number % 4 if operation in ROOTED else 0
            worlds.run(Case(operation, algorithm, 50, kind=kind, root=root), 4, "tcp")


# ---- keys ---------------------------------------------------------------------------------------


def tapped_world(world: int, **options: object) -> tuple[LocalWorld, dict[tuple[int, int], Tap]]:
    taps = {(a, b): Tap() for a in range(world) for b in range(world) if a != b}
    return LocalWorld(world, middle=dict(taps), **options), taps  # type: ignore[arg-type]


def by_sequence(taps: dict[tuple[int, int], Tap]) -> dict[tuple[int, int], list[Record]]:
    """Each key's records by count; a published one, though it crosses several links, once."""
    seen = {record.raw: record for tap in taps.values() for record in tap.records()}
    sequences: dict[tuple[int, int], list[Record]] = {}
    for record in sorted(seen.values(), key=lambda record: record.fields["count"]):
        sequences.setdefault(record.sequence, []).append(record)
    return sequences


@pytest.mark.parametrize("rekey_bytes", [1, 20_000])
@pytest.mark.threat("K2")
def test_keys_ratchet_forward_and_results_stay_right(rekey_bytes: int) -> None:
    world, rounds = 3, 12
    local, taps = tapped_world(world, record_bytes=4096, rekey_bytes=rekey_bytes)
    with local:
        for seed in range(rounds):
            for operation, algorithm in PROGRAMS:
                kind = ReduceKind.SUM if operation in REDUCING else ReduceKind.NONE
                check(local, Case(operation, algorithm, 1500, kind=kind), seed)
    sequences = by_sequence(taps)
    pairs = {(a, b) for a in range(world) for b in range(world) if a != b}
    assert set(sequences) == pairs | {(rank, EVERYONE) for rank in range(world)}
    for sequence, records in sequences.items():
        generations = [record.fields["generation"] for record in records]
        assert [record.fields["count"] for record in records] == list(range(len(records)))
        steps = {b - a for a, b in pairwise(generations)}
        assert generations[0] == 0
        assert steps <= {0, 1}
        if rekey_bytes == 1:
            assert generations == list(range(len(records))), "a key of its own for every record"
        else:
            assert generations[-1] >= 2, f"{sequence} was never rekeyed"
            for generation in set(generations):
                under_it = [r for r in records if r.fields["generation"] == generation]
                sealed = sum(record.fields["length"] for record in under_it)
                assert sealed <= rekey_bytes


@pytest.mark.threat("K1")
def test_no_key_and_nonce_seal_two_records() -> None:
    local, taps = tapped_world(3, record_bytes=512, rekey_bytes=3_000)
    with local:
        for seed in range(4):
            for operation, algorithm in PROGRAMS:
                kind = ReduceKind.SUM if operation in REDUCING else ReduceKind.NONE
                check(local, Case(operation, algorithm, 700, kind=kind), seed)
    for tap in taps.values():
        used = triples(tap.records())
        assert len(used) == len(set(used))
    # Across links, too: records that share key and nonce are the same published record.
    sealed: dict[tuple[int, ...], bytes] = {}
    for tap in taps.values():
        for record, triple in zip(tap.records(), triples(tap.records()), strict=True):
            assert sealed.setdefault(triple, record.raw) == record.raw


@pytest.mark.threat("K1")
def test_published_records_are_sealed_once_and_forwarded_as_they_are() -> None:
    world = 4
    local, taps = tapped_world(world)
    with local:
        check(local, Case(Operation.ALL_REDUCE, Algorithm.RING, 100, kind=ReduceKind.SUM))
        accounts = [engine.account() for engine in local.engines]
    for rank in range(world):
        way = [(rank + hop) % world for hop in range(world)]
        copies = {
            record.raw
            for here, there in pairwise(way)
            for record in taps[here, there].records()
            if record.sequence == (rank, EVERYONE)
        }
        assert len(copies) == 1
    for account in accounts:
        assert account["sealed_records"] == world  # world - 1 chunks that pass, and its own
        assert account["opened_records"] == 2 * (world - 1)
        assert account["forwarded_records"] == world - 2


# ---- memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("world", "elements"), [(2, 16 << 20), (4, 4 << 20)], ids=["2x64MiB", "4x16MiB"]
)
def test_memory_does_not_grow_with_the_tensor(world: int, elements: int, transport: str) -> None:
    tensors = [np.full(elements, rank + 1, np.float32) for rank in range(world)]
    with LocalWorld(world, transport, record_bytes=RECORD_BYTES) as local:
        for algorithm in (Algorithm.RING, Algorithm.DIRECT):
            calls = []
            for tensor in tensors:
                parts = np.split(tensor, world) if algorithm is Algorithm.RING else [tensor]
                calls.append(
                    Collective(
                        Operation.ALL_REDUCE,
                        algorithm,
                        [slot(part) for part in parts],
                        tensor.nbytes,
                        DType.FLOAT32,
                        ReduceKind.MAX,
                    )
                )
            assert local.run(calls, timeout_s=60) == [None] * world
            for tensor, engine in zip(tensors, local.engines, strict=True):
                assert tensor[0] == tensor[-1] == world
                assert engine.account()["memory_bytes"] <= LINK_MEMORY_BYTES * (world - 1)
