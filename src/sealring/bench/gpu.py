"""`sealring bench gpu`: what sealing costs where the GPU that holds a tensor does it.

Three parts: the kernels by themselves; an all-reduce of several ranks on one GPU, through host
memory, against the same path without cryptography (bench/unsealed.cu) and against Gloo; and a DDP
step of GPT-2 on that path.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any, Final

from sealring.bench.measure import Samples, alternate
from sealring.bench.workers import Report, run_workers
from sealring.errors import ConfigurationError

PARTS: Final = ("kernels", "allreduce", "step")
_GIB: Final = 1 << 30
_RECORD_BYTES: Final = 256 << 10
_MIB_256: Final = 256 << 20
MODELS: Final = ("gpt2", "gpt2-medium", "gpt2-xl")
_TOKENS: Final = 1024


@dataclass(frozen=True, slots=True)
class Row:
    part: str
    what: str
    value: float
    unit: str
    at_least: float | None = None
    at_most: float | None = None
    detail: str = ""

    @property
    def met(self) -> bool | None:
        if self.at_least is not None:
            return self.value >= self.at_least
        return None if self.at_most is None else self.value <= self.at_most

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.met}


def gpu_name() -> str:
    import torch

    if not torch.cuda.is_available():
        raise ConfigurationError("torch finds no GPU here, and this measures one")
    return str(torch.cuda.get_device_name(0))


def measure_gpu(
    parts: Sequence[str], ranks: Sequence[int], models: Sequence[str] = MODELS
) -> Iterator[Row]:
    """Rows as they are measured."""
    if "kernels" in parts:
        yield from _rows(1, _kernels)
    for world in ranks:
        if "allreduce" in parts:
            yield from _rows(world, _allreduce, world, _MIB_256)
    if "step" in parts:
        for model in models:
            yield from _rows(max(ranks), _step, model)


def _rows(world: int, target: Callable[..., None], *arguments: Any) -> Iterator[Row]:
    for _, report in run_workers(world, target, *arguments):
        if isinstance(report, Row):
            yield report


# ---- kernels ------------------------------------------------------------------------------------


def _kernels(_rank: int, report: Report) -> None:
    import torch

    from sealring.engine.cuda.kernels import DeviceKey, Header, RecordKernels, wire_bytes
    from sealring.engine.datatypes import DType, ReduceKind

    device = torch.device("cuda", 0)
    summing = (DType.FLOAT32, ReduceKind.SUM)
    tensor = torch.randn(_GIB // 4, device=device)
    result = torch.empty_like(tensor)
    kernels = RecordKernels(device, bytes(32), _RECORD_BYTES)
    wire = torch.empty(wire_bytes(_GIB, _RECORD_BYTES), dtype=torch.uint8, device=device)
    further = torch.empty_like(wire)
    key, other = DeviceKey(device, bytes(range(32))), DeviceKey(device, bytes(range(32, 64)))
    header = Header(1, 0, 1, 1, 1, 3, 1, 1, 0, 0, _GIB)

    def rate(call: Callable[[], object], *, at_least: float | None, name: str) -> None:
        milliseconds = _event_times(call, calls=15)
        gb_per_s = _GIB / statistics.median(milliseconds) / 1e6
        detail = "1 GiB in 256 KiB records" if at_least else ""
        report(Row("kernels", name, round(gb_per_s, 1), "GB/s", at_least, detail=detail))

    rate(lambda: result.copy_(tensor), at_least=None, name="copy on the device")
    rate(lambda: kernels.seal(tensor, key, header, wire), at_least=950, name="seal")
    rate(lambda: kernels.open(wire, key, header, result), at_least=950, name="open")
    rate(
        lambda: kernels.open_reduce(wire, key, header, result, summing),
        at_least=700,
        name="open_reduce fp32",
    )
    rate(
        lambda: kernels.hop((wire, key, header), tensor, (further, other, header), summing),
        at_least=450,
        name="hop fp32",
    )
    kernels.check()

    small = RecordKernels(device, bytes(32), 4096)
    few = tensor[:1024]
    microseconds = []
    for _ in range(300):
        launch = small.sealing(few, key, header, wire)
        torch.cuda.synchronize()
        start = time.perf_counter()
        launch()
        torch.cuda.synchronize()
        microseconds.append((time.perf_counter() - start) * 1e6)
    value = round(statistics.median(microseconds), 1)
    report(Row("kernels", "seal of 4 KiB", value, "µs", at_most=20, detail="launch to completion"))


def _timed_event() -> Any:
    import torch

    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _event_times(call: Callable[[], object], calls: int) -> list[float]:

    for _ in range(3):
        call()
    times = []
    for _ in range(calls):
        start, end = (_timed_event() for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return times


# ---- collectives --------------------------------------------------------------------------------


def unsealed_text() -> Mapping[str, bytes]:
    from sealring.engine.cuda.compiler import kernel_text

    own = (resources.files("sealring.bench") / "unsealed.cu").read_bytes()
    return {**kernel_text(), "unsealed.cu": own}


def _groups() -> tuple[Any, Any]:
    """A sealed group, and one whose GPU leaves the cryptography out."""
    import torch
    import torch.distributed as dist

    from sealring.engine.cuda.attachment import Gpu, Kernels

    torch.cuda.set_device(0)
    torch.zeros(1, device="cuda")
    dist.init_process_group("sealring")
    sealed: Any = dist.group.WORLD
    unsealed: Any = dist.new_group(backend="sealring")
    engine = unsealed._engine
    engine._gpu = Gpu(engine._native, 0, Kernels(unsealed_text, "_unsealed"))
    return sealed, unsealed


def _allreduce(rank: int, report: Report, world: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    sealed, unsealed = _groups()
    gloo = dist.new_group(backend="gloo")
    tensor = torch.zeros(size // 4, device="cuda")

    def reduced(group: Any) -> Callable[[], None]:
        def call() -> None:
            dist.all_reduce(tensor, group=group)
            torch.cuda.synchronize()

        return call

    samples = alternate(
        {"sealed": reduced(sealed), "unsealed": reduced(unsealed), "gloo": reduced(gloo)},
        blocks=7,
        calls=1,
        warm_up=2,
        between=dist.barrier,
    )
    if rank == 0:
        times = {name: sample.median * 1e3 for name, sample in samples.items()}
        detail = ", ".join(f"{name} {ms:.1f} ms" for name, ms in times.items())
        what = f"all_reduce 256 MiB, {world} ranks on one GPU"
        for other, bar in (("unsealed", 1.05), ("gloo", 0.5)):
            ratio = round(times["sealed"] / times[other], 3)
            report(Row("allreduce", f"{what}: {other}", ratio, "x", at_most=bar, detail=detail))
    dist.barrier()
    dist.destroy_process_group()


def _step(rank: int, report: Report, name: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from sealring.bench.models import find

    sealed, unsealed = _groups()
    with torch.device("cuda"):
        model = find(name).build()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    # What lets four ranks of the largest fit into one GPU.
    batch = 4 if parameters < 1_000_000_000 else 1
    windows = torch.randint(50257, (batch, _TOKENS + 1), device="cuda")
    torch.backends.cuda.matmul.allow_tf32 = True
    seconds: dict[str, list[float]] = {"sealed": [], "unsealed": []}
    for group_name, group in (("sealed", sealed), ("unsealed", unsealed)) * 2:
        wrapped = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        for turn in range(5):
            dist.barrier()
            torch.cuda.synchronize()
            start = time.perf_counter()
            wrapped(windows[:, :-1], windows[:, 1:]).backward()
            optimizer.step()
            torch.cuda.synchronize()
            # DDP lays out its buckets anew after the first step.
            if turn >= 2:
                seconds[group_name].append(time.perf_counter() - start)
            optimizer.zero_grad(set_to_none=False)
        del wrapped
    if rank == 0:
        medians = {key: Samples(tuple(values)).median for key, values in seconds.items()}
        ratio = round(medians["sealed"] / medians["unsealed"], 3)
        detail = ", ".join(f"{key} {value * 1e3:.0f} ms" for key, value in medians.items())
        what = f"DDP step, {name}, {dist.get_world_size()} ranks on one GPU: unsealed"
        report(Row("step", what, ratio, "x", at_most=1.05, detail=detail))
    dist.barrier()
    dist.destroy_process_group()
