"""Runs in a worker process: makes the plan's groups, calls its collectives and reports to the
parent.

A worker sends each fact at once, so that a killed worker's history is complete up to its end.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final

from sealring.core.schedule import Algorithm
from tests.chaos.history import SeenError, digest
from tests.chaos.local import other_case
from tests.chaos.messages import memory_of
from tests.chaos.plan import PROBES, Call, FaultKind, Plan
from tests.core.engine.cases import Case

_Begun = tuple[Call, Any, list[Any], BaseException | None]
"""A call, its memory, torch's works, and the error if the call failed at once."""

_PR_SET_PDEATHSIG: Final = 1
_SETUP_TIMEOUT: Final = timedelta(seconds=120)


@dataclass(frozen=True, slots=True)
class Order:
    plan: Plan
    rank: int
    store_port: int
    proxies: dict[int, int]
    """The proxy's port for each peer that this rank dials through the proxy."""
    env: dict[str, str]


def serve(pipe: Any) -> None:
    """Runs orders until the parent says to end."""
    # The worker must not outlive the parent, however the parent ends.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    before = dict(os.environ)
    pipe.send(("up",))
    while (order := pipe.recv()) is not None:
        os.environ.clear()
        os.environ.update({**before, **order.env})
        # torch names groups by a counter, which a failed init leaves raised.
        dist.distributed_c10d._world.group_count = 0
        try:
            _Worker(order, pipe).run()
        except BaseException:
            pipe.send(("trouble", f"rank {order.rank}: {traceback.format_exc()}"))
        with suppress(Exception):
            dist.destroy_process_group()
        pipe.send(("over",))


class _Worker:
    def __init__(self, order: Order, pipe: Any) -> None:
        self._plan, self._rank, self._pipe = order.plan, order.rank, pipe
        self._fault = next((f for f in self._plan.faults if f.rank == self._rank), None)
        self._failed: set[int] = set()
        self._timer: threading.Timer | None = None
        self._groups: list[Any] = []
        self._make_groups(order)

    def run(self) -> None:
        left = not self._traffic()
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
        self._pipe.send(("left",) if left else ("traffic over",))
        for turn in range(1, PROBES + 1):
            self._pipe.recv()  # the parent's message that all ranks have come so far
            for group, members in enumerate(self._plan.groups):
                if not left and self._rank in members:
                    for call in self._plan.probes(group, turn):
                        self._finish(*self._begin(call))
            self._pipe.send(("probed", turn))
        self._pipe.recv()

    def _make_groups(self, order: Order) -> None:
        import torch.distributed as dist
        from torch._C._distributed_c10d import TCPStore

        from tests.chaos.proxy import ProxyStore

        tcp = TCPStore("127.0.0.1", order.store_port, is_master=False, timeout=_SETUP_TIMEOUT)
        store = ProxyStore(tcp, self._rank, order.proxies)
        store.lead_messages()
        dist.init_process_group(
            "sealring",
            store=store,
            rank=self._rank,
            world_size=self._plan.world,
            timeout=_SETUP_TIMEOUT,
        )
        self._groups.append(dist.group.WORLD)
        for number, members in enumerate(self._plan.groups[1:], 1):
            store.group = number
            self._groups.append(dist.new_group(list(members), timeout=_SETUP_TIMEOUT))
        # A group takes long to make on a crowded machine; only later calls are on the clock.
        for group, members in zip(self._groups, self._plan.groups, strict=True):
            if self._rank in members:
                group.set_timeout(timedelta(seconds=self._plan.timeout_s))
        self._pipe.send(("ready",))
        self._pipe.recv()

    def _traffic(self) -> bool:
        """Runs the traffic; returns False if this rank leaves early."""
        for batch in self._plan.batches:
            pending = []
            for call in batch:
                altered = False
                if self._fault is not None and self._fault.at == self._plan.at(call):
                    if self._fault.kind is FaultKind.LEAVE:
                        self._hit("said goodbye and left", must_end=True)
                        import torch.distributed as dist

                        dist.destroy_process_group()
                        return False
                    altered = self._befall(call)
                if not self._plan.takes_part(call, self._rank) or call.group in self._failed:
                    continue
                begun = self._begin(call, altered=altered)
                if call.background:
                    pending.append(begun)
                else:
                    self._finish(*begun)
            for begun in pending:
                self._finish(*begun)
        return True

    def _befall(self, call: Call) -> bool:
        """Applies this rank's fault; returns True if the call must differ from the plan."""
        fault = self._fault
        assert fault is not None
        if fault.kind is FaultKind.DISAGREE:
            if self._plan.takes_part(call, self._rank) and call.group not in self._failed:
                self._hit("called another collective than the others", must_end=False)
                return True
            return False
        which = signal.SIGKILL if fault.kind is FaultKind.KILL else signal.SIGSTOP
        delay = 0.02 * fault.place**3  # mostly during this very call
        self._pipe.send(("armed", fault, time.monotonic() + delay))
        self._timer = threading.Timer(delay, os.kill, (os.getpid(), which))
        self._timer.start()
        return False

    def _hit(self, what: str, *, must_end: bool) -> None:
        self._pipe.send(("hit", self._fault, time.monotonic(), what, must_end))

    def _begin(self, call: Call, *, altered: bool = False) -> _Begun:
        from tests.chaos.operations import as_tensor, start

        case = other_case(call.case) if altered else call.case
        members = self._plan.groups[call.group]
        rank = members.index(self._rank)
        # Tensors are passed whole, as in a script; sealring cuts them itself.
        whole = case
        if isinstance(case, Case):
            whole = replace(case, algorithm=Algorithm.DIRECT, as_reals=False)
        memory = memory_of(whole, len(members), rank, call.seed)
        self._pipe.send(("began", call, digest(memory.bits()), time.monotonic(), altered))
        try:
            slots = [as_tensor(array, whole.dtype) for array in memory.slots]  # type: ignore[union-attr]
            group = self._groups[call.group]
            return call, memory, start(whole, slots, rank, group, call.background), None
        except BaseException as error:
            return call, memory, [], error

    def _finish(self, call: Call, memory: Any, works: list[Any], error: Any) -> None:
        for work in works:
            try:
                work.wait()
            except BaseException as raised:
                error = error or raised
        ended = time.monotonic()
        if error is None:
            self._pipe.send(("ended", call, ended, b"".join(memory.bits()), None))
        else:
            self._failed.add(call.group)
            self._pipe.send(("ended", call, ended, None, SeenError.of(error)))
