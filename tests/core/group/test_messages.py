"""send, recv and their variants: any order, tag and source, beside collectives or without."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sealring.errors import GroupClosed, GroupError, OutOfStep, PeerLost, PeerSilent, Unsupported
from tests.workers import Workers

TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "tcp"])
SHORT, LONG = 1000, 700_001  # elements: with its announcement, and in many records


def numbers(length: int, seed: int) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(seed))


def around_the_ring(rank: int, world: int) -> None:
    for length in (0, 1, SHORT, LONG):
        sent, got = numbers(length, rank), torch.empty(length)
        works = [dist.isend(sent, (rank + 1) % world), dist.irecv(got, (rank - 1) % world)]
        for work in works:
            assert work is not None
            work.wait()
            assert work.is_completed()
        assert torch.equal(got, numbers(length, (rank - 1) % world))


@TRANSPORTS
@pytest.mark.parametrize("world", [2, 4])
def test_messages_of_every_length(workers: Workers, world: int, transport: str) -> None:
    workers.run(around_the_ring, world=world, env={"SEALRING_TRANSPORT": transport})


def counted(rank: int, world: int) -> tuple[int, int]:
    group: Any = dist.group.WORLD
    before = group.account()
    around_the_ring(rank, world)
    after = group.account()
    assert after["memory_bytes"] >= before["memory_bytes"] > 0
    return (
        after["sealed_bytes"] - before["sealed_bytes"],
        after["opened_bytes"] - before["opened_bytes"],
    )


def test_messages_are_in_the_groups_account(workers: Workers) -> None:
    sent = 4 * (1 + SHORT + LONG)
    assert workers.run(counted, world=2) == [(sent, sent)] * 2


def tags_in_any_order(rank: int, world: int) -> None:
    tags = [(5, SHORT), (0, LONG), (2**31 - 1, 3), (7, LONG), (5, SHORT)]
    if rank == 0:
        for at, (tag, length) in enumerate(tags):
            dist.isend(numbers(length, at), 1, tag=tag)
        dist.recv(torch.empty(1), 1, tag=99)
    else:
        first, second = torch.empty(SHORT), torch.empty(SHORT)
        got = {at: torch.empty(tags[at][1]) for at in (3, 2, 1)}
        for at, tensor in got.items():
            assert dist.recv(tensor, 0, tag=tags[at][0]) == 0
        dist.recv(first, 0, tag=5)
        dist.recv(second, 0, tag=5)
        for at, tensor in {**got, 0: first, 4: second}.items():
            assert torch.equal(tensor, numbers(tags[at][1], at)), at
        dist.send(torch.zeros(1), 0, tag=99)


@TRANSPORTS
def test_tags_match_and_equal_ones_keep_their_order(workers: Workers, transport: str) -> None:
    workers.run(tags_in_any_order, env={"SEALRING_TRANSPORT": transport})


def from_anybody(rank: int, world: int) -> None:
    # A tag for each length: one rank's second message may come before another's first.
    if rank == 0:
        for tag, length in enumerate((1, LONG)):
            seen = set()
            for _ in range(world - 1):
                got = torch.empty(length)
                source = dist.recv(got, tag=tag)
                assert torch.equal(got, numbers(length, source))
                seen.add(source)
            assert seen == set(range(1, world))
    else:
        for tag, length in enumerate((1, LONG)):
            dist.send(numbers(length, rank), 0, tag=tag)


@TRANSPORTS
def test_receive_from_any_source_says_which(workers: Workers, transport: str) -> None:
    workers.run(from_anybody, world=4, env={"SEALRING_TRANSPORT": transport})


def beside_collectives(rank: int, world: int) -> None:
    """Rank 0 is in the collective before rank 1 has received the message it must have first."""
    total = torch.full((LONG,), float(rank))
    if rank == 0:
        work = dist.isend(numbers(LONG, 8), 1)
        dist.broadcast(total, 0)
        dist.all_reduce(total)
        assert work is not None
        work.wait()
    else:
        got = torch.empty(LONG)
        dist.recv(got, 0)
        assert torch.equal(got, numbers(LONG, 8))
        dist.broadcast(total, 0)
        dist.all_reduce(total)
    assert torch.equal(total, torch.zeros(LONG))


@TRANSPORTS
def test_message_does_not_wait_behind_a_collective(workers: Workers, transport: str) -> None:
    workers.run(beside_collectives, env={"SEALRING_TRANSPORT": transport})


def no_thread_waits(rank: int, world: int) -> None:
    """Both sides only check whether it is done; the group's own thread moves the bytes."""
    got = torch.empty(LONG)
    work = dist.isend(numbers(LONG, 1), 1) if rank == 0 else dist.irecv(got, 0)
    assert work is not None
    future = work.get_future()
    end = time.monotonic() + 60
    while not work.is_completed():
        assert time.monotonic() < end
        time.sleep(0.002)
    future.wait()
    if rank == 1:
        assert torch.equal(got, numbers(LONG, 1))


