"""Every operation of the plan as a script would call it, on any group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from tests.fuzz_api.plan import Step
from tests.fuzz_api.tensors import an_object, make


@dataclass(slots=True)
class Call:
    """One call on one group, with its inputs and its outcome."""

    group: Any
    members: tuple[int, ...]
    rank: int
    """The rank in the group."""
    step: Step
    views: bool
    """Whether tensors lie in memory as the step says; otherwise they are contiguous."""
    works: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    """Everything that the call may have written or must have left unchanged."""

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def root(self) -> int:
        return self.members[self.step.root]

    @property
    def is_root(self) -> bool:
        return self.rank == self.step.root

    @property
    def op(self) -> Any:
        return getattr(dist.ReduceOp, self.step.reduction)

    def read(self, index: int = 0, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        return self._make(index, shape, written=False)

    def written(self, index: int = 0, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        return self._make(index, shape, written=True)

    def _make(self, index: int, shape: tuple[int, ...] | None, *, written: bool) -> torch.Tensor:
        tensor = make(self.step, self.rank, index, shape, views=self.views, written=written)
        self.outputs.append(tensor)
        return tensor

    def several(self, make_one: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
        return [make_one(10 + index) for index in range(self.size)]

    def begin(self) -> None:
        work = getattr(_Operations, self.step.operation)(self)
        self.works += [each for each in (work if isinstance(work, list) else [work]) if each]


class _Operations:
    """The operations by their names in the plan; each returns one work, several, or None."""

    @staticmethod
    def all_reduce(call: Call) -> Any:
        return dist.all_reduce(call.written(), call.op, call.group, async_op=True)

    @staticmethod
    def coalesced(call: Call) -> Any:
        tensors = call.several(call.written)
        return dist.all_reduce_coalesced(tensors, call.op, call.group, async_op=True)

    @staticmethod
    def reduce(call: Call) -> Any:
        tensor = call.written()
        if not call.is_root:  # its content is not specified on other ranks
            call.outputs.clear()
        return dist.reduce(tensor, call.root, call.op, call.group, async_op=True)

    @staticmethod
    def reduce_scatter(call: Call) -> Any:
        inputs = call.several(call.read)
        return dist.reduce_scatter(call.written(), inputs, call.op, call.group, async_op=True)

    @staticmethod
    def reduce_scatter_tensor(call: Call) -> Any:
        whole = call.read(1, (call.size * 3, *call.step.shape))
        part = call.written(0, (3, *call.step.shape))
        return dist.reduce_scatter_tensor(part, whole, call.op, call.group, async_op=True)

    @staticmethod
    def broadcast(call: Call) -> Any:
        return dist.broadcast(call.written(), call.root, call.group, async_op=True)

    @staticmethod
    def all_gather(call: Call) -> Any:
        outputs = call.several(call.written)
        return dist.all_gather(outputs, call.read(), call.group, async_op=True)

    @staticmethod
    def all_gather_into_tensor(call: Call) -> Any:
        whole = call.written(1, (call.size * 2, *call.step.shape))
        part = call.read(0, (2, *call.step.shape))
        return dist.all_gather_into_tensor(whole, part, call.group, async_op=True)

    @staticmethod
    def gather(call: Call) -> Any:
        outputs = call.several(call.written) if call.is_root else None
        return dist.gather(call.read(), outputs, call.root, call.group, async_op=True)

    @staticmethod
    def scatter(call: Call) -> Any:
        inputs = call.several(call.read) if call.is_root else None
        return dist.scatter(call.written(), inputs, call.root, call.group, async_op=True)

    @staticmethod
    def all_to_all(call: Call) -> Any:
        outputs, inputs = call.several(call.written), call.several(call.read)
        return dist.all_to_all(outputs, inputs, call.group, async_op=True)

    @staticmethod
    def all_to_all_single(call: Call) -> Any:
        shape = (call.size * 2, *call.step.shape)
        output, whole = call.written(0, shape), call.read(1, shape)
        return dist.all_to_all_single(output, whole, group=call.group, async_op=True)

    @staticmethod
    def unequal_all_to_all(call: Call) -> Any:
        # Rank a sends (a + b) % 3 rows to rank b.
        sent = [(call.rank + other) % 3 for other in range(call.size)]
        shape = (sum(sent), *call.step.shape)
        output, whole = call.written(0, shape), call.read(1, shape)
        return dist.all_to_all_single(output, whole, sent, sent, group=call.group, async_op=True)

    @staticmethod
    def send_recv(call: Call) -> Any:
        works = []
        for other in range(call.size):
            if other == call.rank:
                continue
            peer, tag = call.members[other], 7
            works.append(dist.isend(call.read(20 + other), peer, call.group, tag))
            works.append(dist.irecv(call.written(40 + other), peer, call.group, tag))
        return works

    @staticmethod
    def batched_messages(call: Call) -> Any:
        if call.size == 1:
            return None
        following = call.members[(call.rank + 1) % call.size]
        before = call.members[(call.rank - 1) % call.size]
        sends = dist.P2POp(dist.isend, call.read(1), following, call.group)
        receives = dist.P2POp(dist.irecv, call.written(2), before, call.group)
        return dist.batch_isend_irecv([sends, receives])

    @staticmethod
    def functional(call: Call) -> Any:
        result = functional.all_gather_tensor(call.read(0, (2, *call.step.shape)), 0, call.group)
        call.outputs.append(functional.wait_tensor(result))
        return None

    @staticmethod
    def all_gather_object(call: Call) -> Any:
        found: list[Any] = [None] * call.size
        dist.all_gather_object(found, an_object(call.step, call.rank), group=call.group)
        call.outputs.append(found)

    @staticmethod
    def broadcast_object(call: Call) -> Any:
        objects = [an_object(call.step, call.rank), call.rank]
        dist.broadcast_object_list(objects, call.root, group=call.group)
        call.outputs.append(objects)

    @staticmethod
    def gather_object(call: Call) -> Any:
        found: list[Any] | None = [None] * call.size if call.is_root else None
        dist.gather_object(an_object(call.step, call.rank), found, call.root, group=call.group)
        call.outputs.append(found)

    @staticmethod
    def scatter_object(call: Call) -> Any:
        found: list[Any] = [None]
        objects = [an_object(call.step, each) for each in range(call.size)]
        given = objects if call.is_root else None
        dist.scatter_object_list(found, given, call.root, group=call.group)
        call.outputs.append(found)

    @staticmethod
    def barrier(call: Call) -> Any:
        return dist.barrier(call.group, async_op=True)
