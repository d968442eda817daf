"""Tensors of every kind: the result is Gloo's or a named error, and no rank ends."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from sealring.core.group import memory
from sealring.errors import Unsupported
from tests.core.group.beside_gloo import both, outcome
from tests.workers import Workers

Make = Callable[[], torch.Tensor]


class Sub(torch.Tensor):
    """A subclass that lies about its memory."""

    def data_ptr(self) -> int:
        return 8


def resized(nbytes: int) -> torch.Tensor:
    tensor = torch.ones(8)
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def mapped(mode: str, *, cut: bool = False) -> torch.Tensor:
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(2 * mmap.PAGESIZE))
        file.flush()
        array: Any = np.memmap(file.name, dtype=np.float32, mode=mode, shape=(1000,))  # type: ignore[call-overload]
        if cut:
            os.truncate(file.name, 0)
        return torch.from_numpy(array)


def left_over(transform: Callable[..., Any], *shape: int) -> torch.Tensor:
    """A functorch wrapper that has outlived its transform."""
    seen: list[torch.Tensor] = []

    def function(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return tensor.sum()

    transform(function)(torch.ones(shape))
    return seen[0]


def quantised() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8)


def ragged(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(4)


def inferred() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(4, 2).t()[:, ::2]


WITH_GLOO: Final[dict[str, Make]] = {
    "plain": lambda: torch.ones(4),
    "no elements": lambda: torch.ones(0),
    "no dimensions": lambda: torch.ones(()),
    "requires grad": lambda: torch.ones(4, requires_grad=True),
    "inside a graph": lambda: torch.ones(4, requires_grad=True) * 2,
    "parameter": lambda: torch.nn.Parameter(torch.ones(4)),
    "inference": lambda: torch.inference_mode()(torch.ones)(4),
    "shared": lambda: torch.ones(4).share_memory_(),
    "numpy": lambda: torch.from_numpy(np.ones(4)),
    "buffer": lambda: torch.frombuffer(bytearray(16), dtype=torch.float32),
    "writable file": lambda: mapped("r+"),
    "fake": fake,
    "sparse CSR": lambda: torch.eye(4).to_sparse_csr(),
    "mkldnn": lambda: torch.ones(4).to_mkldnn(),
    "quantised": quantised,
    "nested": lambda: ragged(torch.strided),
    "jagged": lambda: ragged(torch.jagged),
    "functional": lambda: torch._to_functional_tensor(torch.ones(4)),
    "left over from grad": lambda: left_over(torch.func.grad, 4),
    "left over from vmap": lambda: left_over(torch.func.vmap, 4, 4),
}
"""Tensors that Gloo accepts, or refuses without harm."""

WITHOUT_GLOO: Final[dict[str, tuple[Make, str]]] = {
    "meta": (lambda: torch.ones(4, device="meta"), "the tensor is on meta"),
    "no storage": (lambda: resized(0), "its storage has 0"),
    "short storage": (lambda: resized(4), "its storage has 4"),
    "expanded": (lambda: torch.ones(1).expand(4), "single memory location"),
    "expanded rows": (lambda: torch.ones(1, 4).expand(4, 4), "single memory location"),
    "overlapping": (lambda: torch.ones(10).as_strided((4, 4), (2, 1)), "single memory location"),
    "zeros without memory": (lambda: torch._efficientzerotensor(4), "single memory location"),
    "read-only file": (lambda: mapped("r"), "cannot be written"),
    "cut file": (lambda: mapped("r+", cut=True), "(Bad address)"),
}
"""Gloo crashes, corrupts memory, waits for ever or does nothing; all_reduce says what is wrong."""

OURS_ALONE: Final[dict[str, Make]] = {
    "not contiguous": lambda: torch.ones(4, 4).t()[::2],
    "inference, not contiguous": inferred,
    "negated": lambda: torch.ones(1, dtype=torch.complex64).conj().imag,
    "subclass": lambda: torch.ones(4).as_subclass(Sub),
}
"""Tensors that sealring accepts, and that Gloo refuses or writes to other memory."""

DTYPES: Final = sorted(
    {each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str
)


GLOO_CRASHES: Final = torch.__version__.startswith("2.11.")
"""Whether Gloo crashes in an all_gather of such a tensor (torch 2.11): then only ours is tested."""


def operations(make: Make, world: int) -> dict[str, Callable[[Any], Any]]:
    """Calls that every rank makes with tensors of the same kind, so all ranks refuse or none."""

    def all_reduce(group: Any) -> Any:
        dist.all_reduce(tensor := make(), group=group)
        return shown(tensor)

    def broadcast(group: Any) -> Any:
        dist.broadcast(tensor := make(), 0, group=group)
        return shown(tensor)

    def all_gather(group: Any) -> Any:
        dist.all_gather(outputs := [make() for _ in range(world)], make(), group=group)
        return [shown(each) for each in outputs]

    def reduce_scatter(group: Any) -> Any:
        dist.reduce_scatter(output := make(), [make() for _ in range(world)], group=group)
        return shown(output)

    def all_to_all(group: Any) -> Any:
        outputs = [make() for _ in range(world)]
        dist.all_to_all(outputs, [make() for _ in range(world)], group=group)
        return [shown(each) for each in outputs]

    return {name: call for name, call in locals().items() if callable(call) and name != "make"}


def shown(tensor: Any) -> Any:
    if isinstance(tensor, torch._subclasses.FakeTensor):
        return "fake", list(tensor.shape)
    if torch._is_functional_tensor(tensor):
        tensor = torch._from_functional_tensor(tensor)
    return tensor.detach().resolve_neg().tolist(), tensor.requires_grad, tensor.grad_fn is None


def compared(rank: int, world: int) -> list[tuple[str, str, Any, Any]]:
    differ = []
    with both(world) as groups:
        for kind, make in WITH_GLOO.items():
            for name, call in operations(make, world).items():
                ours = outcome(call, groups["sealring"])
                gloos = ("crash", "") if GLOO_CRASHES else outcome(call, groups["gloo"])
                same = ours == gloos or ours[0] == "Unsupported"
                same = same or gloos[0] == "crash"
                if gloos[0] != "value":  # it may be served nevertheless, or be the same error
                    same = same or ours[0] in ("value", gloos[0])
                if not same:
                    differ.append((kind, name, ours, gloos))
            dist.barrier(group=groups["sealring"])
    return differ


@pytest.mark.timeout(300)
def test_every_kind_ends_as_with_gloo_or_by_name(workers: Workers) -> None:
    assert workers.run(compared, world=2) == [[], []]


def refused(rank: int, world: int) -> dict[str, list[tuple[str, str]]]:
    group: Any = dist.group.WORLD
    found: dict[str, list[tuple[str, str]]] = {}
    for kind, (make, _) in WITHOUT_GLOO.items():
        outcomes = [outcome(call, group) for call in operations(make, world).values()]
        found[kind] = [(name, text) for name, text in outcomes if name != "value"]
        with pytest.raises(Unsupported):
            dist.recv(make(), 1 - rank)
        dist.barrier()
    return found


def test_what_cannot_hold_a_result_is_refused_and_all_ranks_live_on(workers: Workers) -> None:
    for outcomes in workers.run(refused, world=2):
        for kind, (_, text) in WITHOUT_GLOO.items():
            assert len(outcomes[kind]) == 5, kind
            assert {name for name, _ in outcomes[kind]} == {"Unsupported"}, kind
            assert text in outcomes[kind][0][1], outcomes[kind]


def served(rank: int, world: int) -> None:
    for kind, make in OURS_ALONE.items():
        tensor = make()
        wanted = tensor.clone().as_subclass(torch.Tensor) * world
        dist.all_reduce(tensor)
        assert torch.equal(tensor.as_subclass(torch.Tensor), wanted), kind
    conjugated = torch.full((4,), 1 + 1j).conj()
    dist.reduce_scatter(conjugated, [conjugated.clone().conj() for _ in range(world)])
    assert torch.equal(conjugated.resolve_conj(), torch.full((4,), (1 + 1j) * world))
    for dtype in DTYPES:
        if dtype.is_floating_point or dtype.is_complex or not str(dtype).startswith("torch.q"):
            tensor = torch.full((3,), rank, dtype=torch.uint8).view(-1, 1)
            sent = torch.empty(3, dtype=dtype)
            raw = sent.view(torch.uint8).fill_(rank + 1) if dtype.itemsize else tensor
            outputs = [torch.empty(3, dtype=dtype) for _ in range(world)]
            dist.all_gather(outputs, sent)
            for peer, got in enumerate(outputs):
                assert torch.equal(got.view(torch.uint8), torch.full_like(raw, peer + 1)), dtype


def test_kinds_and_dtypes_that_gloo_does_not_serve(workers: Workers) -> None:
    workers.run(served, world=2)


def moved_meanwhile(rank: int, world: int) -> None:
    """A tensor gets other memory while its call is under way, as `.data = ` does."""
    tensors = [torch.full((100_000,), rank + 1.0) for _ in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for tensor in tensors:
        tensor.data = torch.zeros(1)
    noise = [torch.full((100_000,), 7.0) for _ in range(20)]
    for work in works:
        assert work is not None
        work.wait()
    assert all(bool((each == 7).all()) for each in noise), "the old memory was used again"


def test_memory_is_kept_until_its_call_is_done(workers: Workers) -> None:
    workers.run(moved_meanwhile, world=2)


def test_the_list_of_mappings_says_what_may_be_written() -> None:
    with mmap.mmap(-1, mmap.PAGESIZE) as own:
        address = np.frombuffer(own, dtype=np.uint8).ctypes.data
        assert memory.is_mapped(address, address + mmap.PAGESIZE, "w")
        assert not memory.is_mapped(0, mmap.PAGESIZE, "r")


def lines_with(word: str) -> Iterator[str]:
    for path in (Path(__file__).parents[3] / "src/sealring/core/group").rglob("*.py"):
        for line in path.read_text().splitlines():
            if word in line:
                yield f"{path.name}: {line.strip()}"


def test_one_function_asks_for_a_tensors_address() -> None:
    assert list(lines_with("data_ptr")) == ["memory.py: address = tensor.data_ptr()"]
