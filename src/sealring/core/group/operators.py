"""Kernels of torch.ops.c10d.* that serve our groups, and pass calls of other groups on to torch's.

They are registered for the dispatch key BackendSelect. It comes after everything that watches calls
or unwraps tensors, and before the backends' own kernels. No kernel of torch is replaced. The
kernels are registered only when a call needs the operators (entry.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C import DispatchKey
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    PythonCallbackWork,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from sealring.core.group.collectives.calling import Calling
from sealring.core.group.entry import SINGLE, DispatchedCall, current_call, dispatched
from sealring.core.group.memory import NoMemory
from sealring.core.group.work import SealedWork
from sealring.core.no_fork import OwnLock
from sealring.errors import Unsupported

_KEY: Final = "BackendSelect"
_BELOW: Final = torch._C._dispatch_keyset_full_after(DispatchKey.BackendSelect)

_OPERATORS: Final[dict[str, tuple[str, type | None]]] = {
    "allreduce_": ("allreduce", AllreduceOptions),
    "allreduce_coalesced_": ("allreduce_coalesced", AllreduceCoalescedOptions),
    "reduce_": ("reduce", ReduceOptions),
    "reduce_scatter_": ("reduce_scatter", ReduceScatterOptions),
    "_reduce_scatter_base_": (SINGLE["reduce_scatter_single"], ReduceScatterOptions),
    "reduce_scatter_tensor_coalesced_": (
        SINGLE["reduce_scatter_single_coalesced"],
        ReduceScatterOptions,
    ),
    "broadcast_": ("broadcast", BroadcastOptions),
    "allgather_": ("allgather", AllgatherOptions),
    "_allgather_base_": (SINGLE["all_gather_single"], AllgatherOptions),
    "allgather_coalesced_": ("allgather_coalesced", AllgatherOptions),
    "allgather_into_tensor_coalesced_": (
        SINGLE["all_gather_single_coalesced"],
        AllgatherOptions,
    ),
    "gather_": ("gather", GatherOptions),
    "scatter_": ("scatter", ScatterOptions),
    "alltoall_": ("alltoall", AllToAllOptions),
    "alltoall_base_": (SINGLE["all_to_all_single"], AllToAllOptions),
    "barrier": ("barrier", BarrierOptions),
    "send": ("send", None),
    "recv_": ("recv", None),
    "recv_any_source_": ("recv_anysource", None),
}
"""For each operator: the group's method that does it, and the type of its options."""

_IN_OPTIONS: Final = {
    "reduce_op": "reduceOp",
    "root_rank": "rootRank",
    "root_tensor": "rootTensor",
    "sparse_indices": "sparseIndices",
    "async_op": "asyncOp",
    "timeout": "timeout",
    "device_ids": "device_ids",
}
"""Maps an operator's argument to the attribute of the options object that has this value."""

_library: Any = None
_registering: Final = OwnLock()


def register() -> None:
    """Registers the kernels, once per process."""
    global _library
    if _library is not None:
        return
    with _registering:
        if _library is None:
            library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
            for operator in (*_OPERATORS, "monitored_barrier_"):
                library.impl(operator, _kernel(operator), _KEY, with_keyset=True)
            _library = library


def _kernel(operator: str) -> Callable[..., Any]:
    overload = getattr(torch.ops.c10d, operator).default
    run = _pass_monitored_barrier if operator == "monitored_barrier_" else _runner(operator)

    def kernel(keyset: Any, *args: Any) -> Any:
        group = next(_groups(args))
        # Meta tensors, and fake ones at this point, have no memory: torch has kernels for them.
        tensors = list(_tensors(args))
        if not isinstance(group, Calling) or any(tensor.is_meta for tensor in tensors):
            return overload.redispatch(keyset & _BELOW, *args)
        if operator in _OPERATORS and tensors and group.has_torch_hooks():
            return _run_with_hooks(functools.partial(overload.redispatch, keyset & _BELOW), args)
        return run(group, args)

    return kernel