def test_messages_move_while_no_thread_waits(workers: Workers) -> None:
    workers.run(no_thread_waits)


def not_in_one_piece(rank: int, world: int) -> None:
    if rank == 0:
        dist.send(numbers(20_000, 1).view(100, 200).t(), 1)
    else:
        wide = torch.zeros(200, 200)
        dist.recv(wide[:, ::2], 0)
        assert torch.equal(wide[:, ::2], numbers(20_000, 1).view(100, 200).t())
        assert torch.equal(wide[:, 1::2], torch.zeros(200, 100))


def test_tensors_that_are_not_contiguous(workers: Workers) -> None:
    workers.run(not_in_one_piece)


def all_in_one_place(rank: int, world: int) -> None:
    if rank == 0:
        dist.send(torch.ones(10), 1)
    else:
        with pytest.raises(Unsupported, match="single memory location"):
            dist.recv(torch.zeros(1).expand(10), 0)
        dist.recv(whole := torch.zeros(10), 0)
        assert torch.equal(whole, torch.ones(10)), "the message is still there"
    dist.barrier()


def test_an_output_that_cannot_hold_the_message_is_refused(workers: Workers) -> None:
    workers.run(all_in_one_place)


def memory_taken_away(rank: int, world: int) -> None:
    if rank == 0:
        dist.barrier()
        dist.send(torch.ones(10), 1)
    else:
        wide = torch.zeros(20)
        work = dist.irecv(wide[::2], 0)
        assert work is not None
        wide.untyped_storage().resize_(0)
        dist.barrier()
        with pytest.raises(Unsupported, match="its storage has 0"):
            work.wait()
    dist.barrier()


def test_a_result_that_cannot_be_written_is_its_waiters_error(workers: Workers) -> None:
    workers.run(memory_taken_away)


def many_short_ones(rank: int, world: int) -> None:
    """There are more than the receiver may be made to hold; it receives them at the end."""
    count = 3000
    if rank == 0:
        works = [dist.isend(torch.full((1000,), float(at)), 1, tag=at) for at in range(count)]
        dist.barrier()
        for work in works:
            assert work is not None
            work.wait()
    else:
        dist.barrier()
        got = torch.empty(1000)
        for at in range(count):
            dist.recv(got, 0, tag=at)
            assert got[0] == got[-1] == at


@TRANSPORTS
@pytest.mark.threat("M7")
def test_more_messages_than_fit_wait_with_their_sender(workers: Workers, transport: str) -> None:
    workers.run(many_short_ones, env={"SEALRING_TRANSPORT": transport})


