"""`python -m sealring.lab gpu`: what sealing by the GPU that holds the tensor costs.

Several ranks share one GPU, in groups that use different wires. Some groups run the same path
without cryptography. It measures the kernels by themselves; all-reduces of these groups, compared
with each other, with Gloo and with NCCL; and a DDP step of GPT-2 over one wire, sealed and
unsealed. Each figure is shown with its target.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import resources
from statistics import median
from typing import TYPE_CHECKING, Any, Final, cast

from sealring.core.settings import with_settings
from sealring.errors import ConfigurationError, WorkerFailed
from sealring.lab.bench.collectives import sealed_and_opened
from sealring.lab.bench.harness import (
    BenchRow,
    Cases,
    Progress,
    compare,
    gathered,
    in_turn,
    reports_of,
    sealed_world,
)
from sealring.lab.bench.kernels import kernel_case
from sealring.lab.bench.workers import Report, WorkerPlace, settle
from sealring.lab.results import CollectiveCase, KernelCase, Results, StepCase, usable

if TYPE_CHECKING:
    from sealring.lab.results import Kernel, Transport, Variant


# ---- groups
#
# A group's wire is read from the environment when the group is made, so that one process can have
# groups with different wires. The ranks agree on it at the group's first tensor.


SETTABLE: Final = ("host", "peer", "nccl")
WIRES: Final = (*SETTABLE, "hosts")
"""`hosts` stands for two hosts, each with half of the ranks: peer memory inside, NCCL between."""
BY_NCCL: Final = ("nccl", "hosts")


def environment_for(*wires: str) -> dict[str, str]:
    """The environment of workers that use these wires: NCCL must not wait for late kernel loads."""
    return {"CUDA_MODULE_LOADING": "EAGER"} if set(wires) & set(BY_NCCL) else {}


@contextmanager
def over(wire: str, rank: int = 0, ranks: int = 1) -> Iterator[None]:
    settings = {"SEALRING_GPU_WIRE": wire}
    if wire == "hosts":
        host = f"host-{2 * rank // ranks}"
        settings = {"SEALRING_GPU_WIRE": "nccl", **with_settings(os.environ, host=host)}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def sealed_over(wire: str, device: Any) -> Any:
    import torch.distributed as dist

    with over(wire, dist.get_rank(), dist.get_world_size()):
        group: Any = dist.new_group(backend="sealring")
    _meet_a_tensor(group, device)
    if device.type == "cuda" and not group.engine.wired:
        raise ConfigurationError(f"the ranks' GPUs have no such wire: {wire}")
    return group


def unsealed_over(wire: str, device: Any) -> Any:
    """Makes a group with kernels that leave out the cryptography (lab/bench/unsealed.cu)."""
    from unittest.mock import patch

    from sealring.core.engine.cuda import attachment

    # No setting can lead here.
    unsealed = attachment.Kernels(unsealed_text, "_unsealed")
    with patch.object(attachment, "SHIPPED", unsealed):
        return sealed_over(wire, device)


def unsealed_text() -> Mapping[str, bytes]:
    from sealring.core.engine.cuda.compiler import kernel_text

    own = (resources.files("sealring.lab.bench") / "unsealed.cu").read_bytes()
    return {**kernel_text(), "unsealed.cu": own}


def _meet_a_tensor(group: Any, device: Any) -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.zeros(1, device=device), group=group)


# ---- the kernels by themselves, on a tensor that is larger than the caches


SUITE: Final = "ChaCha20-Poly1305"
KERNEL_BYTES: Final = 1 << 30
RECORD_BYTES: Final = 256 << 10
SMALL_BYTES: Final = 4 << 10
OPERATIONS_PER_BLOCK: Final = 960 + 100
"""Operations per 64 bytes: 320 additions, exclusive-ors and rotations each, and 25 wide
multiplications for each of the tag's four blocks."""
_MATRIX: Final = 8192
_CALLS: Final = 15
_SMALL_CALLS: Final = 300


def measure_kernels(place: WorkerPlace, progress: Progress | None = None) -> Iterator[Cases]:
    for measured in reports_of(1, _time_kernels, place, progress=progress):
        yield Cases("gpu", measured)


