"""How a call of a group's method reaches a collective: directly, or through torch's dispatcher.

Torch's own process groups turn each call into an operator: ProcessGroup.allreduce calls
torch.ops.c10d.allreduce_, and the dispatcher calls the backend. On the way, dispatch modes
(CommDebugMode, FakeTensorMode), functorch and the profiler see the operator, and tensor subclasses
(DTensor, TwoTensor) are unwrapped. This detour takes as long as a small collective.

So a method made by `entry` takes the detour only if it is needed: a mode watches, torch has hooks
to call (backend_api.py), a tensor is of a subclass, or the arguments are not in the form that
torch's own functions use. Then the method of torch's base class parses the arguments and calls the
operator. The operator's kernel for our groups (operators.py) calls the collective with the
arguments in that form.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import CodeType, NoneType
from typing import Any, Final

import torch
import torch.autograd.profiler as profiler
import torch.distributed as dist
from torch._C import _len_torch_dispatch_stack
from torch._C._distributed_c10d import _allow_inflight_collective_as_graph_input
from torch._C._functorch import peek_interpreter_stack

from sealring.core.group.memory import NoMemory
from sealring.core.group.work import SealedWork

_OLD_NAMES: Final = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}

SINGLE: Final = {
    new: new if hasattr(dist.ProcessGroup, new) else old for new, old in _OLD_NAMES.items()
}
"""Maps the new name of a method to the name that the installed torch looks for.

Torch renamed five methods between 2.11 and 2.15 and kept the old names for callers. A subclass must
define only one of the two. If it defines both, torch's base class calls one from the other for
ever.
"""


Direct = Callable[..., Any]
"""A collective's function: takes the group, the tensors and one options object; returns a work."""

_PLAIN: Final = frozenset((torch.Tensor, torch.nn.Parameter, int, timedelta, NoneType))


def observed() -> bool:
    """Whether something watches this thread's calls through torch's dispatcher."""
    return (
        _len_torch_dispatch_stack() > 0
        or profiler._is_profiler_enabled
        or peek_interpreter_stack() is not None
        or _allow_inflight_collective_as_graph_input()
    )


@dataclass(slots=True)
class DispatchedCall:
    """A call on its way through the dispatcher. The operators' kernels add their works to it."""

    arguments: tuple[Any, ...]
    works: list[tuple[dist.Work | None, SealedWork]] = field(default_factory=list)
    """For each collective: what its kernel returned to the dispatcher, and the collective's own
    work. The first is None if torch's own kernel called the collective (backend_api.py)."""

    def own_work(self, returned: Any) -> Any:
        """Returns the collective's own work, unless a mode or a subclass returned another object.

        A subclass that wraps several tensors makes several collectives and returns one work. This
        returns a work that is done when all of them are.
        """
        if all(given is not returned and given is not None for given, _ in self.works):
            return returned
        own = [each for _, each in self.works]
        return own[0] if len(own) == 1 else SealedWork.of_all(own, own[0].give_up)


class _Calls(threading.local):
    def __init__(self) -> None:
        self.under_way: list[DispatchedCall] = []


_calls: Final = _Calls()


def current_call() -> DispatchedCall | None:
    """The innermost call of this thread that is on its way through the dispatcher."""
    return _calls.under_way[-1] if _calls.under_way else None


@contextmanager
def dispatched(call: DispatchedCall) -> Iterator[DispatchedCall]:
    """Makes `call` the current call of this thread."""
    _calls.under_way.append(call)
    try:
        yield call
    finally:
        _calls.under_way.pop()


def entry(
    first: type | None, last: type, count: int, *, hooks: bool = True
) -> Callable[[Direct], Direct]:
    """Makes a method of ProcessGroup from a collective's function.

    Torch's own functions call the method with `count` arguments, the first of type `first` and the
    last of type `last`. `hooks` says whether torch calls its hooks around the method.
    """

    def make(direct: Direct) -> Direct:
        return _method(direct.__name__, direct, first, last, count, hooks)

    return make


def define_single(
    owner: type, name: str, direct: Direct, first: type, last: type, count: int
) -> None:
    """Adds a method that torch has renamed, under the name that the installed torch looks for."""
    setattr(owner, SINGLE[name], _method(SINGLE[name], direct, first, last, count))


def _method(
    name: str, direct: Direct, first: type | None, last: type, count: int, hooks: bool = True
) -> Direct:
    base = getattr(dist.ProcessGroup, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs and kwargs.keys() == {"opts"}:  # dist.barrier calls it like this
            args, kwargs = (*args, kwargs["opts"]), {}
        plain = (
            len(args) == count
            and not kwargs
            and type(args[-1]) is last
            and (first is None or type(args[0]) is first)
            and not observed()
            and _are_plain(args[:-1])
        )
        hooked = hooks and self.has_torch_hooks()
        # Without a tensor torch has no kernel to choose; only barrier brings its own tensor.
        if plain and not (hooked and (count == 1 or _has_tensor(args))):
            try:
                return direct(self, *args)
            except NoMemory:
                plain = False  # torch may be able to unwrap the tensor
        if not plain:
            self._register_operators()
        call = DispatchedCall((*args, *kwargs.values()))
        with dispatched(call):
            return call.own_work(base(self, *args, **kwargs))

    # pybind11 looks at the name of the calling frame: with the method's own name it calls the base
    # class, otherwise this override again, for ever.
    code: CodeType = method.__code__
    method.__code__ = code.replace(co_name=name, co_qualname=direct.__qualname__)
    method.__name__ = name
    method.__qualname__ = direct.__qualname__
    method.__doc__ = direct.__doc__
    method.direct = direct  # type: ignore[attr-defined]
    return method


def _has_tensor(values: Sequence[Any]) -> bool:
    return any(
        _has_tensor(value) if isinstance(value, list) else isinstance(value, torch.Tensor)
        for value in values
    )


def _are_plain(values: Sequence[Any]) -> bool:
    # Every call runs this, so only lists within lists cost a recursive call.
    for value in values:
        kind = type(value)
        if kind in _PLAIN:
            continue
        if kind is not list:
            return False
        for each in value:
            if type(each) not in _PLAIN and not _are_plain((each,)):
                return False
    return True
