"""SealedProcessGroup: the ProcessGroup that torch uses, whose collectives run on the sealed engine.

It is a subclass of ProcessGroup and not of Backend. Only this way works with torch 2.11 to 2.15,
and TORCH_DISTRIBUTED_DEBUG=DETAIL does not wrap such a group in a plaintext Gloo group.

The collectives are in group/collectives/.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from sealring import _native
from sealring._native import Failure, FailureCode
from sealring.core.devices import ServedDevices
from sealring.core.engine.collective import Collective
from sealring.core.engine.engine import CollectiveEngine
from sealring.core.engine.failures import failure_of
from sealring.core.engine.flight import FlightRecorder
from sealring.core.engine.gpu_calls import GpuCalls
from sealring.core.engine.mailbox import Mailbox
from sealring.core.engine.streams import driver_calls
from sealring.core.group import arguments, monitored, operators
from sealring.core.group.backend_api import BackendApi, TorchHooks
from sealring.core.group.collectives.coalescing import Coalescing
from sealring.core.group.collectives.exchanging import Exchanging
from sealring.core.group.collectives.messaging import Messaging
from sealring.core.group.deferred_errors import DeferredError, end_process
from sealring.core.group.dispatch import Dispatcher, Job
from sealring.core.group.entry import entry
from sealring.core.group.memory import storages
from sealring.core.group.messages import UNLIMITED_S, Messages
from sealring.core.group.monitored import Arrivals
from sealring.core.group.prepared import Prepared
from sealring.core.group.torch_functions import not_traced
from sealring.core.group.work import MessageWork, Result, SealedWork, tensors_of
from sealring.core.schedule import Algorithm, Operation, Selection, Topology
from sealring.errors import GroupError, Unsupported

# ---- the end of a group: by its script, by its process's exit, or by its last reference
# The last of these can happen at any time and on any thread, in a garbage collection and with any
# lock held. So that code takes no lock and starts no thread. It puts one entry into the group's
# queue, and the group's own thread does the rest, after all calls that were queued before.


class _Group(Protocol):
    def leave(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a group that must be closed. None of them refers to the group itself."""

    process: _native.ProcessMark
    dispatcher: Dispatcher
    messages: Messages
    arrivals: Arrivals
    gpu: GpuCalls
    engine: CollectiveEngine
    deferred: DeferredError

    def close(self, *, abort: bool = False) -> None:
        self.dispatcher.close(abort=abort)
        self._close_the_rest(abort=abort)

    def leave(self) -> None:
        """Called at the process's exit.

        Aborts the calls in the queue, because no caller waits for them any more. If streams wait
        for calls, the queue is run to its end: for the script those calls are done.
        """
        self.close(abort=not self.dispatcher.idle and not self.gpu.streams_wait)
        self._tell("the script ended without having seen this error")

    def abandon(self) -> None:
        """Called when no reference to the group is left. Takes no lock.

        Does nothing in a forked child, which has only a copy of its parent's group.
        """
        if self.process.here:
            self.dispatcher.abandon(self._close_abandoned)

    def _close_abandoned(self) -> None:
        self._close_the_rest(abort=False)
        self._tell("the script dropped a group without having seen this error")

    def _close_the_rest(self, *, abort: bool) -> None:
        self.messages.close(abort=abort)
        self.arrivals.close()
        self.gpu.close()
        if not self.engine.release_gpu():
            threading.Thread(
                target=self.engine.release_gpu, args=(UNLIMITED_S,), daemon=True
            ).start()

    def _tell(self, why: str) -> None:
        if (error := self.deferred.take()) is not None:
            end_process(why, error)


def close_when_dropped(group: _Group, parts: Parts) -> None:
    """Makes the group end properly at the process's exit, and when its last reference goes."""
    leave = _Leaving(weakref.ref(group))
    atexit.register(leave)
    finalizer = weakref.finalize(group, _dropped, parts, leave)
    finalizer.atexit = False  # at exit, `leave` does this instead


def _dropped(parts: Parts, leave: _Leaving) -> None:
    atexit.unregister(leave)
    parts.abandon()


@dataclass(frozen=True, slots=True, eq=False)
class _Leaving:
    """The exit handler: a script that ends without destroy_process_group still tells its peers."""

    group: weakref.ref[_Group]

    def __call__(self) -> None:
        if (alive := self.group()) is not None:
            alive.leave()


if TYPE_CHECKING:
    from sealring._native import Account