def _time_kernels(rank: int, report: Report, place: WorkerPlace) -> None:
    device = place.enter(rank, 1)
    measured = []
    calls, check = _calls(device)
    for index, (case, call) in enumerate(calls):
        measured.append(replace(case, seconds=_event_times(call)))
        report((index + 1) / (len(calls) + 1))
    check()
    measured.append(_launch(device))
    report([replace(case, device=place.name) for case in measured])


def _calls(
    device: Any,
) -> tuple[list[tuple[KernelCase, Callable[[], object]]], Callable[[], None]]:
    """The calls of each kernel, and a function that raises if a kernel refused a record.

    (A refused record would make a kernel look fast.) Opening reads the wire twice, for the tag
    first.
    """
    import torch

    from sealring.core.engine.collective import DType, ReduceKind
    from sealring.core.engine.cuda.kernels import DeviceKey, Header, RecordKernels, wire_bytes

    summing = (DType.FLOAT32, ReduceKind.SUM)
    tensor = torch.randn(KERNEL_BYTES // 4, device=device)
    result = torch.empty_like(tensor)
    kernels = RecordKernels(device, bytes(32), RECORD_BYTES)
    wire = torch.empty(wire_bytes(KERNEL_BYTES, RECORD_BYTES), dtype=torch.uint8, device=device)
    further = torch.empty_like(wire)
    key, other = DeviceKey(device, bytes(range(32))), DeviceKey(device, bytes(range(32, 64)))
    header = Header(1, 0, 1, 1, 1, 3, 1, 1, 0, 0, KERNEL_BYTES)
    one, product = (torch.randn(_MATRIX, _MATRIX, device=device) for _ in range(2))
    kernels.seal(tensor, key, header, wire)  # the later calls open this

    cipher, sums = KERNEL_BYTES // 64 * OPERATIONS_PER_BLOCK, KERNEL_BYTES // 4

    def shape(kernel: Kernel, moved: int, operations: int) -> KernelCase:
        moved_bytes = moved * KERNEL_BYTES
        return kernel_case(kernel, KERNEL_BYTES, RECORD_BYTES, moved_bytes, operations, SUITE)

    calls: list[tuple[KernelCase, Callable[[], object]]] = [
        (
            kernel_case("copy", KERNEL_BYTES, KERNEL_BYTES, 2 * KERNEL_BYTES, 0),
            lambda: result.copy_(tensor),
        ),
        (shape("seal", 2, cipher), lambda: kernels.seal(tensor, key, header, wire)),
        (shape("open", 3, cipher), lambda: kernels.open(wire, key, header, result)),
        (
            shape("open_reduce", 4, cipher + sums),
            lambda: kernels.open_reduce(wire, key, header, result, summing),
        ),
        (
            shape("hop", 4, 2 * cipher + sums),
            lambda: kernels.hop((wire, key, header), tensor, (further, other, header), summing),
        ),
        # Last, because its power consumption lowers the GPU's clock for a while.
        (
            kernel_case("matmul", one.nbytes, one.nbytes, 3 * one.nbytes, 2 * _MATRIX**3),
            lambda: torch.mm(one, one, out=product),
        ),
    ]
    return calls, kernels.check


def _launch(device: Any) -> KernelCase:
    """Sealing one small record, from the launch to its end."""
    import torch

    from sealring.core.engine.cuda.kernels import DeviceKey, Header, RecordKernels, wire_bytes

    kernels = RecordKernels(device, bytes(32), SMALL_BYTES)
    tensor = torch.randn(SMALL_BYTES // 4, device=device)
    wire = torch.empty(wire_bytes(SMALL_BYTES, SMALL_BYTES), dtype=torch.uint8, device=device)
    key, header = DeviceKey(device, bytes(32)), Header(1, 0, 1, 1, 1, 3, 1, 1, 0, 0, SMALL_BYTES)
    seconds = []
    for _ in range(_SMALL_CALLS):
        launch = kernels.sealing(tensor, key, header, wire)
        torch.cuda.synchronize()
        start = time.perf_counter()
        launch()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    operations = SMALL_BYTES // 64 * OPERATIONS_PER_BLOCK
    case = kernel_case("launch", SMALL_BYTES, SMALL_BYTES, 0, operations, SUITE)
    return replace(case, seconds=seconds)


def _event_times(call: Callable[[], object]) -> list[float]:
    """The times of a call in seconds, by the GPU's clock."""
    for _ in range(3):
        call()
    times = []
    for _ in range(_CALLS):
        start, end = (_timed_event() for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return times


def _timed_event() -> Any:
    import torch

    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


# ---- all-reduces over each way, in turn


BYTES: Final = 256 << 20

Way = tuple["Variant", "Transport"]


def ways_over(wires: Sequence[str]) -> list[Way]:
    """The ways to measure: sealed over each wire, and what it is compared with.

    Host memory is compared with the same path unsealed and with Gloo, which uses host memory, too.
    `hosts` is compared with the same path unsealed; the other wires are compared with NCCL.
    """
    ways: list[Way] = []
    if "host" in wires:
        ways += [("sealed", "host"), ("unsealed", "host"), ("plain", "tcp")]
    if "peer" in wires:
        ways.append(("sealed", "peer"))
    if "nccl" in wires:
        ways.append(("sealed", "nccl"))
    if "hosts" in wires:
        ways += [("sealed", "hosts"), ("unsealed", "hosts")]
    if "peer" in wires or "nccl" in wires:
        ways.append(("plain", "nccl"))
    return ways


def measure_allreduces(
    place: WorkerPlace,
    ranks: int,
    size: int,
    wires: Sequence[str],
    blocks: int,
    progress: Progress | None = None,
) -> Iterator[Cases]:
    arguments = (place, ranks, size, ways_over(wires), blocks)
    environment = environment_for(*wires)
    return reports_of(
        ranks, time_all_reduces, *arguments, environment=environment, progress=progress
    )


def time_all_reduces(
    rank: int,
    report: Report,
    place: WorkerPlace,
    ranks: int,
    size: int,
    ways: list[Way],
    blocks: int,
) -> None:
    import torch

    device = place.enter(rank, ranks)
    with sealed_world():
        groups = {way: _group(way, device) for way in ways}
        tensor = torch.empty(size // 4, device=device)
        calls = {way: _bound(tensor, group) for way, group in groups.items()}
        for way, call in calls.items():
            _check_sum(way, call, tensor, rank, ranks)
        own = {
            way: sealed_and_opened(groups[way], call)
            for way, call in calls.items()
            if way[0] == "sealed"
        }
        tensor.zero_()
        samples = in_turn(calls, report, blocks=blocks)
        everyones = gathered(own)
        if rank == 0:
            busiest = {way: max((each[way] for each in everyones), key=sum) for way in own}
            cases = [
                CollectiveCase(
                    collective="all_reduce",
                    ranks=ranks,
                    bytes=size,
                    dtype="float32",
                    transport=transport,
                    variant=variant,
                    device=place.name,
                    sealed_bytes=busiest.get((variant, transport), (0, 0))[0],
                    opened_bytes=busiest.get((variant, transport), (0, 0))[1],
                    run=0,
                    seconds=list(each.seconds),
                )
                for (variant, transport), each in samples.items()
            ]
            report(Cases("allreduce", cases))


def _group(way: Way, device: Any) -> Any:
    import torch.distributed as dist

    variant, transport = way
    if variant == "plain":
        return dist.new_group(backend="nccl" if transport == "nccl" else "gloo")
    return (sealed_over if variant == "sealed" else unsealed_over)(transport, device)


def _bound(tensor: Any, group: Any) -> Callable[[], None]:
    import torch.distributed as dist

    def call() -> None:
        dist.all_reduce(tensor, group=group)
        settle(tensor.device)

    return call


def _check_sum(way: Way, call: Callable[[], None], tensor: Any, rank: int, ranks: int) -> None:
    """Checks that a way computes the right sum, before it is timed."""
    tensor.fill_(rank + 1.0)
    call()
    low, high = float(tensor.min()), float(tensor.max())
    if low != high or high != ranks * (ranks + 1) / 2:
        raise WorkerFailed(f"{' over '.join(way)}: the sum is {low:g} to {high:g}, which is wrong")


# ---- a DDP step of GPT-2 over one wire: sealed, and the same unsealed
#
# Both use one model with one DDP, because four ranks of the largest model do not fit twice. A
# communication hook gives each step's buckets to the group whose turn it is. The optimizer is plain
# SGD, which keeps only weights and gradients. The buckets are torch's default.


MODELS: Final = ("gpt2", "gpt2-medium", "gpt2-xl")
TOKENS: Final = 1024
BUCKET_MB: Final = 25.0
"""DDP's default. It is not passed to DDP, so that the first bucket is small, as by default."""
BUDGET_S: Final = 60.0
_FEWEST, _MOST = 5, 11


def batch_of(parameters: int) -> int:
    """Windows per rank, so that four ranks of the largest model fit into one GPU."""
    return 4 if parameters < 1_000_000_000 else 1


def affordable(step_s: float, variants: int, most: int = _MOST) -> int:
    """How many steps of each variant fit into the budget, but enough for a median."""
    return min(most, max(_FEWEST, int(BUDGET_S / (variants * step_s))))


def measure_step(
    place: WorkerPlace,
    model: str,
    ranks: int,
    wire: str,
    most: int = _MOST,
    progress: Progress | None = None,
) -> Iterator[Cases]:
    arguments = (place, model, ranks, wire, most)
    environment = environment_for(wire)
    return reports_of(ranks, _train, *arguments, environment=environment, progress=progress)


@dataclass(slots=True)
class BucketTurn:
    """The group whose turn it is to reduce, and the number of buckets that it got."""

    group: Any
    buckets: int = 0


def _train(
    rank: int, report: Report, place: WorkerPlace, name: str, ranks: int, wire: str, most: int
) -> None:
    import torch
    import torch.distributed as dist

    device = place.enter(rank, ranks)
    with sealed_world():
        groups = {"sealed": sealed_over(wire, device), "unsealed": unsealed_over(wire, device)}
        turn = BucketTurn(groups["sealed"])
        step, parameters, batch = trained_by(name, turn, device)

        def by(group: Any) -> Callable[[], None]:
            def call() -> None:
                turn.group = group
                step()

            return call

        calls = {variant: by(group) for variant, group in groups.items()}
        for call in calls.values():  # DDP rebuilds its buckets after the first step
            call()
        turn.buckets = 0
        start = time.perf_counter()
        sealed_bytes, _ = sealed_and_opened(groups["sealed"], calls["sealed"])
        took, buckets = torch.tensor([time.perf_counter() - start]), turn.buckets
        dist.all_reduce(took, dist.ReduceOp.MAX)
        blocks = affordable(float(took), len(calls), most)
        samples = in_turn(calls, report, blocks=blocks, warm_up=0)
        if rank == 0:
            cases = [
                StepCase(
                    model=name,
                    parameters=parameters,
                    ranks=ranks,
                    batch=batch,
                    tokens=batch * TOKENS,
                    precision="fp32",
                    bucket_cap_mb=BUCKET_MB,
                    all_reduces=buckets,
                    transport=cast("Transport", wire),
                    variant=cast("Variant", variant),
                    device=place.name,
                    sealed_bytes=sealed_bytes if variant == "sealed" else 0,
                    run=0,
                    seconds=list(each.seconds),
                    split=[],
                )
                for variant, each in samples.items()
            ]
            report(Cases("step", cases))


def trained_by(name: str, turn: BucketTurn, device: Any) -> tuple[Callable[[], None], int, int]:
    """Returns a function for one step, the number of parameters, and the batch size.

    The model is made on the device, without a copy on the host.
    """
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel

    from sealring.lab.bench.models import build

    with device:
        model: Any = build(name)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    batch = batch_of(parameters)
    shape = (batch, min(TOKENS, model.positions.num_embeddings) + 1)
    windows = torch.randint(model.tokens.num_embeddings, shape, device=device)
    wrapped = DistributedDataParallel(model, process_group=turn.group, gradient_as_bucket_view=True)

    def reduce(turn: Any, bucket: Any) -> Any:
        turn.buckets += 1
        return allreduce_hook(turn.group, bucket)

    # A lambda: DDP compares annotations with its own types, and these are strings.
    wrapped.register_comm_hook(turn, lambda turn, bucket: reduce(turn, bucket))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        wrapped(windows[:, :-1], windows[:, 1:]).backward()
        optimizer.step()
        settle(device)

    return step, parameters, batch


# ---- figures with their targets


_RATES: Final = {"seal": 950.0, "open": 950.0, "open_reduce": 700.0, "hop": 450.0}
"""Targets in GB/s of plaintext (or wire, which differs only by headers). NVLink 4 has 450 GB/s in
one direction."""
_NAMES: Final = {
    "copy": "copy on the device",
    "open_reduce": "open_reduce fp32",
    "hop": "hop fp32",
    "matmul": "product of matrices, TF32",
    "launch": "seal of 4 KiB",
}
_LAUNCH_US: Final = 20.0
_UNSEALED: Final = 1.05
_GLOO: Final = 0.5
_NCCL: Final = 0.2
_NCCL_RANKS: Final = 4
"""The number of ranks for which the target of peer memory counts. Other numbers only inform."""
_OVER_NCCL: Final = 1.0


def rows_of(results: Results) -> list[BenchRow]:
    """The figures in the order measured. Samples are compared only within the same run."""
    return [
        *_kernels(usable(results.gpu)),
        *_exchanges([case for case in usable(results.allreduce) if case.device != "cpu"]),
        *_steps([case for case in usable(results.step) if case.device != "cpu"]),
    ]


def _kernels(cases: Sequence[KernelCase]) -> Iterator[BenchRow]:
    for case in cases:
        seconds = median(case.seconds)
        name = _NAMES.get(case.kernel, case.kernel)
        size = f"{case.bytes / 2**30:g} GiB in {case.record_bytes >> 10} KiB records"
        if case.kernel == "launch":
            detail = "launch to completion"
            yield BenchRow("kernels", name, round(seconds * 1e6, 1), "µs", None, _LAUNCH_US, detail)
        elif case.kernel == "matmul":
            yield BenchRow("kernels", name, round(case.operations / seconds / 1e12, 1), "Top/s")
        else:
            rate = round(case.bytes / seconds / 1e9, 1)
            detail = size if case.suite else ""
            yield BenchRow("kernels", name, rate, "GB/s", _RATES.get(case.kernel), None, detail)


def _exchanges(cases: Sequence[CollectiveCase]) -> Iterator[BenchRow]:
    for run in dict.fromkeys(case.run for case in cases):
        ways: dict[tuple[str, str], CollectiveCase] = {
            (case.variant, case.transport): case for case in cases if case.run == run
        }
        first = next(iter(ways.values()))
        what = f"{first.collective} {first.bytes >> 20} MiB, {first.ranks} ranks"
        nccl = _NCCL if first.ranks == _NCCL_RANKS else None
        for wire, other, name, bar in (
            ("host", ("unsealed", "host"), "unsealed", _UNSEALED),
            ("host", ("plain", "tcp"), "Gloo", _GLOO),
            ("peer", ("plain", "nccl"), "NCCL", nccl),
            ("nccl", ("plain", "nccl"), "NCCL", _OVER_NCCL),
            ("hosts", ("unsealed", "hosts"), "unsealed", _UNSEALED),
        ):
            one, against = ways.get(("sealed", wire)), ways.get(other)
            if one is not None and against is not None:
                yield from _ratio("allreduce", f"{what}, {wire}: {name}", one, against, bar, name)


def _steps(cases: Sequence[StepCase]) -> Iterator[BenchRow]:
    for run in dict.fromkeys(case.run for case in cases):
        ways: dict[str, StepCase] = {case.variant: case for case in cases if case.run == run}
        one = ways.get("sealed")
        if one is None:
            continue
        what = f"DDP step, {one.model}, {one.ranks} ranks, {one.transport}"
        for variant, name, bar in (("unsealed", "unsealed", _UNSEALED), ("plain", "NCCL", None)):
            against = ways.get(variant)
            if against is not None:
                yield from _ratio("step", f"{what}: {name}", one, against, bar, name)


def _ratio(
    part: str,
    what: str,
    one: CollectiveCase | StepCase,
    other: CollectiveCase | StepCase,
    bar: float | None,
    name: str,
) -> Iterator[BenchRow]:
    if len(one.seconds) != len(other.seconds):
        return
    told = compare(one.seconds, other.seconds)
    detail = f"sealed {_ms(one)}, {name} {_ms(other)}"
    yield BenchRow(
        part, what, round(told.ratio, 3), "x", None, bar, detail,
        round(told.low, 3), round(told.high, 3),
    )  # fmt: skip


def _ms(case: CollectiveCase | StepCase) -> str:
    return f"{median(case.seconds) * 1e3:,.1f} ms"