def _runner(operator: str) -> Callable[[Any, tuple[Any, ...]], Any]:
    method, options_type = _OPERATORS[operator]
    schema = getattr(torch.ops.c10d, operator).default._schema
    names = [argument.name for argument in schema.arguments]
    defaults = {
        argument.name: argument.default_value
        for argument in schema.arguments
        if argument.has_default_value()
    }
    returns_tensors = len(schema.returns) == 2

    def run(group: Any, args: tuple[Any, ...]) -> Any:
        # The dispatcher leaves out arguments that have their default value.
        given = {**defaults, **dict(zip(names, args, strict=False))}
        given.pop("process_group")
        direct = functools.partial(getattr(type(group), method).direct, group)
        options = options_type() if options_type is not None else None
        positional = []
        for name, value in given.items():
            if name in _IN_OPTIONS and options is not None:
                _set(options, _IN_OPTIONS[name], value)
            elif not (operator == "barrier" and name == "tensor"):
                positional.append(_without_subclass(value))
        if options is not None:
            positional.append(options)
        try:
            work = _boxed(direct(*positional))
        except NoMemory as problem:  # nothing after this kernel could unwrap the tensor
            raise Unsupported(str(problem)) from None
        return (args[0], work) if returns_tensors else work

    return run


def _run_with_hooks(torch_kernel: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Runs torch's kernel, which calls the hooks, and the collective on the group's Backend."""
    with dispatched(DispatchedCall(args)) as call:
        try:
            returned = torch_kernel(*(_without_subclass(each) for each in args))
        except NoMemory as problem:  # nothing after this kernel could unwrap the tensor
            raise Unsupported(str(problem)) from None
    ((_, work),) = call.works
    return (args[0], _boxed(work)) if isinstance(returned, tuple) else _boxed(work)


def _pass_monitored_barrier(group: Any, args: tuple[Any, ...]) -> None:
    _tensor, _group, _device_ids, timeout, wait_all_ranks = args
    limit = timedelta(milliseconds=timeout) if timeout >= 0 else None
    type(group).monitored_barrier.direct(group, limit, wait_all_ranks)


def _set(options: Any, name: str, value: Any) -> None:
    if name == "reduceOp":
        options.reduceOp = _reduce_op(value)
    elif name == "timeout":
        options.timeout = timedelta(milliseconds=value)
    elif hasattr(options, name) and value is not None:
        setattr(options, name, value)


def _reduce_op(script_object: Any) -> Any:
    """Converts the operator's argument to Python's ReduceOp, which alone has PREMUL_SUM's
    factor."""
    kind = dist.ReduceOp.RedOpType(script_object.op())
    if kind != dist.ReduceOp.PREMUL_SUM:
        return dist.ReduceOp(kind)
    call = current_call()
    for argument in call.arguments if call is not None else ():
        op: Any = getattr(argument, "reduceOp", argument)
        if isinstance(op, dist.ReduceOp) and getattr(op, "op", None) == kind:
            return op
    raise Unsupported(
        "PREMUL_SUM: torch.ops.c10d does not tell its factor. Call torch.distributed instead."
    )


def _boxed(work: SealedWork) -> Any:
    """Wraps a work in the C++ object that the dispatcher takes, and which keeps the Python object.

    Otherwise the Python object would be freed with its last Python reference, while C++ still uses
    its C++ part.
    """
    given = PythonCallbackWork(lambda timeout: work.wait(timeout))
    call = current_call()
    if call is not None:
        call.works.append((given, work))
    return given.boxed()


def _groups(args: tuple[Any, ...]) -> Iterator[Any]:
    for argument in args:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            yield dist.ProcessGroup.unbox(argument)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def _without_subclass(value: Any) -> Any:
    """Replaces tensors of subclasses by plain tensors with the same memory.

    No method of a subclass is called for this.
    """
    if isinstance(value, (list, tuple)):
        return [_without_subclass(each) for each in value]
    if isinstance(value, torch.Tensor) and type(value) not in (torch.Tensor, torch.nn.Parameter):
        with torch._C.DisableTorchFunctionSubclass():
            return value.as_subclass(torch.Tensor)
    return value