class SealedProcessGroup(BackendApi, TorchHooks, Prepared, Coalescing, Exchanging, Messaging):
    def __init__(
        self,
        rank: int,
        world: int,
        engine: CollectiveEngine,
        mailbox: Mailbox,
        timeout: timedelta,
        *,
        recorder: FlightRecorder,
        arrivals: monitored.Arrivals,
        selection: Selection,
        gpu: GpuCalls,
        run: str = "",
    ) -> None:
        super().__init__(rank, world)  # type: ignore[call-arg]  # the stub lacks this overload
        self._process = _native.ProcessMark()
        """Refuses calls in a forked child, where the threads are missing and locks may be held."""
        self._rank = rank
        self._world = world
        self.engine = engine
        self._timeout = timeout
        self._arrivals = arrivals
        self._name = ""
        self._description = ""
        self._coalesced: list[SealedWork] | None = None
        self._prepared = {}
        self._register_torch_backend()
        self.selection = selection
        """Chooses each collective's algorithm. If replaced, then on all ranks before the same
        call."""
        self.recorder = recorder
        """Records the last calls: see recorder.collective(number) and recorder.account()."""
        self.run = run
        """Identifies the processes that formed this group. If it is the default group, the groups
        that torch makes within it must consist of the same processes."""

        # A failure of the collectives ends the messages, and the other way round. Neither refers
        # to the group itself, so that it is freed with the script's last reference to it.
        def end_collectives(error: GroupError) -> GroupError:
            settled = engine.settle(error)
            engine.fail(failure_of(settled))
            return settled

        def end_messages(error: GroupError) -> GroupError:
            settled = engine.settle(error)
            messages.fail_elsewhere(settled)
            return settled

        self._deferred = DeferredError()
        messages = Messages(
            mailbox,
            f"rank {rank}",
            recorder,
            on_failure=end_collectives,
            gpu=gpu,
            deferred=self._deferred,
        )
        self.messages = messages
        self.dispatcher = Dispatcher(
            engine, f"rank {rank}", recorder, on_failure=end_messages, deferred=self._deferred
        )
        self._gpu = gpu
        self._parts = Parts(
            self._process, self.dispatcher, messages, arrivals, gpu, engine, self._deferred
        )
        close_when_dropped(self, self._parts)

    _register_operators = staticmethod(operators.register)
    """Called before a call goes through torch's dispatcher (entry.py)."""

    # ---- name, rank and properties

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return "sealring"

    def name(self) -> str:
        return "sealring"

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._world

    def _set_group_name(self, name: str) -> None:
        self._name = name
        # C++ keeps the name in the registered Backend, if there is one.
        super()._set_group_name(name)  # type: ignore[arg-type]

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    def _set_group_desc(self, description: str) -> None:
        self._description = description
        super()._set_group_desc(description)

    @property
    def group_desc(self) -> str:
        return self._description

    @property
    def _device_types(self) -> list[torch.device]:
        # torch's own property lists registered Backend objects; before 2.14 there are none.
        return [torch.device(kind) for kind in ServedDevices()]

    @property
    def topology(self) -> Topology:
        """Which ranks share a host, by the host names that the ranks gave."""
        return self.engine.topology

    @property
    def threads(self) -> int:
        """How many threads of each rank share a large collective, as the ranks have agreed."""
        return self.engine.threads

    def account(self) -> Account:
        """What this rank has sealed, opened and waited for so far.

        Bytes and memory include messages; everything else counts only collectives.
        """
        account, messages = self.engine.account(), self.messages.account()
        account["sealed_bytes"] += messages["sealed_bytes"]
        account["opened_bytes"] += messages["opened_bytes"]
        account["memory_bytes"] += messages["memory_bytes"]
        return account

    # ---- init_process_group(device_id=...): torch asks for the backend of that GPU, and if that
    # ---- supports splitting, lets it connect at once

    @property
    def supports_splitting(self) -> bool:
        return True

    def eager_connect_single_device(self, device: torch.device | None = None) -> None:
        self._require_process()
        if device is None or not self._gpu.serves(device):
            return
        try:
            self._gpu.attach(device)
        except Unsupported as problem:
            # The other ranks have made the group already: they get the error in their next call.
            self._end_with(Failure(FailureCode.CLOSED, str(problem), self._rank))
            raise

    # ---- coalescing: the returned work is done when all calls between start and end are done

    @property
    def supports_coalescing(self) -> bool:
        return True

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        self._require_process()
        self._coalesced = []

    def _end_coalescing(self, device: torch.device | None = None) -> dist.Work:
        works, self._coalesced = self._coalesced or [], None
        return SealedWork.of_all(works, give_up=self.engine.interrupt)

    # ---- a barrier that names the ranks that did not arrive

    @entry(None, bool, 2, hooks=False)
    def monitored_barrier(
        self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        self._require_process()
        if not isinstance(timeout, timedelta):
            timeout = self._timeout if timeout is None else timedelta(seconds=timeout)
        options = dist.BarrierOptions()
        options.timeout = timeout
        monitored.pass_barrier(
            self._arrivals,
            self._rank,
            timeout.total_seconds(),
            wait_all_ranks=wait_all_ranks,
            meet=lambda: self._meet(options).wait(),
            give_up=self.abort,
        )

    # ---- the end

    def shutdown(self) -> None:
        """Finishes all calls, sends a goodbye to the peers and wipes the keys.

        Then raises the deferred error, if there is one.
        """
        if not self._process.here:
            return  # the parent's group goes on; torch may forget it here
        self._parts.close()
        if (error := self._deferred.take()) is not None:
            raise error

    def abort(self) -> None:
        """Ends at once: calls under way fail with GroupClosed, here and on every peer."""
        if not self._process.here:
            return
        self._deferred.clear()
        self._parts.close(abort=True)

    def deferred_error(self) -> BaseException | None:
        """The error of a failed call for which only a stream waited. It is not raised again."""
        return self._deferred.take()

    def expel(self, member: int, why: str) -> None:
        """Ends the group on every rank, because a member may no longer be in it.

        `member` is its rank in the group, or -1. The error's text is the member's name followed by
        `why`, which is for instance "was taken out".
        """
        text = f"{self.engine.name_of(member)} {why}" if member >= 0 else why
        self._end_with(Failure(FailureCode.NO_LONGER_ADMITTED, text, member))

    def _end_with(self, failure: Failure) -> None:
        if not self._process.here:
            return
        self.messages.fail(self.engine.error_of(failure))
        self.engine.fail(failure)

    def leave(self) -> None:
        """Called at the process's exit. Does nothing in a forked child, which is not a member."""
        if self._process.here:
            self._parts.leave()

    # ---- making and queueing calls

    def _require_process(self) -> None:
        self._process.require("this process group")

    def _choose(self, operation: Operation, nbytes: int, device: torch.device) -> Algorithm:
        self._require_process()
        if device.type != "cuda":
            return self.selection(operation, nbytes)
        timeout_s = self._timeout.total_seconds()
        return self._gpu.choose(
            self.selection, operation, nbytes, device, self._introduce, timeout_s
        )

    def require_agreement(self, objection: str) -> None:
        """Called on every rank; raises Unsupported on all ranks if one has an objection."""
        self._introduce(self.engine.require_agreement(objection))

    def _introduce(self, exchanges: Iterable[Collective]) -> None:
        work = SealedWork([], give_up=self.engine.interrupt)
        timeout = self._timeout.total_seconds()
        job = Job("sealring::introduction", exchanges, timeout, work)
        self.dispatcher.submit(job, wait=True)
        work.wait()

    def use_gpu_calls(self, gpu: GpuCalls) -> None:
        """Replaces the object that says which calls use a GPU, and prepares them."""
        self._gpu = self.messages.gpu = gpu

    def _message_timeout(self) -> float:
        return self._timeout.total_seconds()

    def _called(self, work: MessageWork) -> dist.Work:
        work.keep_group(self)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _submit(
        self,
        name: str,
        collectives: Collective | Iterable[Collective],
        opts: Any,
        *,
        result: Result,
        keep: tuple[torch.Tensor, ...],
        on_success: Callable[[], None] | None = None,
        called: Operation | None = None,
    ) -> dist.Work:
        self._require_process()
        if (error := self._deferred.take()) is not None:
            raise error
        # Everything that may be refused comes before the work: a work that is not run never ends.
        device = arguments.device_of(keep, name)
        prepared = stream = event = None
        if self._gpu.serves(device) and isinstance(collectives, Collective):
            used = (*keep, *tensors_of(result))
            limit = self._timeout.total_seconds()
            prepared = self._gpu.prepare(
                collectives, device, on_success, used, self._introduce, limit
            )
            collectives, stream, event = prepared.collective, prepared.stream, prepared.event
            on_success = prepared.copy_back
        if stream is not None and (failure := self.dispatcher.failure) is not None:
            raise failure  # wait() on the call's work would not raise it
        work = SealedWork(result, self.engine.interrupt, self._deferred)
        if self._coalesced is not None:
            self._coalesced.append(work)
        timeout = arguments.timeout_seconds(opts, self._timeout)
        # A caller that did not set async_op calls wait() next, so the call may run on its thread.
        waits = not getattr(opts, "asyncOp", True)
        if isinstance(collectives, Collective):
            called = collectives.operation
            if self.engine.lacks_lanes(collectives):
                collectives = self.engine.with_lanes(collectives, timeout)
        job = Job(
            name,
            collectives,
            timeout,
            work,
            kept=(*keep, *storages(keep), event),
            on_success=on_success,
            called=called,
            stream=stream,
        )
        if prepared is not None and stream is None:
            driver_calls.track(work.when_done, lambda: self.dispatcher.submit(job, wait=waits))
            return work
        self.dispatcher.submit(job, wait=waits)
        if stream is not None and not work.completes_on_stream:
            driver_calls.track(work.when_done)
        return work


for _called_by_torch in (SealedProcessGroup, SealedWork, MessageWork):
    not_traced(_called_by_torch)
