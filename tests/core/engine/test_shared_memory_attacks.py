"""The host as the adversary: it maps the links' shared memory too and writes anywhere.

Whatever it writes, and whenever, a rank gets the right result or an error; no rank crashes.
"""

from __future__ import annotations

import mmap
import random
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from sealring.core.engine.collective import DType, ReduceKind
from sealring.core.schedule import Algorithm, Operation
from sealring.errors import GroupError, PeerLost, PeerSilent, ReplayedRecord, TamperedRecord
from tests.core.engine.cases import Case, expected, tensors_of
from tests.core.engine.local_world import MEMORY_BYTES, RING_BYTES, LocalWorld

# The control words of one end, behind its ring (native/transport/shm_pipe.cpp, struct Control).
WRITTEN, UNUSED, TAKEN, READER_SLEEPS, WRITER_SLEEPS = (
    RING_BYTES + offset for offset in (0, 64, 128, 192, 256)
)

CASE = Case(Operation.ALL_REDUCE, Algorithm.RING, 40_000, DType.FLOAT32, ReduceKind.SUM)
ABSURD = {
    "all ones": 0xFFFFFFFFFFFFFFFF,
    "largest signed": 0x7FFFFFFFFFFFFFFF,
    "one over the ring": RING_BYTES + 1,
    "far ahead": 1 << 40,
}


@contextmanager
def mapped(local: LocalWorld, owner: int, peer: int) -> Iterator[mmap.mmap]:
    """The memory that `owner` writes for `peer`."""
    with mmap.mmap(local.memories[owner, peer], MEMORY_BYTES) as memory:
        yield memory


def run(local: LocalWorld, timeout_s: float = 1.0) -> list[GroupError | None]:
    """Runs the case; a rank without an error has the right result."""
    tensors = tensors_of(CASE, local.world)
    errors = local.run([each.collective() for each in tensors], timeout_s)
    right = expected(CASE, local.world, 0, local.record_bytes)
    for rank, error in enumerate(errors):
        if error is None:
            assert tensors[rank].bits() == right[rank], "a wrong result was delivered"
        else:
            assert isinstance(error, GroupError), repr(error)
    return errors  # type: ignore[return-value]


def run_while(
    local: LocalWorld, disturb: Callable[[mmap.mmap], None], rounds: int = 100
) -> list[GroupError | None]:
    """Runs the case until it fails while another thread disturbs the link of ranks 0 and 1."""
    done = threading.Event()

    def keep_disturbing(*memories: mmap.mmap) -> None:
        while not done.is_set():
            disturb(random.choice(memories))

    with mapped(local, 0, 1) as one, mapped(local, 1, 0) as other:
        attacker = threading.Thread(target=keep_disturbing, args=(one, other))
        attacker.start()
        try:
            for _ in range(rounds):
                errors = run(local)
                if any(errors):
                    # A rank that had its result before the other saw the attack learns it now.
                    later = run(local)
                    errors = [early or late for early, late in zip(errors, later, strict=True)]
                    break
        finally:
            done.set()
            attacker.join()
    return errors


def assert_only(errors: list[GroupError | None], *kinds: type[GroupError]) -> None:
    """All ranks fail, and those that saw it with one of `kinds`.

    A rank whose alert found no way (the ring it had to go through is what was destroyed) is simply
    gone for its peer: that one says PeerLost.
    """
    assert all(errors), errors
    seen = [error for error in errors if type(error) is not PeerLost]
    assert seen, "somebody saw what happened"
    for error in seen:
        assert type(error) in kinds, str(error)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.threat("R1")
def test_random_bytes_anywhere(world: int, seed: int) -> None:
    chance = random.Random(seed)

    def disturb(memory: mmap.mmap) -> None:
        at = chance.randrange(len(memory) - 64)
        memory[at : at + 64] = chance.randbytes(64)

    with LocalWorld(world, "shm") as local:
        errors = run_while(local, disturb)
    assert_only(errors, TamperedRecord, PeerSilent)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.threat("R1")
def test_random_bytes_in_the_data(seed: int) -> None:
    """Only the rings' data is changed: records keep their boundaries, and no changed one may
    open."""
    chance = random.Random(seed)

    def disturb(memory: mmap.mmap) -> None:
        at = chance.randrange(RING_BYTES)
        memory[at] ^= 1 << chance.randrange(8)

    with LocalWorld(2, "shm") as local:
        errors = run_while(local, disturb)
    assert_only(errors, TamperedRecord)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.threat("R2")
