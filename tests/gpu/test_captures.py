"""No sealring call can be captured into a CUDA graph, in any mode, and the group goes on.

A replay repeats kernels with the arguments of the capture. A captured collective would be left out
of every replay, and a captured seal would use the same nonces again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.distributed_c10d import _coalescing_manager

from sealring.core.engine.cuda.kernels import DeviceKey, Header, RecordKernels, wire_bytes
from sealring.core.settings import with_settings
from sealring.errors import Unsupported
from sealring.lab.bench.workers import Report, run_workers
from sealring.train.offload import Parking, offload_saved_tensors
from tests.gpu.shared_gpu import each_wire, enter, environment_of
from tests.gpu.test_streams import TIMEOUT

MODES = ("global", "thread_local", "relaxed")
REFUSAL = "cannot be part of a CUDA graph"
RECORD_BYTES = 4096


def in_group(body: Callable[..., Any], wire: str, wait: str, *more: Any) -> list[Any]:
    """Returns what body(rank) returns on each of two ranks that share a GPU."""
    environment = environment_of(wire, **with_settings({}, cuda_wait=wait))
    found = dict(run_workers(2, _member, body, more, environment=environment))
    return [found[rank] for rank in range(2)]


def _member(rank: int, report: Report, body: Callable[..., Any], more: tuple[Any, ...]) -> None:
    enter(rank)
    dist.init_process_group("sealring", timeout=TIMEOUT)
    report(body(rank, *more))
    dist.barrier()
    dist.destroy_process_group()


def refusal_of(call: Callable[[], object], mode: str) -> str:
    """Returns the error of a call on a stream that is being captured."""
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        try:
            with torch.cuda.graph(graph, capture_error_mode=mode):
                call()
        except Unsupported as refused:
            return str(refused)
    return "it was captured"


def calls(rank: int) -> dict[str, Callable[[], object]]:
    data, two = torch.ones(1000, device="cuda"), torch.ones(2000, device="cuda")
    peer = 1 - rank

    def batched() -> None:
        both = [dist.P2POp(dist.isend, data, peer), dist.P2POp(dist.irecv, two[:1000], peer)]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    def coalesced() -> None:
        with _coalescing_manager(device=data.device):
            dist.all_reduce(data)
            dist.all_reduce(two)

    return {
        "all_reduce": lambda: dist.all_reduce(data),
        "broadcast": lambda: dist.broadcast(data, 0),
        "all_gather": lambda: dist.all_gather_into_tensor(two, data),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(data, two),
        "all_to_all": lambda: dist.all_to_all_single(data, data.clone()),
        "functional": lambda: functional.all_reduce(data, "sum", list(range(2))),
        "coalesced": coalesced,
        "send": lambda: dist.isend(data, peer),
        "recv": lambda: dist.irecv(data, peer),
        "batched": batched,
    }


def all_refused(rank: int, mode: str, first: bool) -> tuple[list[str], float]:
    """Returns which calls were not refused, and what the group computes afterwards."""
    if not first:
        dist.all_reduce(torch.ones(10, device="cuda"))
    torch.cuda.synchronize()
    each = calls(rank).items()
    wrong = [name for name, call in each if REFUSAL not in refusal_of(call, mode)]
    data = torch.full((1000,), 10.0 * (rank + 1), device="cuda")
    dist.all_reduce(data)
    return wrong, data[0].item()


@pytest.mark.parametrize("wait", ["stream", "host"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.threat("C17")
def test_a_captured_call_would_not_be_replayed_so_it_is_refused(mode: str, wait: str) -> None:
    assert in_group(all_refused, "auto", wait, mode, False) == [([], 30.0)] * 2


@each_wire
def test_a_groups_first_call_is_captured(wire: str) -> None:
    """The refusal comes before the ranks share facts about their GPUs, which come later."""
    assert in_group(all_refused, wire, "stream", "relaxed", True) == [([], 30.0)] * 2


def wait_in_a_capture(rank: int, mode: str) -> tuple[str, float]:
    data = torch.full((1000,), rank + 1.0, device="cuda")
    dist.all_reduce(torch.ones(10, device="cuda"))
    work = dist.all_reduce(data, async_op=True)
    refused = refusal_of(work.wait, mode)
    work.wait()
    return refused, data[0].item()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.threat("C17")
def test_a_graph_that_waits_for_an_earlier_call(mode: str) -> None:
    """In a replay the wait would wait for nothing."""
    found = in_group(wait_in_a_capture, "auto", "stream", mode)
    assert all(REFUSAL in refused and value == 3.0 for refused, value in found)


def compiled(rank: int, kind: str) -> list[Any]:
    """Returns the results of several runs; torch captures in the second or the third."""

    def traced(data: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(data * 2, "sum", list(range(2))) + 1

    def rewritten(data: torch.Tensor) -> torch.Tensor:
        doubled = data * 2
        dist.all_reduce(doubled)
        return doubled + 1

    group = dist.group.WORLD
    assert group is not None

    def broken(data: torch.Tensor) -> torch.Tensor:
        doubled = data * 2
        group.allreduce([doubled]).wait()
        return doubled + 1

    if kind == "outside":
        import torch._inductor.config as inductor

        inductor.custom_should_partition_ops = [
            "_c10d_functional::all_reduce", "_c10d_functional::all_reduce_",
            "_c10d_functional::wait_tensor",
        ]  # fmt: skip
    function = {"method": broken, "rewritten": rewritten}.get(kind, traced)
    run = torch.compile(function, mode="reduce-overhead")
    results: list[Any] = []
    for _ in range(4):
        try:
            torch.compiler.cudagraph_mark_step_begin()
            results.append(run(torch.full((1000,), rank + 1.0, device="cuda"))[0].item())
        except RuntimeError as refused:
            text = str(refused)
            results.append(REFUSAL in text or "in the cudagraph pool" in text or text)
    return results


@pytest.mark.parametrize("wait", ["stream", "host"])
@pytest.mark.parametrize("kind", ["functional", "rewritten"])
@pytest.mark.threat("C17")
def test_compiled_with_graphs_a_collective_is_right_or_refused(kind: str, wait: str) -> None:
    """torch rewrites dist.all_reduce; its own check may first find an unfinished call."""
    for found in in_group(compiled, "auto", wait, kind):
        assert all(result in (7.0, True) for result in found), found


@pytest.mark.parametrize("wait", ["stream", "host"])
def test_compiled_with_graphs_a_collective_can_be_left_outside_of_them(wait: str) -> None:
    """This is the setting that docs/gpu-memory.md describes."""
    assert in_group(compiled, "auto", wait, "outside") == [[7.0] * 4] * 2


def test_compiled_with_graphs_a_group_method_breaks_the_graph_and_is_right() -> None:
    assert in_group(compiled, "auto", "stream", "method") == [[7.0] * 4] * 2


# ---- sealing without a group -------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.threat("C17")
def test_a_replayed_park_would_seal_under_the_same_nonces(mode: str) -> None:
    parking, data = Parking("cuda"), torch.arange(100_000, device="cuda", dtype=torch.float32)
    parked = parking.park(data)
    assert REFUSAL in refusal_of(lambda: parking.park(data), mode)
    assert REFUSAL in refusal_of(lambda: parking.fetch(parked), mode)
    assert torch.equal(parking.fetch(parked), data)


def test_saved_tensors_are_not_parked_by_a_graph() -> None:
    parking = Parking("cuda")
    weight = torch.ones(100_000, device="cuda", requires_grad=True)

    def forward() -> None:
        with offload_saved_tensors(parking):
            (weight * 2).square().sum().backward()

    forward()
    assert REFUSAL in refusal_of(forward, "relaxed")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.threat("C17")
def test_the_launch_of_a_kernel_that_seals_asks_for_itself(mode: str) -> None:
    """Every caller is refused, because the kernel's argument contains the nonce."""
    device = torch.device("cuda", 0)
    kernels = RecordKernels(device, bytes(32), RECORD_BYTES)
    key, plain = DeviceKey(device, bytes(32)), torch.ones(RECORD_BYTES // 4, device=device)
    wire = torch.zeros(wire_bytes(RECORD_BYTES, RECORD_BYTES), dtype=torch.uint8, device=device)
    header = Header(
        kind=1, sender=0, receiver=0, collective=1, operation=0, dtype=0,
        reduction=0, algorithm=0, message=0, segment=0, total=RECORD_BYTES,
    )  # fmt: skip
    # This compiles the kernel, which a capture does not allow.
    kernels.seal(plain, key, header, wire)
    refused = refusal_of(lambda: kernels.seal(plain, key, header, wire), mode)
    assert "each replay would use its nonces again" in refused
