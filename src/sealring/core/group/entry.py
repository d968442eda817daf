"""How a call of torch's object API reaches a collective: at once, or through torch's dispatcher.

A process group of torch's own turns each call into an operator: ProcessGroup.allreduce calls
torch.ops.c10d.allreduce_, and the dispatcher calls the backend. On the way, dispatch modes see the
operator (CommDebugMode, FakeTensorMode), tensor subclasses are unwrapped (DTensor, TwoTensor),
functorch and the profiler have their turn. The detour costs as much as a small collective.

So a method made by `entry` takes the detour only where it matters: something watches, torch has
hooks to call (backend_api.py), a tensor is of a type of its own, or the arguments are not in the
form that torch's own functions use. Then the base class's method parses them, as it does for every
backend, and calls the operator. Its kernel for our groups (operators.py) calls the collective with
the arguments in that one form.
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
"""By the new name: the name that this torch looks for.

Torch renamed five methods between 2.11 and 2.15 and kept the old names for callers. A subclass
must define one of the two: where it defines both, torch's base class calls one from the other
without end.
"""


Direct = Callable[..., Any]
"""A collective: takes the group, the tensors and one options object, and returns its work."""

_PLAIN: Final = frozenset((torch.Tensor, torch.nn.Parameter, int, timedelta, NoneType))


def observed() -> bool:
    """Whether this thread's calls must be visible to torch's dispatcher."""
    return (
        _len_torch_dispatch_stack() > 0
        or profiler._is_profiler_enabled
        or peek_interpreter_stack() is not None
        or _allow_inflight_collective_as_graph_input()
    )


@dataclass(slots=True)
class DispatchedCall:
    """A call on its way through the dispatcher; the operators' kernels leave their works here."""

    arguments: tuple[Any, ...]
    works: list[tuple[dist.Work | None, SealedWork]] = field(default_factory=list)
    """What a kernel returned to the dispatcher, and the collective's own work. None where torch's
    own kernel called the collective (backend_api.py), and nothing could stand in between."""

    def own_work(self, returned: Any) -> Any:
        """The collective's own work, unless a mode or a subclass has put another in its place.

        A subclass that holds several tensors returns the work of one of them: it is done when
        all of them are.
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
    """Makes it the current call of this thread."""
    _calls.under_way.append(call)
    try:
        yield call
    finally:
        _calls.under_way.pop()


def entry(
    first: type | None, last: type, count: int, *, hooks: bool = True
) -> Callable[[Direct], Direct]:
    """Makes a method of ProcessGroup out of a collective.

    The form that torch's functions use has `count` arguments. The first is of the type `first`
    and the last of the type `last`. `hooks` says whether torch calls its hooks around it.
    """

    def make(direct: Direct) -> Direct:
        return _method(direct.__name__, direct, first, last, count, hooks)

    return make


def define_single(
    owner: type, name: str, direct: Direct, first: type, last: type, count: int
) -> None:
    """Adds a method that torch has renamed, under the name that this torch looks for."""
    setattr(owner, SINGLE[name], _method(SINGLE[name], direct, first, last, count))


def _method(
    name: str, direct: Direct, first: type | None, last: type, count: int, hooks: bool = True
) -> Direct:
    base = getattr(dist.ProcessGroup, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs and kwargs.keys() == {"opts"}:  # so it is called by dist.barrier
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
        # Without a tensor torch has no kernel to choose. Only a barrier brings its own.
        if plain and not (hooked and (count == 1 or _has_tensor(args))):
            try:
                return direct(self, *args)
            except NoMemory:
                plain = False  # torch may unwrap it
        if not plain:
            self._register_operators()
        call = DispatchedCall((*args, *kwargs.values()))
        with dispatched(call):
            return call.own_work(base(self, *args, **kwargs))

    # pybind11 knows from the name of the calling frame that the base class is meant, and not the
    # override, which would be called without end.
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
    # Every call comes here: a list of tensors is looked through by a loop, lists in it by a call.
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
