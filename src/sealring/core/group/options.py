"""What a group is to be: as torch asks for it, or as a script does that makes one without torch."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from sealring.errors import ConfigurationError

DEFAULT_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True, slots=True)
class GroupOptions:
    store: Any
    """Where the ranks meet; no other group uses the same keys of it."""
    group_rank: int
    members: tuple[int, ...]
    """The job's ranks that are in the group, in the group's order."""
    world: int
    """How many ranks the job has, in this group or not."""
    timeout: timedelta = DEFAULT_TIMEOUT
    name: str = ""
    within: str = ""
    """The `run` of torch's default group, for the groups that torch makes within it."""

    def __post_init__(self) -> None:
        if not 0 <= self.group_rank < len(self.members):
            raise ConfigurationError(
                f"rank {self.group_rank} does not exist in a group of {len(self.members)}"
            )

    @property
    def rank(self) -> int:
        """This process's rank in the job."""
        return self.members[self.group_rank]


def options_of_torch(options: Any) -> GroupOptions:
    """From what torch passes to a backend's creator."""
    return _options(
        options.store,
        options.group_rank,
        options.group_size,
        options.global_ranks_in_group,
        timeout=options.timeout,
        name=options.group_id,
        within=_run_around(options.global_ranks_in_group, options.group_rank),
    )


def options_of_call(
    store: Any,
    rank: int,
    size: int,
    *,
    timeout: timedelta = DEFAULT_TIMEOUT,
    name: str = "",
    job_ranks: Any = None,
    job_size: int | None = None,
) -> GroupOptions:
    """From the arguments of sealring.create_group."""
    return _options(store, rank, size, job_ranks, job_size, timeout=timeout, name=name)


def _options(
    store: Any,
    rank: int,
    size: int,
    job_ranks: Any,
    job_size: int | None = None,
    *,
    timeout: timedelta,
    name: str,
    within: str = "",
) -> GroupOptions:
    members = tuple(job_ranks or ()) or tuple(range(size))
    if len(members) != size:
        raise ConfigurationError(
            f"the group has {size} ranks, and {len(members)} ranks of the job are named for them"
        )
    if job_size is None:
        job_size = _job_size(members) if job_ranks else size
    return GroupOptions(store, rank, members, job_size, timeout, name, within)


def _run_around(ranks: Any, place: int) -> str:
    """Of the default group within which torch makes the group of these ranks.

    Nothing for the default group itself, within one of another backend, and for a framework that
    calls the creator with ranks that are not the default group's.
    """
    if not ranks or not dist.is_initialized():
        return ""
    if max(ranks) >= dist.get_world_size() or ranks[place] != dist.get_rank():
        return ""
    run = getattr(dist.group.WORLD, "run", "")
    return run if isinstance(run, str) else ""  # a foreign group's may be anything


def _job_size(members: tuple[int, ...]) -> int:
    """Of torch's default group, if the members are ranks of it.

    They need not be: a process may belong to several jobs of torch's, or to none.
    """
    least = max(members) + 1
    if not dist.is_initialized():
        return least
    return max(least, dist.get_world_size())