def batch(rank: int, world: int) -> None:
    right, left = (rank + 1) % world, (rank - 1) % world
    sent, got = numbers(SHORT, rank), torch.empty(SHORT)
    operations = [dist.P2POp(dist.isend, sent, right), dist.P2POp(dist.irecv, got, left)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert torch.equal(got, numbers(SHORT, left))


def test_batch_of_sends_and_receives(workers: Workers) -> None:
    workers.run(batch, world=4)


def in_a_subgroup(rank: int, world: int) -> None:
    group = dist.new_group([1, 3])
    if rank == 1:
        dist.send(torch.tensor([4.0]), 3, group=group)
    if rank == 3:
        got = torch.empty(1)
        dist.recv(got, 1, group=group)
        assert got.item() == 4.0
    dist.barrier()
    if rank in (1, 3):
        dist.destroy_process_group(group)


def test_messages_in_a_subgroup(workers: Workers) -> None:
    workers.run(in_a_subgroup, world=4)


# ---- what goes wrong


def other_size(rank: int, world: int) -> None:
    if rank == 0:
        dist.send(torch.zeros(10), 1)
        dist.recv(torch.zeros(1), 1)
    else:
        dist.recv(torch.zeros(11), 0)


@pytest.mark.threat("M8")
def test_another_size_is_out_of_step_on_both(workers: Workers) -> None:
    first, second = workers.run(other_size, errors=True, env={"CASE": "size"})
    assert type(second) is OutOfStep
    assert "sent a message of 40 bytes with tag 0, rank 1 receives 44" in str(second)
    assert type(first) is OutOfStep
    assert first.reported_by == 1


def silence(rank: int, world: int) -> None:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    if rank == 0:
        dist.recv(torch.zeros(1), 1, group=group, tag=6)
    else:
        time.sleep(2.5)
        dist.all_reduce(torch.zeros(1), group=group)


@pytest.mark.threat("M9")
def test_message_that_never_comes(workers: Workers) -> None:
    """The waiter's error names the silent rank, and so does the other rank's next collective."""
    first, second = workers.run(silence, errors=True, env={"CASE": "silence"})
    assert type(first) is PeerSilent
    assert first.peer == 1
    assert "no message with tag 6 came" in str(first)
    assert isinstance(second, PeerSilent | PeerLost)


def dies(rank: int, world: int) -> None:
    if rank == 1:
        os._exit(3)
    dist.recv(torch.zeros(LONG), 1)


@pytest.mark.threat("M9")
def test_peer_that_dies() -> None:
    own = Workers(2)
    try:
        first = own.run(dies, errors=True)[0]
    finally:
        own.close()
    assert type(first) is PeerLost
    assert first.peer == 1


def later_collective(rank: int, world: int) -> tuple[str, str]:
    """A failed message ends the collectives as well: a group is whole or closed."""
    seen: list[str] = []
    try:
        if rank == 0:
            dist.send(torch.zeros(10), 1)
        else:
            dist.recv(torch.zeros(11), 0)
    except GroupError as error:
        seen.append(type(error).__name__)
    else:
        seen.append("sent")
    try:
        dist.all_reduce(torch.zeros(1))
    except GroupError as error:
        seen.append(type(error).__name__)
    raise OutOfStep(",".join(seen))


@pytest.mark.threat("M8")
def test_failed_message_ends_the_group(workers: Workers) -> None:
    first, second = workers.run(later_collective, errors=True, env={"CASE": "later"})
    assert str(first) == "sent,OutOfStep"
    assert str(second) == "OutOfStep,OutOfStep"


def runs_out(rank: int, world: int) -> str:
    if rank == 0:
        work = dist.irecv(torch.zeros(1), 1)
        assert work is not None
        with pytest.raises(PeerSilent, match=r"was not done 0\.2 s after wait"):
            work.wait(timedelta(seconds=0.2))
        with pytest.raises(GroupClosed):
            dist.send(torch.zeros(1), 1)
        return "gave up"
    with pytest.raises(GroupClosed, match="rank 0 reported: a rank gave up waiting"):
        dist.recv(torch.zeros(1), 0)
    return "was told"


def test_wait_that_runs_out_of_time_closes_the_group(workers: Workers) -> None:
    assert workers.run(runs_out, env={"CASE": "runs out"}) == ["gave up", "was told"]


def refused(rank: int, world: int) -> None:
    with pytest.raises(Unsupported, match=r"tag must be between 0 and 2147483647, not -1"):
        dist.send(torch.zeros(1), 1 - rank, tag=-1)
    with pytest.raises(ValueError, match="rank"):
        dist.send(torch.zeros(1), rank)


def test_bad_arguments(workers: Workers) -> None:
    workers.run(refused)
