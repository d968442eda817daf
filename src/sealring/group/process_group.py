"""The face to torch: a ProcessGroup whose collectives run on the sealed engine.

A subclass of ProcessGroup and not of Backend: that is the one route that torch 2.11 to 2.15 share,
and the one that TORCH_DISTRIBUTED_DEBUG=DETAIL does not wrap in a plaintext Gloo group.

torch's C++ calls these methods with the tensors and one options object; the stubs also list the
convenience forms that only exist for callers in Python, hence the ignored overrides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from sealring.engine.cpu import Collective, CpuEngine
from sealring.errors import Unsupported
from sealring.group import arguments, monitored, sparse
from sealring.group.arguments import contiguous, one, slot
from sealring.group.dispatch import Dispatcher, Job
from sealring.group.work import SealedWork
from sealring.schedule import Algorithm, Operation, choose, chunks

if TYPE_CHECKING:
    from sealring._native import Account


class SealedProcessGroup(dist.ProcessGroup):
    def __init__(
        self,
        rank: int,
        world: int,
        engine: CpuEngine,
        timeout: timedelta,
        *,
        arrivals: monitored.Arrivals,
        algorithm: Algorithm | None = None,
    ) -> None:
        super().__init__(rank, world)  # type: ignore[call-arg]  # the stub lacks this overload
        self._rank = rank
        self._world = world
        self._engine = engine
        self._timeout = timeout
        self._algorithm = algorithm
        self._arrivals = arrivals
        self._name = ""
        self._description = ""
        self._dispatcher = Dispatcher(engine, f"rank {rank}")

    # ---- who we are

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

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def group_desc(self) -> str:
        return self._description

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def account(self) -> Account:
        """What was sealed, opened and waited for so far."""
        return self._engine.account()

    # ---- collectives

    def allreduce(  # type: ignore[override]
        self, tensors: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        tensor = one(tensors, "all_reduce")
        if tensor.layout is not torch.strided:
            return self._sparse_all_reduce(tensor, opts, result=tensors)
        return self._all_reduce(tensor, opts, result=tensors)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        if not tensors:
            raise Unsupported("all_reduce_coalesced needs at least one tensor")
        # Collectives of one group finish in order, so the last one's work speaks for all.
        return [self._all_reduce(tensor, opts, result=tensors) for tensor in tensors][-1]

    def _all_reduce(
        self, tensor: torch.Tensor, opts: Any, *, result: list[torch.Tensor]
    ) -> dist.Work:
        arguments.check_tensor(tensor, "all_reduce")
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        dtype, kind, factor = arguments.reduction(op, tensor, "all_reduce")
        memory = contiguous(tensor)
        address, total = slot(memory)
        algorithm = self._choose(Operation.ALL_REDUCE, total)
        if algorithm is Algorithm.RING:
            cuts = chunks(memory.numel(), self._world, memory.element_size())
            slots = [(address + offset, length) for offset, length in cuts]
        else:
            slots = [(address, total)]
        return self._submit(
            "sealring::all_reduce",
            Collective(Operation.ALL_REDUCE, algorithm, slots, total, dtype, kind, factor),
            opts,
            result=result,
            keep=(memory,),
            on_success=_copy_back(tensor, memory),
        )

    def _sparse_all_reduce(
        self, tensor: torch.Tensor, opts: Any, *, result: list[torch.Tensor]
    ) -> dist.Work:
        sparse.check(tensor, opts.reduceOp if opts is not None else dist.ReduceOp.SUM)
        return self._submit(
            "sealring::all_reduce",
            sparse.all_reduce(tensor, self._world, self._gathered),
            opts,
            result=result,
            keep=(tensor,),
        )

    def reduce_scatter(  # type: ignore[override]
        self,
        output_tensors: list[torch.Tensor],
        input_tensors: list[list[torch.Tensor]],
        opts: Any = None,
    ) -> dist.Work:
        output = one(output_tensors, "reduce_scatter")
        if len(input_tensors) != 1 or len(input_tensors[0]) != self._world:
            raise Unsupported(f"reduce_scatter needs {self._world} input tensors, one per rank")
        return self._reduce_scatter(output, [contiguous(t) for t in input_tensors[0]], opts)

    def _reduce_scatter_base(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        if input.numel() != output.numel() * self._world:
            raise Unsupported(
                f"reduce_scatter: the input has {input.numel()} elements; {self._world} ranks with "
                f"an output of {output.numel()} need {output.numel() * self._world}"
            )
        parts = list(contiguous(input).view(-1).chunk(self._world)) if input.numel() else []
        return self._reduce_scatter(output, parts or [input.view(-1)] * self._world, opts)

    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]

    def _reduce_scatter(
        self, output: torch.Tensor, inputs: list[torch.Tensor], opts: Any
    ) -> dist.Work:
        for tensor in (output, *inputs):
            arguments.check_tensor(tensor, "reduce_scatter")
            _same_shape(tensor, output, "reduce_scatter")
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        dtype, kind, factor = arguments.reduction(op, output, "reduce_scatter")
        memory = contiguous(output)
        _, size = slot(memory)
        algorithm = self._choose(Operation.REDUCE_SCATTER, size)
        slots = [slot(tensor) for tensor in (*inputs, memory)]
        return self._submit(
            "sealring::reduce_scatter",
            Collective(
                Operation.REDUCE_SCATTER, algorithm, slots, size * self._world, dtype, kind, factor
            ),
            opts,
            result=[output],
            keep=(*inputs, memory),
            on_success=_copy_back(output, memory),
        )

    def allgather(  # type: ignore[override]
        self,
        output_tensors: list[list[torch.Tensor]],
        input_tensors: list[torch.Tensor],
        opts: Any = None,
    ) -> dist.Work:
        source = one(input_tensors, "all_gather")
        if len(output_tensors) != 1 or len(output_tensors[0]) != self._world:
            raise Unsupported(f"all_gather needs {self._world} output tensors, one per rank")
        return self._all_gather(output_tensors[0], source, opts, result=output_tensors[0])

    def _allgather_base(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        if output.numel() != input.numel() * self._world:
            raise Unsupported(
                f"all_gather: the output has {output.numel()} elements; {self._world} ranks with "
                f"an input of {input.numel()} need {input.numel() * self._world}"
            )
        memory = contiguous(output)
        flat = memory.view(-1)
        parts = list(flat.chunk(self._world)) if flat.numel() else [flat] * self._world
        return self._all_gather(
            parts, input, opts, result=[output], on_success=_copy_back(output, memory)
        )

    all_gather_single = _allgather_base

    def _all_gather(
        self,
        outputs: list[torch.Tensor],
        source: torch.Tensor,
        opts: Any,
        *,
        result: list[torch.Tensor],
        on_success: Callable[[], None] | None = None,
    ) -> dist.Work:
        for tensor in (source, *outputs):
            arguments.check_tensor(tensor, "all_gather")
            _same_shape(tensor, source, "all_gather")
        memory = [contiguous(tensor) for tensor in outputs]
        own = contiguous(source)
        # A rank may gather in place: its input already is its part of the output.
        copies = [copy for t, m in zip(outputs, memory, strict=True) if (copy := _copy_back(t, m))]
        if on_success is not None:
            copies.append(on_success)
        return self._submit(
            "sealring::all_gather",
            self._gathered(memory, own),
            opts,
            result=result,
            keep=(own, *memory),
            on_success=_all_of(copies),
        )

    def _gathered(self, memory: list[torch.Tensor], own: torch.Tensor) -> Collective:
        _, size = slot(own)
        return Collective(
            Operation.ALL_GATHER,
            self._choose(Operation.ALL_GATHER, size),
            [*(slot(tensor) for tensor in memory), slot(own)],
            size * self._world,
            arguments.moved_dtype(own),
        )

    def broadcast(  # type: ignore[override]
        self, tensors: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        tensor = one(tensors, "broadcast")
        arguments.check_tensor(tensor, "broadcast")
        memory = contiguous(tensor)
        _, size = slot(memory)
        return self._submit(
            "sealring::broadcast",
            Collective(
                Operation.BROADCAST,
                self._choose(Operation.BROADCAST, size),
                [slot(memory)],
                size,
                arguments.moved_dtype(tensor),
                root=opts.rootRank if opts is not None else 0,
            ),
            opts,
            result=tensors,
            keep=(memory,),
            on_success=_copy_back(tensor, memory),
        )

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._barrier("sealring::barrier", opts)

    def monitored_barrier(
        self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        if not isinstance(timeout, timedelta):
            timeout = self._timeout if timeout is None else timedelta(seconds=timeout)
        options = dist.BarrierOptions()
        options.timeout = timeout
        monitored.pass_barrier(
            self._arrivals,
            self._rank,
            timeout.total_seconds(),
            wait_all_ranks=wait_all_ranks,
            meet=lambda: self._barrier("sealring::monitored_barrier", options).wait(),
            give_up=self.abort,
        )

    def _barrier(self, name: str, opts: Any) -> dist.Work:
        nothing = torch.empty(0, dtype=torch.uint8)
        return self._submit(
            name,
            Collective(
                Operation.BARRIER,
                self._choose(Operation.BARRIER, 0),
                [slot(nothing)],
                0,
                arguments.moved_dtype(nothing),
            ),
            opts,
            result=[],
            keep=(nothing,),
        )

    # ---- what is not served yet says so, instead of torch's word about a missing backend

    def _unserved(self, *_: Any, **__: Any) -> dist.Work:
        raise Unsupported(
            "sealring serves all_reduce, reduce_scatter, all_gather, broadcast and barrier; this "
            "operation is not among them yet"
        )

    alltoall = alltoall_base = all_to_all_single = _unserved
    gather = scatter = reduce = _unserved
    send = recv = recv_anysource = _unserved
    allgather_coalesced = allgather_into_tensor_coalesced = all_gather_single_coalesced = _unserved
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced = _unserved

    # ---- the end

    def shutdown(self) -> None:
        """Runs what was called, says goodbye to the peers and wipes the keys."""
        self._dispatcher.close()

    def abort(self) -> None:
        """Ends at once; what is under way fails with GroupClosed here and on every peer."""
        self._dispatcher.close(abort=True)

    def leave(self) -> None:
        """At the process's exit: nobody waits any more for what is still in the queue."""
        self._dispatcher.close(abort=not self._dispatcher.idle)

    # ---- in and out of the queue

    def _choose(self, operation: Operation, nbytes: int) -> Algorithm:
        return choose(operation, self._world, nbytes, self._algorithm)

    def _submit(
        self,
        name: str,
        collectives: Collective | Iterator[Collective],
        opts: Any,
        *,
        result: list[torch.Tensor],
        keep: tuple[torch.Tensor, ...],
        on_success: Callable[[], None] | None = None,
    ) -> dist.Work:
        work = SealedWork(result, give_up=self._engine.interrupt)
        timeout = arguments.timeout_seconds(opts, self._timeout)
        # A caller that did not ask for async_op calls wait() next, whatever we do.
        waits = not getattr(opts, "asyncOp", True)
        if isinstance(collectives, Collective):
            collectives = iter((collectives,))
        self._dispatcher.submit(Job(name, collectives, timeout, work, keep, on_success), wait=waits)
        return work


def _copy_back(tensor: torch.Tensor, memory: torch.Tensor) -> Callable[[], None] | None:
    """How the result gets from `memory` to the user's tensor, where they are not the same."""
    if memory.data_ptr() == tensor.data_ptr():
        return None

    def copy() -> None:
        with torch.no_grad():
            tensor.copy_(memory)

    return copy


def _all_of(callbacks: list[Callable[[], None]]) -> Callable[[], None] | None:
    if not callbacks:
        return None

    def call() -> None:
        for callback in callbacks:
            callback()

    return call


def _same_shape(tensor: torch.Tensor, like: torch.Tensor, operation: str) -> None:
    if tensor.numel() != like.numel() or tensor.dtype != like.dtype:
        raise Unsupported(
            f"{operation}: all tensors must have one size and dtype; got {tensor.numel()} elements "
            f"of {tensor.dtype} beside {like.numel()} of {like.dtype}"
        )
