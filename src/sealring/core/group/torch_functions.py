"""Functions of torch.distributed that serve only groups of certain backends, by their name.

They are wrapped so that a group of ours gets the call. Groups of other backends are served by
torch's own function, as before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from sealring.core.group.tracing import not_traced_function
from sealring.core.sealed_only.doors import watch_symmetric_memory


class Served(Protocol):
    def monitored_barrier(self, timeout: Any, wait_all_ranks: bool = False) -> None: ...

    def set_timeout(self, timeout: Any) -> None: ...


def pass_calls_to_groups(group_type: type[Served]) -> None:
    """Called when a group is made; a second call changes nothing."""

    def ours(group: Any) -> Any:
        group = c10d._get_default_group() if group is None else group
        return group if isinstance(group, group_type) else None

    def monitored_barrier(
        torchs: Callable[..., Any],
        group: Any = None,
        timeout: Any = None,
        wait_all_ranks: bool = False,
    ) -> Any:
        if (served := ours(group)) is not None:
            return served.monitored_barrier(timeout, wait_all_ranks)
        return torchs(group, timeout, wait_all_ranks)

    def set_timeout(torchs: Callable[..., Any], timeout: Any, group: Any = None) -> Any:
        if (served := ours(group)) is not None:
            return served.set_timeout(timeout)
        return torchs(timeout, group)

    _wrap("monitored_barrier", monitored_barrier)
    _wrap("_set_pg_timeout", set_timeout)
    _wrap("set_timeout", set_timeout)  # its public name, in the versions of torch that have one
    watch_symmetric_memory()


def _wrap(name: str, call: Callable[..., Any]) -> None:
    torchs: Any = getattr(c10d, name, None)
    if torchs is None or hasattr(torchs, "serves_sealring"):
        return

    @functools.wraps(torchs)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        return call(torchs, *arguments, **options)

    not_traced_function(call)
    not_traced_function(wrapped)
    wrapped.serves_sealring = True  # type: ignore[attr-defined]
    setattr(c10d, name, wrapped)
    if hasattr(dist, name):
        setattr(dist, name, wrapped)
