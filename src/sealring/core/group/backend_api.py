"""The methods that torch calls on a group's backend, and torch's hooks around calls.

A SealedProcessGroup is its own backend. From torch 2.14 on, torch has hooks: its check for NaN, its
flight recorder (2.15), and the hooks that a user registers. Torch's operators call the hooks around
a call of the Backend object that the group has for the tensors' device, so a group registers such
an object. (C++ also keeps the group's name in it.) Before 2.14 there are no such hooks, and Python
cannot subclass Backend.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import Backend, Store

from sealring.core.devices import ServedDevices
from sealring.core.group.dispatch import Dispatcher
from sealring.core.group.entry import current_call
from sealring.core.group.monitored import Arrivals


class BackendApi(dist.ProcessGroup):
    _timeout: timedelta
    _name: str
    dispatcher: Dispatcher
    _arrivals: Arrivals

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    _set_default_timeout = set_timeout

    @property
    def options(self) -> Backend.Options:
        """A description of the group. To change its timeout, call set_timeout()."""
        options = Backend.Options("sealring", self._timeout)
        # A group that was made without torch's init functions is not in torch's table.
        ranks = c10d._world.pg_group_ranks.get(self)
        options.global_ranks_in_group = list(ranks or range(self.size()))
        options.group_name = self.group_name
        return options

    def get_group_store(self) -> Store:
        """The store that the group was made with. Nothing in it is sealed by the group."""
        return self._arrivals.store

    def _set_sequence_number_for_group(self) -> None:
        """Does nothing: the number starts at 0 on every rank."""

    def _get_sequence_number_for_group(self) -> int:
        """How many collectives were called; equal on ranks that made the same calls."""
        return self.dispatcher.submitted

    use_pg_for_symm_mem_rendezvous = False

    supports_reconfigure = False
    """A group's members cannot change: make a new group instead."""


TORCH_HAS_HOOKS: Final = hasattr(dist.ProcessGroup, "register_pre_hook")


class TorchHooks(dist.ProcessGroup):
    """The part of SealedProcessGroup that knows whether torch has hooks for its calls."""

    _hooks: set[int]
    """The ids of hooks that were registered on this object. Torch registers its own hooks in
    C++."""
    _checks_nan: bool

    def _register_torch_backend(self) -> None:
        self._hooks = set()
        self._checks_nan = os.environ.get("TORCH_DIST_NAN_CHECK") == "1"  # torch reads it now too
        if not TORCH_HAS_HOOKS:
            return
        backend, kind = _backend_class(type(self))(self), dist.ProcessGroup.BackendType.CUSTOM
        for device in ServedDevices():
            self._register_backend(torch.device(device), kind, backend)
        self._set_default_backend(kind)

    def has_torch_hooks(self) -> bool:
        """Whether calls must go through torch's operators, because there are hooks to call."""
        if not TORCH_HAS_HOOKS:
            return False
        recorded: Any = getattr(c10d._world, "pg_flight_recorder_hooks", ())
        return bool(self._hooks) or self._checks_nan or self in recorded

    def register_pre_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
        super().register_pre_hook(hook_id, hook)  # type: ignore[misc]
        self._hooks.add(hook_id)

    def register_post_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
        super().register_post_hook(hook_id, hook)  # type: ignore[misc]
        self._hooks.add(hook_id)


def _backend_class(group_type: type) -> Callable[[Any], Backend]:
    """Returns a Backend class whose methods are the group's collectives.

    The class is made in this function, because before torch 2.14 its definition would fail.
    """

    class TorchBackend(Backend):
        def __init__(self, group: dist.ProcessGroup) -> None:
            super().__init__(group.rank(), group.size())
            # Weak, because C++ holds the Backend, and Python finds no cycles through C++.
            self._group = weakref.ref(group)

        supports_reconfigure = False

        @property
        def options(self) -> Any:
            return self._group().options  # type: ignore[union-attr]

        def getBackendName(self) -> str:  # noqa: N802 (torch's name)
            return "sealring"

    for name in dir(group_type):
        direct = getattr(getattr(group_type, name), "direct", None)
        if direct is not None:
            setattr(TorchBackend, name, _called_by_operator(direct))
    return TorchBackend


def _called_by_operator(direct: Callable[..., Any]) -> Callable[..., Any]:
    def method(backend: Any, *args: Any) -> Any:
        work = direct(backend._group(), *args)
        if (call := current_call()) is not None:
            call.works.append((None, work))
        return work

    return method
