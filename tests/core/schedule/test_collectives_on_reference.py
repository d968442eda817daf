"""Every operation and algorithm on the reference engine, against independently computed results."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sealring.core.engine.collective import DType, ReduceKind, supported_kinds
from sealring.core.schedule import (
    ALGORITHMS,
    Action,
    Algorithm,
    Operation,
    Topology,
    chunks,
    cuts_into_chunks,
)
from sealring.errors import Unsupported
from tests.core.reference import run_reference
from tests.core.schedule.expectations import (
    NUMPY_TYPE,
    Array,
    assert_same_bits,
    programs,
    random_array,
    reduced,
)

REDUCTIONS = [(dtype, kind) for dtype in DType for kind in sorted(supported_kinds(dtype))]
FACTOR = 0.3

worlds = st.integers(1, 9)
lengths = st.sampled_from([0, 1, 2, 3, 7, 8, 9, 31, 64, 65, 129])
seeds = st.integers(0, 2**32 - 1)
segments = st.sampled_from([16, 64, 208, 4096])
algorithms = st.sampled_from([Algorithm.RING, Algorithm.DIRECT])
reductions = st.sampled_from(REDUCTIONS)
windows = st.integers(1, 5)
roomy_or_tight_links = st.sampled_from([None, 1, 3])
light = settings(max_examples=150, deadline=None)


def options_of(kind: ReduceKind) -> dict[str, bool]:
    return {"average": kind is ReduceKind.AVG, "premultiply": kind is ReduceKind.PREMUL_SUM}


def split(tensor: Array, world: int) -> list[Array]:
    pieces = chunks(tensor.size, world, tensor.itemsize)
    return [
        tensor[offset // tensor.itemsize : (offset + length) // tensor.itemsize]
        for offset, length in pieces
    ]


@given(worlds, lengths, algorithms, reductions, seeds, segments, windows, roomy_or_tight_links)
@light
def test_all_reduce(
    world, length, algorithm, reduction, seed, segment, window, link_records
) -> None:
    dtype, kind = reduction
    rng = np.random.default_rng(seed)
    inputs = [random_array(dtype, length, rng) for _ in range(world)]
    tensors = [each.copy() for each in inputs]
    if algorithm is Algorithm.RING:
        slots = [split(tensor, world) for tensor in tensors]
        wanted = np.concatenate(
            [
                reduced([split(x, world)[c] for x in inputs], c, algorithm, dtype, kind, FACTOR)
                for c in range(world)
            ]
        )
    else:
        slots = [[tensor] for tensor in tensors]
        wanted = reduced(inputs, 0, algorithm, dtype, kind, FACTOR)

    run_reference(
        programs(Operation.ALL_REDUCE, algorithm, world, **options_of(kind)),
        slots,
        kind,
        dtype=dtype,
        segment_bytes=segment,
        factor=FACTOR,
        window=window,
        link_records=link_records,
        shuffle=random.Random(seed),
    )

    for tensor in tensors:
        assert_same_bits(tensor, wanted, dtype)
        assert tensor.tobytes() == tensors[0].tobytes(), "ranks differ"


# This deadlocked when a step could overtake itself in an earlier segment.
@example(3, 31, Algorithm.DIRECT, (DType.COMPLEX128, ReduceKind.PREMUL_SUM), 1, 16, False)
@given(worlds, lengths, algorithms, reductions, seeds, segments, st.booleans())
@light
def test_reduce_scatter(world, length, algorithm, reduction, seed, segment, in_place) -> None:
    dtype, kind = reduction
    rng = np.random.default_rng(seed)
    inputs = [[random_array(dtype, length, rng) for _ in range(world)] for _ in range(world)]
    slots = [[chunk.copy() for chunk in chunk_list] for chunk_list in inputs]
    for rank in range(world):
        slots[rank].append(slots[rank][rank] if in_place else np.empty_like(slots[rank][rank]))

    run_reference(
        programs(Operation.REDUCE_SCATTER, algorithm, world, **options_of(kind)),
        slots,
        kind,
        dtype=dtype,
        segment_bytes=segment,
        factor=FACTOR,
        shuffle=random.Random(seed),
    )

    for rank in range(world):
        contributions = [inputs[other][rank] for other in range(world)]
        wanted = reduced(contributions, rank, algorithm, dtype, kind, FACTOR)
        assert_same_bits(slots[rank][world], wanted, dtype)
        for chunk in range(world):
            if not (in_place and chunk == rank):
                assert slots[rank][chunk].tobytes() == inputs[rank][chunk].tobytes()


@given(worlds, lengths, algorithms, st.sampled_from(list(NUMPY_TYPE)), seeds, st.booleans())
@light
def test_all_gather(world, length, algorithm, dtype, seed, in_place) -> None:
    rng = np.random.default_rng(seed)
    inputs = [random_array(dtype, length, rng) for _ in range(world)]
    slots = []
    for rank in range(world):
        outputs = [np.zeros_like(inputs[rank]) for _ in range(world)]
        if in_place:
            outputs[rank][:] = inputs[rank]
        slots.append([*outputs, outputs[rank] if in_place else inputs[rank].copy()])

    run_reference(
        programs(Operation.ALL_GATHER, algorithm, world),
        slots,
        ReduceKind.NONE,
        dtype=dtype,
        segment_bytes=64,
        shuffle=random.Random(seed),
    )

    for rank in range(world):
        assert slots[rank][world].tobytes() == inputs[rank].tobytes()
        for other in range(world):
            assert slots[rank][other].tobytes() == inputs[other].tobytes()


@given(worlds, lengths, algorithms, st.data(), seeds)
@light
def test_broadcast_from_every_root(world, length, algorithm, data, seed) -> None:
    root = data.draw(st.integers(0, world - 1))
    rng = np.random.default_rng(seed)
    tensors = [rng.integers(0, 256, length).astype(np.uint8) for _ in range(world)]
    wanted = tensors[root].tobytes()

    run_reference(
        programs(Operation.BROADCAST, algorithm, world, root=root),
        [[tensor] for tensor in tensors],
        ReduceKind.NONE,
        dtype=DType.BYTES,
        segment_bytes=16,
        shuffle=random.Random(seed),
    )

    assert [tensor.tobytes() for tensor in tensors] == [wanted] * world


@given(st.integers(1, 40), st.data(), seeds)
@light
def test_an_objection_of_every_rank_takes_the_ways_of_an_introduction(world, data, seed) -> None:
    root = data.draw(st.integers(0, world - 1))
    reasons = [np.full(8, rank, np.uint8) for rank in range(world)]
    told = programs(Operation.OBJECTION, Algorithm.TREE, world, root=root)

    run_reference(
        told,
        [[reason] for reason in reasons],
        ReduceKind.NONE,
        dtype=DType.BYTES,
        segment_bytes=16,
        shuffle=random.Random(seed),
    )

    assert [reason.tolist() for reason in reasons] == [[root] * 8] * world
    agreed = programs(Operation.INTRODUCTION, Algorithm.TREE, world)
    assert _pairs(told) == _pairs(agreed)


def _pairs(programs):
    return {
        frozenset((each.rank, peer))
        for each in programs
        for step in each.steps
        for peer in step.peers
    }


def small_integers(rng, length):
    return rng.integers(-1000, 1000, length).astype(np.int64)


reducing_algorithms = st.sampled_from(
    [
        (operation, algorithm)
        for operation in (Operation.ALL_REDUCE, Operation.REDUCE, Operation.REDUCE_SCATTER)
        for algorithm in ALGORITHMS[operation]
    ]
)


@given(worlds, lengths, reducing_algorithms, st.data(), seeds, windows, roomy_or_tight_links)
@light
def test_every_algorithm_reduces(world, length, pair, data, seed, window, link_records) -> None:
    """Uses integers, whose sum is the same in any order; each program has its own order."""
    operation, algorithm = pair
    root = data.draw(st.integers(0, world - 1)) if operation is Operation.REDUCE else 0
    hosts = data.draw(st.lists(st.integers(0, 3), min_size=world, max_size=world))
    rng = np.random.default_rng(seed)
    scattered = operation is Operation.REDUCE_SCATTER
    parts = world if scattered else 1
    inputs = [[small_integers(rng, length) for _ in range(parts)] for _ in range(world)]
    tensors = [[each.copy() for each in own] for own in inputs]
    slots = tensors
    if scattered:
        slots = [[*own, np.empty_like(own[0])] for own in tensors]
    elif cuts_into_chunks(operation, algorithm):
        slots = [split(own[0], world) for own in tensors]

    run_reference(
        programs(operation, algorithm, world, root=root, topology=Topology(tuple(hosts))),
        slots,
        ReduceKind.SUM,
        segment_bytes=64,
        window=window,
        link_records=link_records,
        shuffle=random.Random(seed),
    )

    for rank in range(world):
        if scattered:
            wanted = sum(own[rank] for own in inputs)
            assert slots[rank][world].tobytes() == np.asarray(wanted).tobytes()
            assert [t.tobytes() for t in tensors[rank]] == [t.tobytes() for t in inputs[rank]]
            continue
        changed = operation is Operation.ALL_REDUCE or rank == root
        wanted = sum(own[0] for own in inputs) if changed else inputs[rank][0]
        assert tensors[rank][0].tobytes() == np.asarray(wanted).tobytes()


@given(worlds, st.data(), seeds, windows, roomy_or_tight_links)
@light
def test_all_to_all_of_any_lengths(world, data, seed, window, link_records) -> None:
    rows = st.lists(st.sampled_from([0, 1, 5, 33]), min_size=world, max_size=world)
    table = data.draw(st.lists(rows, min_size=world, max_size=world))
    rng = np.random.default_rng(seed)
    sent = [[small_integers(rng, table[s][r]) for r in range(world)] for s in range(world)]
    slots = [
        [*(each.copy() for each in sent[r]), *(np.empty_like(sent[s][r]) for s in range(world))]
        for r in range(world)
    ]

    run_reference(
        programs(Operation.ALL_TO_ALL, Algorithm.DIRECT, world),
        slots,
        ReduceKind.NONE,
        segment_bytes=64,
        window=window,
        link_records=link_records,
        shuffle=random.Random(seed),
    )

    for rank in range(world):
        assert [each.tobytes() for each in slots[rank][:world]] == [
            each.tobytes() for each in sent[rank]
        ]
        assert [each.tobytes() for each in slots[rank][world:]] == [
            sent[sender][rank].tobytes() for sender in range(world)
        ]


@given(worlds, lengths, st.data(), seeds)
@light
def test_gather_and_scatter(world, length, data, seed) -> None:
    root = data.draw(st.integers(0, world - 1))
    rng = np.random.default_rng(seed)
    parts = [small_integers(rng, length) for _ in range(world)]
    for operation in (Operation.GATHER, Operation.SCATTER):
        gathers = operation is Operation.GATHER
        lists = [np.zeros_like(part) if gathers else part.copy() for part in parts]
        singles = [part.copy() if gathers else np.zeros_like(part) for part in parts]
        run_reference(
            programs(operation, Algorithm.DIRECT, world, root=root),
            [[*lists, one] if rank == root else [one] for rank, one in enumerate(singles)],
            ReduceKind.NONE,
            segment_bytes=64,
            shuffle=random.Random(seed),
        )
        for result in lists if gathers else singles:
            assert result.dtype == np.int64
        assert [each.tobytes() for each in (lists if gathers else singles)] == [
            part.tobytes() for part in parts
        ]


@pytest.mark.parametrize("world", range(1, 10))
def test_barrier_hears_from_everybody(world) -> None:
    barriers = programs(Operation.BARRIER, Algorithm.DIRECT, world)
    run_reference(barriers, [[np.empty(0, np.uint8)] for _ in range(world)], ReduceKind.NONE)
    for rank, program in enumerate(barriers):
        heard = {step.origin for step in program.steps if step.origin >= 0}
        assert heard == set(range(world)) - {rank}


@pytest.mark.parametrize("world", range(1, 20))
def test_no_rank_leaves_a_barrier_by_tree_before_all_have_come(world) -> None:
    """While one rank is missing, no other rank can end its program."""
    barriers = programs(Operation.BARRIER, Algorithm.TREE, world)
    run_reference(barriers, [[np.empty(0, np.uint8)] for _ in range(world)], ReduceKind.NONE)
    for absent in range(world):
        done: set[tuple[int, int]] = set()
        ranks = [rank for rank in range(world) if rank != absent]
        steps = [(rank, index) for rank in ranks for index in range(len(barriers[rank].steps))]
        for _ in range(len(steps)):
            for rank, index in steps:
                step = barriers[rank].steps[index]
                sender = step.peers[0] if step.action is Action.RECEIVE else rank
                sent = sender == rank or any(
                    rank in other.peers and other.message == step.message
                    for at, other in enumerate(barriers[sender].steps)
                    if (sender, at) in done and other.action is not Action.RECEIVE
                )
                if sent and all((rank, before) in done for before in step.after):
                    done.add((rank, index))
        whole = [rank for rank in ranks if all((rank, at) in done for r, at in steps if r == rank)]
        assert whole == []


@pytest.mark.parametrize("algorithm", Algorithm)
def test_sum_agrees_with_numpy(algorithm) -> None:
    rng = np.random.default_rng(7)
    inputs = [rng.standard_normal(1000) for _ in range(5)]
    tensors = [each.copy() for each in inputs]
    chunked = cuts_into_chunks(Operation.ALL_REDUCE, algorithm)
    run_reference(
        programs(Operation.ALL_REDUCE, algorithm, 5),
        [split(tensor, 5) if chunked else [tensor] for tensor in tensors],
        ReduceKind.SUM,
    )
    np.testing.assert_allclose(tensors[3], np.sum(inputs, axis=0), rtol=1e-12, atol=1e-12)


def test_an_undefined_reduction_is_refused_by_name() -> None:
    with pytest.raises(Unsupported) as refused:
        run_reference(
            programs(Operation.ALL_REDUCE, Algorithm.DIRECT, 2),
            [[np.zeros(3, np.complex64)], [np.zeros(3, np.complex64)]],
            ReduceKind.MAX,
        )
    assert str(refused.value) == (
        "MAX is not defined for COMPLEX64; defined are: SUM, PRODUCT, AVG, PREMUL_SUM"
    )


def test_premul_sum_needs_a_factor() -> None:
    with pytest.raises(Unsupported, match=r"^PREMUL_SUM needs a factor$"):
        run_reference(
            programs(Operation.ALL_REDUCE, Algorithm.DIRECT, 1, premultiply=True),
            [[np.zeros(3, np.float32)]],
            ReduceKind.PREMUL_SUM,
        )


def test_segments_must_not_cut_elements() -> None:
    with pytest.raises(Unsupported, match=r"^segments of 12 bytes would cut FLOAT64 elements$"):
        run_reference(
            programs(Operation.BROADCAST, Algorithm.DIRECT, 1),
            [[np.zeros(3)]],
            ReduceKind.NONE,
            segment_bytes=12,
        )
