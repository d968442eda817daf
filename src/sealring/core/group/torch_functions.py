"""Changes to torch for our groups: functions that know only certain backends, and Dynamo.

Some functions of torch.distributed serve only groups of certain backends. They are wrapped so that
our groups get the call; groups of other backends still get torch's own function.

Dynamo compiles every Python function that runs under torch.compile, also after a graph break. The
collectives of torch's own backends are C++ and so never traced. Ours are Python with locks, queues
and addresses, which no graph can contain. So Dynamo is told not to compile them, and breaks the
graph at the same places as with Gloo.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, Protocol

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._dynamo import eval_frame

from sealring.core.sealed_only.doors import watch_symmetric_memory


class Served(Protocol):
    def monitored_barrier(self, timeout: Any, wait_all_ranks: bool = False) -> None: ...

    def set_timeout(self, timeout: Any) -> None: ...


def pass_calls_to_groups(group_type: type[Served]) -> None:
    """Wraps torch's functions for groups of this type. A second call changes nothing."""

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
    _wrap("set_timeout", set_timeout)  # the public name, in versions of torch that have it
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


# ---- not compiled


def not_traced(owner: type) -> None:
    """Excludes from Dynamo all methods that sealring defines in a class and its bases."""
    for base in owner.__mro__:
        if base.__module__.startswith("sealring."):
            for member in vars(base).values():
                if isinstance(member, property):
                    # Not excluded, only not compiled: torch 2.11 reads group_name in a graph.
                    _not_compiled(member.fget)
                elif isinstance(function := getattr(member, "__func__", member), FunctionType):
                    not_traced_function(function)


def not_traced_function(function: Any) -> None:
    """Makes Dynamo skip the function and all that it calls, and not inline it elsewhere."""
    _not_compiled(function)
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = "sealring moves the bytes"


def _not_compiled(function: Any) -> None:
    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
