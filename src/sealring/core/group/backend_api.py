"""What torch asks of a group's backend: a SealedProcessGroup is both."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import Backend, Store

from sealring.core.group.dispatch import Dispatcher
from sealring.core.group.monitored import Arrivals


class BackendApi(dist.ProcessGroup):
    _timeout: timedelta
    _name: str
    _dispatcher: Dispatcher
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
        # A group that was made apart from torch's world is not in its table.
        ranks = c10d._world.pg_group_ranks.get(self)
        options.global_ranks_in_group = list(ranks or range(self.size()))
        options.group_name = self.group_name
        return options

    def get_group_store(self) -> Store:
        """The store that the group was made with. Nothing in it is sealed by the group."""
        return self._arrivals.store

    def _set_sequence_number_for_group(self) -> None:
        """The number starts at 0 on every rank: there is nothing to agree on."""

    def _get_sequence_number_for_group(self) -> int:
        """How many collectives were called; equal on all ranks that have made the same calls."""
        return self._dispatcher.submitted

    use_pg_for_symm_mem_rendezvous = False

    supports_reconfigure = False
    """Members cannot be exchanged: a group whose members change is made anew."""