def test_random_control_words(seed: int) -> None:
    chance = random.Random(seed)

    def disturb(memory: mmap.mmap) -> None:
        word = chance.choice([WRITTEN, TAKEN])
        struct.pack_into("<Q", memory, word, chance.getrandbits(chance.choice([8, 18, 20, 64])))

    with LocalWorld(2, "shm") as local:
        errors = run_while(local, disturb)
    # Moved positions make a reader read an old record, which lay there before.
    assert_only(errors, TamperedRecord, PeerSilent, ReplayedRecord)


@pytest.mark.threat("R3")
def test_sleeping_flags_are_only_hints() -> None:
    """No rank may be woken, or all ranks all the time: it takes longer and stays correct."""

    def disturb(memory: mmap.mmap) -> None:
        for word in (READER_SLEEPS, WRITER_SLEEPS):
            struct.pack_into("<I", memory, word, random.choice([0, 0, 1, 2, 3, 0xFFFFFFFF]))

    with LocalWorld(2, "shm") as local:
        assert run_while(local, disturb, rounds=5) == [None, None]


def test_nonce_field_is_not_used_any_more() -> None:
    """The engine starts after both ends have recognised each other's memory."""

    def disturb(memory: mmap.mmap) -> None:
        memory[WRITTEN + 8 : TAKEN] = random.randbytes(TAKEN - WRITTEN - 8)

    with LocalWorld(2, "shm") as local:
        assert run_while(local, disturb, rounds=5) == [None, None]


@pytest.mark.parametrize("value", ABSURD.values(), ids=ABSURD)
@pytest.mark.parametrize(("sender", "receiver"), [(0, 1), (1, 0)])
@pytest.mark.parametrize("word", [WRITTEN, TAKEN], ids=["written", "taken"])
@pytest.mark.threat("R2")
def test_absurd_position(word: int, sender: int, receiver: int, value: int) -> None:
    """The rank that reads the word reports it: the receiver reads `written`, the sender reads
    `taken`. The other rank, which would overwrite the word, makes its call later."""
    reader, other = (receiver, sender) if word == WRITTEN else (sender, receiver)
    tensors = tensors_of(CASE, 2)
    with LocalWorld(2, "shm") as local:
        with mapped(local, other, reader) as memory:
            struct.pack_into("<Q", memory, word, value)
        calls = [each.collective() if each is tensors[reader] else None for each in tensors]
        seen = local.run(calls)[reader]
        # The other rank sees the link's end, or the alert if its ring still works.
        calls = [each.collective() if each is tensors[other] else None for each in tensors]
        told = local.run(calls, numbers=[1, 1])[other]
    assert type(seen) is TamperedRecord
    assert seen.reported_by is None
    assert seen.peer == other
    assert "position in shared memory is impossible" in str(seen)
    if type(told) is not PeerLost:
        assert type(told) is TamperedRecord
        assert told.reported_by == reader


@pytest.mark.parametrize("value", ABSURD.values(), ids=ABSURD)
@pytest.mark.threat("R2")
def test_absurd_position_seen_by_a_sleeper(value: int) -> None:
    """A rank that waits checks the words before it goes to sleep, and when it wakes."""
    tensors = tensors_of(CASE, 2)
    with LocalWorld(2, "shm") as local, mapped(local, 0, 1) as memory:
        timer = threading.Timer(0.05, struct.pack_into, ("<Q", memory, WRITTEN, value))
        timer.start()
        errors = local.run([None, tensors[1].collective()], timeout_s=10)
        timer.join()
    assert type(errors[1]) is TamperedRecord
    assert errors[1].peer == 0


@pytest.mark.threat("R4")
def test_old_ring_contents_put_back() -> None:
    """The host keeps a copy of the ring with all its records and puts it back later."""
    with LocalWorld(2, "shm") as local, mapped(local, 0, 1) as memory:
        small = Case(Operation.ALL_GATHER, Algorithm.DIRECT, 8)
        tensors = tensors_of(small, 2)
        assert local.run([each.collective() for each in tensors]) == [None, None]
        record = bytes(memory[: 96 + 32])
        # Rank 0 has written one record; claim that it has written the same one again.
        memory[len(record) : 2 * len(record)] = record
        struct.pack_into("<Q", memory, WRITTEN, 2 * len(record))
        late = local.run([None, tensors[1].collective()], timeout_s=1)
    assert type(late[1]) is ReplayedRecord
    assert late[1].peer == 0
