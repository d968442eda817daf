"""A GPU that cannot be used is reported on all ranks when the group is made, not later."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from sealring import limits
from sealring.core.engine.collective import Collective
from sealring.core.engine.cuda.wires import Wire
from sealring.core.engine.engine import CollectiveEngine
from sealring.core.engine.gpu_calls import GpuCalls, in_use
from sealring.core.engine.streams import driver_calls
from sealring.core.group import create
from sealring.core.schedule import Algorithm
from sealring.errors import GroupClosed, Unsupported
from tests.core.engine.stand_ins import attach_host_driver
from tests.core.links.teams import SIZE, team
from tests.core.links.test_late_on_gpus import ELEMENTS, all_reduce_of
from tests.workers import Workers

REASON = "cuda:0 cannot serve sealed collectives: free some memory"


class Unfit(GpuCalls):
    def attach(self, device: torch.device) -> None:
        raise Unsupported(REASON)


@pytest.mark.parametrize(
    ("begun", "gpus", "current", "local_rank", "chosen"),
    [
        (False, 1, 0, "0", None),
        (True, 1, 0, None, 0),
        (True, 8, 0, "0", 0),
        (True, 8, 3, None, 3),
        (True, 8, 0, "3", None),
        (True, 8, 0, None, None),
    ],
)
def test_which_gpu_a_process_will_use(
    monkeypatch: pytest.MonkeyPatch,
    begun: bool,
    gpus: int,
    current: int,
    local_rank: str | None,
    chosen: int | None,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: begun)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    environ = {} if local_rank is None else {"LOCAL_RANK": local_rank}
    assert in_use(environ) == (None if chosen is None else torch.device("cuda", chosen))


def one_gpu_is_unfit(rank: int, world: int) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(create, "in_use", lambda _: torch.device("cuda", 0) if rank == 1 else None)
        patch.setattr(create, "GpuCalls", Unfit)
        with pytest.raises(Unsupported) as refused:
            dist.init_process_group("sealring")
    return str(refused.value)


def one_gpu_of_a_large_group_is_unfit(rank: int, world: int) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "MOST_LINKED_AT_ONCE", 1)
        return one_gpu_is_unfit(rank, world)


def test_all_ranks_of_a_group_that_makes_its_links_later_hear_why(workers: Workers) -> None:
    texts = workers.run(one_gpu_of_a_large_group_is_unfit, world=4, group=False)
    assert set(texts) == {f"rank 1: {REASON}"}


@pytest.mark.parametrize("world", [2, 3])
def test_all_ranks_hear_why(workers: Workers, world: int) -> None:
    for rank, text in enumerate(workers.run(one_gpu_is_unfit, world=world, group=False)):
        assert REASON in text
        assert rank == 1 or "rank 1" in text


def unfit_for_a_subgroup(rank: int, world: int) -> str:
    """The new group is refused, and the existing group still works."""
    dist.init_process_group("sealring")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(create, "in_use", lambda _: torch.device("cuda", 0) if rank == 0 else None)
        patch.setattr(create, "GpuCalls", Unfit)
        with pytest.raises(Unsupported) as refused:
            dist.new_group()
    data = torch.ones(3)
    dist.all_reduce(data)
    assert (data == world).all()
    return str(refused.value)


def test_a_subgroup_too(workers: Workers) -> None:
    assert all(REASON in text for text in workers.run(unfit_for_a_subgroup, group=False))


def named_by_its_number(rank: int, world: int) -> str:
    """init_process_group(device_id=...): torch has the finished group connect to it."""
    dist.init_process_group("sealring")
    group: Any = dist.group.WORLD
    backend = group._get_backend(torch.device("cpu"))
    assert backend.supports_splitting
    if rank == 1:
        group.use_gpu_calls(Unfit(group.engine, "host"))
        with pytest.raises(Unsupported, match="free some memory"):
            backend.eager_connect_single_device(torch.device("cuda", 0))
    with pytest.raises(GroupClosed) as told:
        dist.barrier()
    return str(told.value)


def test_a_gpu_that_init_process_group_names(workers: Workers) -> None:
    for text in workers.run(named_by_its_number, group=False):
        assert REASON in text


class Served(GpuCalls):
    """A GPU that serves, or fails, when ranks agree."""

    def __init__(self, engine: CollectiveEngine, problem: Exception | None = None) -> None:
        super().__init__(engine, "host", Wire.LINKS)
        self._problem = problem

    def attach(self, device: torch.device) -> None:
        if self._problem is not None:
            raise self._problem

    def name_of(self, device: torch.device) -> str:
        return "a GPU"


def test_while_ranks_agree_hosts_wait_in_all_groups() -> None:
    """To agree, threads call CUDA. They may block while streams wait, of whichever group."""
    with team() as one:
        seen = []

        def call(rank: int) -> None:
            group = one.groups[rank]
            attach_host_driver(group.engine._native, prelaunch=False)
            setup = Served(group.engine)

            def run(collectives: Iterable[Collective]) -> None:
                for each in collectives:
                    seen.append(driver_calls.any)
                    group._run(each, 20.0)

            setup.agree(torch.device("cuda", 0), run, 20.0)
            collective = all_reduce_of(np.zeros(ELEMENTS, np.float32), Algorithm.RING)
            setup.link(collective, run, 20.0)

        assert one.all(call) == [None] * SIZE
        assert seen
        assert all(seen)
        assert not driver_calls.any


def test_a_gpu_that_fails_in_its_own_way_is_told_to_all_ranks() -> None:
    """The others wait for the rank's answer, so errors of every class must be sent."""
    with team() as one:
        texts = []

        def call(rank: int) -> None:
            group = one.groups[rank]
            if rank != 5:
                attach_host_driver(group.engine._native, prelaunch=False)
            problem = RuntimeError("CUDA error: an illegal access") if rank == 5 else None
            setup = Served(group.engine, problem)
            for _ in range(2):  # the second time without another word
                with pytest.raises(Unsupported) as refused:
                    setup.agree(
                        torch.device("cuda", 0),
                        lambda collectives: [group._run(each, 20.0) for each in collectives],  # type: ignore[arg-type]
                        20.0,
                    )
                texts.append(str(refused.value))

        assert one.all(call) == [None] * SIZE
        assert texts == ["rank 5: CUDA error: an illegal access"] * (2 * SIZE)
        assert not driver_calls.any
