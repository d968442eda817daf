"""DDP over sealed links: the same losses as over Gloo, and failures that arrive by name."""

from __future__ import annotations

import os
import secrets
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sealring.errors import ConfigurationError, GroupClosed, OutOfStep, PeerLost, PeerSilent, named
from tests.workers import Workers


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 256), torch.nn.Tanh(),
        torch.nn.Linear(256, 8),
    )  # fmt: skip


def losses(rank: int, world: int, backend: str) -> list[float]:
    group = dist.group.WORLD if backend == "sealring" else dist.new_group(backend=backend)
    # Small buckets, so that several all-reduces overlap the backward pass.
    ddp = DistributedDataParallel(model(), process_group=group, bucket_cap_mb=0.1)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(rank)
    out = []
    for _ in range(12):
        x = torch.randn(16, 64, generator=generator)
        loss = (ddp(x) - x[:, :8]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(mean := loss.detach().clone(), op=dist.ReduceOp.AVG)
        out.append(mean.item())
    return out


@pytest.mark.parametrize("world", [2, 4])
def test_ddp_losses_agree_with_gloo(workers: Workers, world: int) -> None:
    sealed = workers.run(losses, "sealring", world=world)
    gloo = workers.run(losses, "gloo", world=world)
    assert sealed[0] == sealed[-1]
    assert sealed[0][-1] < sealed[0][0]
    assert sealed[0] == pytest.approx(gloo[0], rel=1e-5)


def dies_in_training(rank: int, world: int) -> str:
    ddp = DistributedDataParallel(model())
    for step in range(5):
        if rank == 1 and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        ddp(torch.randn(4, 64)).sum().backward()
    return "trained to the end"


@pytest.mark.threat("F3")
def test_a_killed_rank_is_peer_lost_in_backward_on_every_other_rank() -> None:
    own = Workers(3)
    try:
        results = own.run(dies_in_training, world=3, errors=True)
    finally:
        own.close()
    for rank in (0, 2):
        assert type(results[rank]) is PeerLost
        assert results[rank].peer == 1
        assert "rank 1" in str(results[rank])


def disagree(rank: int, world: int) -> None:
    dist.all_reduce(torch.ones(1000 if rank else 2000))


@pytest.mark.threat("F10")
def test_different_sizes_are_out_of_step_on_all_ranks(workers: Workers) -> None:
    for error in workers.run(disagree, world=3, errors=True):
        assert type(error) is OutOfStep
        assert "8000 bytes of float32" in str(error)
        assert "4000 bytes of float32" in str(error)


def one_stays_away(rank: int, world: int) -> str:
    from datetime import timedelta

    dist.group.WORLD.set_timeout(timedelta(seconds=1))  # type: ignore[union-attr]
    if rank == 1:
        return "stayed away"
    dist.all_reduce(torch.ones(10))
    return "reduced"


@pytest.mark.threat("F4")
def test_a_silent_rank_is_named_when_time_is_up(workers: Workers) -> None:
    results = workers.run(one_stays_away, world=2, errors=True)
    assert type(results[0]) is PeerSilent
    assert results[0].peer == 1
    assert results[1] == "stayed away"


def waits_briefly(rank: int, world: int) -> str:
    from datetime import timedelta

    if rank == 0:
        with pytest.raises(PeerSilent, match="after wait"):
            dist.broadcast(torch.ones(10), src=1, async_op=True).wait(timedelta(seconds=0.2))
        with pytest.raises(GroupClosed):
            dist.barrier()
        return "gave up"
    time.sleep(1)
    with pytest.raises(GroupClosed, match="rank 0 reported"):
        dist.barrier()
    return "was told"


def test_a_wait_that_runs_out_of_time_closes_the_group(workers: Workers) -> None:
    only_here = {"SEALRING_JOB": "closed-by-timeout"}
    results = workers.run(waits_briefly, world=2, env=only_here, errors=True)
    assert results[0] == "gave up"
    assert results[1] == "was told"


def after_failure(rank: int, world: int) -> str:
    with pytest.raises(OutOfStep):
        dist.all_reduce(torch.ones(1000 if rank else 2000))
    with pytest.raises(OutOfStep):  # the group is dead, and says why
        dist.all_reduce(torch.ones(5))
    dist.destroy_process_group()
    dist.init_process_group("sealring")
    tensor = torch.ones(5)
    dist.all_reduce(tensor)
    assert tensor[0] == world
    group = dist.group.WORLD
    assert group is not None
    dist.destroy_process_group()
    with pytest.raises(GroupClosed):
        group.allreduce([tensor], dist.AllreduceOptions()).wait()
    return "alive"


@pytest.mark.threat("F12")
def test_a_new_group_can_be_made_in_the_same_processes(workers: Workers) -> None:
    assert workers.run(make_then_fail, world=2, group=False) == ["alive", "alive"]


def make_then_fail(rank: int, world: int) -> str:
    dist.init_process_group("sealring")
    return after_failure(rank, world)


def join(rank: int, world: int) -> str:
    from datetime import timedelta

    dist.init_process_group("sealring", timeout=timedelta(seconds=5))
    return "joined"


@pytest.mark.threat("J35")
def test_without_an_identity_nothing_starts(workers: Workers) -> None:
    bare = {rank: {"SEALRING_SECRET": ""} for rank in range(2)}
    results = workers.run(_join_without_identity, world=2, group=False, rank_env=bare, errors=True)
    for error in results:
        assert isinstance(error, ConfigurationError)
        assert error.code == "configuration.no_identity"
        assert "SEALRING_SECRET_FILE" in str(error)
        assert "sealring ca" in str(error)


def _join_without_identity(rank: int, world: int) -> str:
    del os.environ["SEALRING_SECRET"]
    return join(rank, world)


@pytest.mark.threat("J1")
def test_another_secret_and_another_job_do_not_get_in(workers: Workers) -> None:
    stranger = {1: {"SEALRING_SECRET": secrets.token_hex(32)}}
    for error in workers.run(join, world=2, group=False, rank_env=stranger, errors=True):
        assert named(error) == "handshake.unknown_authority"
    other_job = {1: {"SEALRING_JOB": "another"}}
    for error in workers.run(join, world=2, group=False, rank_env=other_job, errors=True):
        assert named(error) == "handshake.wrong_job"


def test_subgroups_have_links_of_their_own(workers: Workers) -> None:
    assert workers.run(subgroup, world=3) == [2.0, 1.0, 2.0]


def subgroup(rank: int, world: int) -> float:
    pair = dist.new_group([0, 2])
    tensor = torch.ones(10)
    if rank != 1:
        dist.all_reduce(tensor, group=pair)
    dist.barrier()
    return tensor[0].item()
