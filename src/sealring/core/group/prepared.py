"""Prepared calls: a fast path for calls with the size, type and reduction of an earlier call.

What such a call needs from the core is made once and kept, without an address or a tensor. Each
call then only checks its own tensor, and runs on the thread that waits for it. For a small tensor
the rest of a normal call takes longer than its records (docs/performance.md, "A small message").
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from sealring import _native, limits
from sealring.core.engine.collective import Collective
from sealring.core.engine.engine import CollectiveEngine
from sealring.core.engine.gpu_calls import GpuCalls
from sealring.core.group import arguments, memory
from sealring.core.group.collectives.calling import Calling, Key
from sealring.core.group.deferred_errors import DeferredError
from sealring.core.group.dispatch import Dispatcher
from sealring.core.group.work import FailedWork, FinishedWork, SealedWork
from sealring.core.schedule import Selection

_KEPT: Final = 64
_NO_TIME: Final = timedelta(0)


class _Prepared(NamedTuple):
    call: _native.Call
    like: Collective
    """The first such call. Its memory is not used."""
    bytes: int
    chosen_by: Selection


class Prepared(Calling):
    """The part of SealedProcessGroup that runs prepared calls."""

    engine: CollectiveEngine
    dispatcher: Dispatcher
    _gpu: GpuCalls
    _deferred: DeferredError
    _process: _native.ProcessMark
    _timeout: timedelta
    _coalesced: list[SealedWork] | None
    selection: Selection
    _prepared: dict[Key, _Prepared]

    def _prepare(self, key: Key, collective: Collective, tensor: torch.Tensor) -> None:
        """Prepares calls like this one, if `_run_prepared` may run them."""
        total = collective.total
        if total is None or not 0 < total <= limits.PREPARED_BYTES or not _is_plain(tensor):
            return
        if self._gpu.serves(tensor.device):
            return
        if len(self._prepared) >= _KEPT:
            self._prepared.clear()
        self._prepared[key] = _Prepared(
            self.engine.prepare(collective), collective, total, self.selection
        )

    def _run_prepared(
        self, key: Key, tensor: torch.Tensor, result: list[torch.Tensor], opts: Any
    ) -> dist.Work | None:
        """Runs a prepared call; None if none was prepared for `key`, or it cannot run at once."""
        prepared = self._prepared.get(key)
        if (
            prepared is None
            or prepared.chosen_by is not self.selection
            or opts.asyncOp
            or self._coalesced is not None
            # The checks of _is_plain; the key includes the dtype and the layout.
            or not tensor.is_cpu
            or not tensor.is_contiguous()
            or tensor.is_neg()
            or tensor.is_nested
        ):
            return None
        if (place := memory.place_of_torchs_own(tensor, prepared.bytes)) is None:
            return None
        address, storage = place
        self._process.require("this process group")
        if (error := self._deferred.take()) is not None:
            raise error
        timeout = opts.timeout
        ended = self.dispatcher.run_again(
            prepared.call,
            prepared.like,
            address,
            (timeout if timeout > _NO_TIME else self._timeout).total_seconds(),
        )
        del storage  # kept until here: another thread may give the tensor other memory meanwhile
        if ended is False:
            return None
        if ended is True:
            done: SealedWork = FinishedWork()
            done.stand_for(result)
            return done
        return FailedWork(result, ended, self._deferred)


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.is_cpu
        and not tensor.is_nested
        and not tensor.is_complex()
        and arguments.is_one_run(tensor)
    )
