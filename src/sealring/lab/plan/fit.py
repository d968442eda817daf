"""Fits a profile to the machine on which a results file was measured.

Rates come from the kernels. The further costs of a call and of a record come from two ranks'
all-reduces by size. The cost of sharing a core comes from all-reduces of more ranks than cores:
from all of the other backends', and from the shortest sealed one. Steps that communicate are not
used, because the profile is to predict them.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from functools import lru_cache
from statistics import median
from typing import Final, NamedTuple

from sealring import limits
from sealring.core.engine.lanes import lanes_for, threads_by_default
from sealring.core.schedule import Operation
from sealring.core.schedule.table import AlgorithmTable, parse_table
from sealring.errors import ConfigurationError
from sealring.lab.plan.collectives import Cluster
from sealring.lab.plan.layouts import ClusterSetting, alone
from sealring.lab.plan.models import MODELS, load_model
from sealring.lab.plan.profiles import (
    Device,
    Figure,
    Profile,
    Route,
    Way,
    load_network,
    route_of,
    with_figures,
)
from sealring.lab.results import (
    CollectiveCase,
    KernelCase,
    LinkPoint,
    Results,
    Transport,
    usable,
)

# ---- straight lines through measured points, whose starts and slope cannot be negative


class Point(NamedTuple):
    x: float
    y: float
    weight: float


def lines(groups: Sequence[Sequence[Point]]) -> tuple[list[float], float]:
    """Fits a line to each group of points by least squares, with one common slope for all.

    Returns each line's start and the slope. A group without points starts at 0.
    """
    starts = [0.0] * len(groups)
    free = {number for number, points in enumerate(groups) if points}
    while True:
        centres = {number: _centre(groups[number]) for number in free}
        along = across = 0.0
        for number, points in enumerate(groups):
            x0, y0 = centres.get(number, (0.0, 0.0))
            along += sum(weight * (x - x0) * (y - y0) for x, y, weight in points)
            across += sum(weight * (x - x0) ** 2 for x, _, weight in points)
        slope = max(0.0, along / across) if across else 0.0
        for number, (x0, y0) in centres.items():
            starts[number] = y0 - slope * x0
        below = {number for number in free if starts[number] < 0.0}
        if not below:
            return starts, slope
        free -= below
        for number in below:
            starts[number] = 0.0


def _centre(points: Sequence[Point]) -> tuple[float, float]:
    total = sum(point.weight for point in points)
    x = sum(point.weight * point.x for point in points) / total
    return x, sum(point.weight * point.y for point in points) / total


# ---- the algorithms and the transport of the collectives in a results file


def setting_of(
    results: Results, profile: Profile, way: Way, ranks: int, transport: Transport = "shm"
) -> ClusterSetting:
    """The setting of `ranks` ranks of the machine, with the algorithms that were used there."""
    if way == "sealed" and transport == "tcp":
        profile = _over_sockets(profile)
    network = load_network(profile.network)
    cluster = Cluster(ranks, ranks)
    return ClusterSetting(profile, way, network, cluster, table=_table(results.algorithms))


def _over_sockets(profile: Profile) -> Profile:
    """The profile with TCP between the ranks of one host. Their algorithms stay those of one
    host."""
    assert profile.sealed is not None
    rate = profile.sealed.between_engine_bytes_per_s
    return with_figures(
        profile,
        "sealed",
        rate.source,
        inside_push_bytes_per_s=rate.value,
        inside_forward_bytes_per_s=rate.value,
        inside_pull_bytes_per_s=rate.value,
    )


@lru_cache(maxsize=8)
def _table(text: str) -> AlgorithmTable | None:
    """The table of a results file; None, which means sealring's own, if the file has none."""
    return parse_table(text, "the results' algorithms") if text else None


# ---- the cost of sharing cores


_SHARES: Final = tuple(step / 20 for step in range(21))


def with_shares(profile: Profile, results: Results) -> Profile:
    for way in profile.ways():
        cases = turns_from(results, way)
        if cases and way == "sealed":
            turn = _turn(profile, way, cases, results)
            profile = with_figures(profile, way, "the shortest all-reduce in a crowd", turn_s=turn)
        elif cases:
            profile = _with_share(profile, way, cases, results)
    return profile


def turns_from(results: Results, way: Way) -> list[CollectiveCase]:
    """The all-reduces of more ranks than cores that give the cost of sharing a core.

    Of the sealed ones only the shortest is used, because nearly all of its time is waiting. The
    others are left to be predicted.
    """
    crowded = [
        case
        for case in [*results.allreduce, *results.collectives]
        if case.collective == "all_reduce" and case.variant == way and case.device == "cpu"
        if case.ranks > results.machine.cores
    ]
    if way != "sealed":
        return crowded
    shared = [case for case in crowded if case.transport == "shm"]
    return sorted(shared, key=lambda case: (case.ranks, case.bytes))[:1]


def _with_share(
    profile: Profile, way: Way, cases: Sequence[CollectiveCase], results: Results
) -> Profile:
    tried = []
    for share in _SHARES:
        shared = with_figures(profile, way, "", core_share=share)
        turn = _turn(shared, way, cases, results)
        turning = with_figures(shared, way, "", turn_s=turn)
        error = statistics.mean(
            abs(_alone(turning, way, case, results) / median(case.seconds) - 1) for case in cases
        )
        tried.append((error, share, turn))
    _, share, turn = min(tried)
    source = "all-reduces of more ranks than cores"
    return with_figures(profile, way, source, core_share=share, turn_s=turn)


def _turn(profile: Profile, way: Way, cases: Sequence[CollectiveCase], results: Results) -> float:
    """Fits turn_s by least squares of the relative error; times are nearly linear in it."""
    probe = 1e-5
    probed = with_figures(profile, way, "", turn_s=probe)
    along = across = 0.0
    for case in cases:
        measured = median(case.seconds)
        base = _alone(profile, way, case, results)
        slope = (_alone(probed, way, case, results) - base) / probe / measured
        along += slope * (1 - base / measured)
        across += slope * slope
    return max(0.0, along / across) if across else 0.0


def _alone(profile: Profile, way: Way, case: CollectiveCase, results: Results) -> float:
    setting = setting_of(results, profile, way, case.ranks, case.transport)
    return alone(setting, Operation.ALL_REDUCE, case.bytes)


# ---- the profile


def profile_of(results: Results) -> Profile:
    device = _device(results)
    copy = _rate(results, "copy")
    sealed = _sealed_route(results, copy)
    profile = Profile(
        name="this machine",
        about=f"{results.machine.cpu}, {results.machine.cores} cores, measured {results.made}",
        network="100gbe",
        device=device,
        plain=_plain_route(results, "plain", copy),
        cc=_plain_route(results, "cc", copy) if _points(results, "cc") else None,
        sealed=sealed,
    )
    return with_shares(_with_overheads(profile, results), results)


# ---- kernels


def _rate(results: Results, kernel: str) -> Figure:
    """A kernel's bytes per second, with all cores busy if that was measured, as in training."""
    cases = [case for case in results.aead if case.kernel == kernel and case.device == "cpu"]
    if not cases:
        raise ConfigurationError(
            f"these results have no {kernel} among their kernels: measure with `sealring bench all`"
        )
    crowded = [case for case in cases if case.processes == results.machine.cores] or cases
    # The longest calls, whose data come from memory, like gradients.
    longest = max(case.bytes for case in crowded)
    rates = [case.bytes / median(case.seconds) for case in crowded if case.bytes == longest]
    named = crowded[0]
    return Figure(
        median(rates),
        f"{kernel} kernel, {longest} bytes a call, {named.processes} at once, median",
    )


def _device(results: Results) -> Device:
    machine = results.machine
    here = "this machine"
    products: list[KernelCase] = [case for case in results.aead if case.kernel == "matmul"]
    flops = [case.operations / median(case.seconds) for case in products if case.operations]
    training = list(reached(results, "cpu"))
    if flops:
        peak = Figure(max(flops), "float32 matrix product on one core, measured")
    elif training:
        peak = Figure(max(training), "the fastest training step without communication, measured")
    else:
        peak = Figure(3e10, "assumption: no matrix product was measured")
    efficiency = (
        Figure(median(training) / peak.value, "training steps without communication")
        if training
        else Figure(0.5, "assumption: no step without communication was measured")
    )
    copy = _rate(results, "copy")
    return Device(
        kind="cpu",
        ranks_per_host=Figure(float(limits.MAX_WORLD), "all ranks are on this machine"),
        cores_per_host=Figure(float(machine.cores), here),
        memory_bytes=Figure(float(machine.memory_bytes), here),
        fp32_flops=peak,
        bf16_flops=peak,
        efficiency=efficiency,
        memory_bytes_per_s=Figure(2 * copy.value, f"twice: {copy.source}"),
    )


def reached(results: Results, device: str) -> Iterable[float]:
    """The flops per second of each step without communication on one rank."""
    alone = [case for case in results.step if case.variant == "compute" and case.ranks == 1]
    for case in alone:
        if case.device == device and case.model in MODELS:
            model = load_model(case.model)
            scale = case.tokens / case.batch / model.transformer.context if model.transformer else 1
            yield 3 * model.forward_flops * scale * case.batch / median(case.seconds)


# ---- two ranks


def _points(results: Results, way: Way, transport: str | None = None) -> list[LinkPoint]:
    return [
        point
        for case in results.link
        if case.operation == "all_reduce" and case.variant == way and case.device == "cpu"
        if transport is None or case.transport == transport
        for point in case.points
    ]


def _sealed_route(results: Results, copy: Figure) -> Route:
    shared = Figure(copy.value, f"through shared memory: {copy.source}")
    return route_of(
        seal_bytes_per_s=_rate(results, "seal"),
        open_bytes_per_s=_rate(results, "open"),
        reduce_bytes_per_s=_rate(results, "reduce"),
        copy_bytes_per_s=copy,
        inside_forward_bytes_per_s=shared,
        inside_pull_bytes_per_s=shared,
        between_engine_bytes_per_s=_socket_rate(results, copy),
        record_bytes=Figure(float(limits.RECORD_BYTES), "sealring's default"),
        overlaps=Figure(1.0, "DDP exchanges a bucket as soon as it is full"),
        core_share=Figure(1.0, "the engine is a thread of its own"),
    )


def _socket_rate(results: Results, copy: Figure) -> Figure:
    """The rate of sockets, from the longest all-reduces of two ranks over TCP and shared memory."""
    shm, tcp = _points(results, "sealed", "shm"), _points(results, "sealed", "tcp")
    both = {p.bytes * p.messages: p for p in shm}
    pairs = [(p, both[p.bytes * p.messages]) for p in tcp if p.bytes * p.messages in both]
    if not pairs:
        return Figure(copy.value, f"assumed as fast as copying: {copy.source}")
    longest, beside = max(pairs, key=lambda pair: pair[0].bytes * pair[0].messages)
    threads = threads_by_default(results.machine.cores, 2)
    # The threads that share a tensor send their parts at the same time.
    lanes = lanes_for(longest.bytes, 2, threads)
    more = (median(longest.seconds) - median(beside.seconds)) * lanes
    carried = longest.bytes * longest.messages
    # Each byte is written and read by one rank; shared memory copies it once on the way in.
    per_byte = max(0.0, more / carried) / 2 + 0.5 / copy.value
    return Figure(1 / per_byte, "two ranks' all-reduces over TCP against shared memory")


def _plain_route(results: Results, way: Way, copy: Figure) -> Route:
    points = _points(results, way)
    if len(points) < 2:
        raise ConfigurationError(
            f"these results have no all-reduces of two ranks by size for {way!r}: measure with "
            "`sealring bench all`"
        )
    # A hop of a ring of two carries half of the tensor; a call is two hops.
    xs = [point.bytes * point.messages / 2 for point in points]
    ys = [median(point.seconds) / 2 for point in points]
    (latency,), per_byte = lines([[Point(x, y, 1 / (y * y)) for x, y in zip(xs, ys, strict=True)]])
    per_byte = max(per_byte, 1e-15)
    source = "two ranks' all-reduces by size"
    hop = Figure(2 / per_byte, f"half of a hop's bytes: {source}")
    emulated = way == "cc"
    return route_of(
        copy_bytes_per_s=copy,
        inside_latency_s=Figure(latency, source),
        inside_push_bytes_per_s=hop,
        inside_forward_bytes_per_s=hop,
        inside_pull_bytes_per_s=hop,
        between_latency_s=Figure(latency, source),
        between_engine_bytes_per_s=Figure(2 / per_byte, source),
        overlaps=Figure(float(not emulated), "as emulated" if emulated else "as DDP has it"),
        core_share=Figure(1.0, "assumption"),
    )


def _with_overheads(profile: Profile, results: Results) -> Profile:
    """Fits the costs of a call and of a record beyond its bytes, from two ranks' all-reduces."""
    points = _points(results, "sealed", "shm")
    if profile.sealed is None or not points:
        return profile

    def takes(nbytes: int, record_s: float) -> float:
        tried = with_figures(profile, "sealed", "", send_s=record_s / 2, receive_s=record_s / 2)
        return setting_of(results, tried, "sealed", 2).takes(Operation.ALL_REDUCE, nbytes).seconds

    probe = 1e-6
    short: list[Point] = []
    long: list[Point] = []
    for point in points:
        nbytes, measured = point.bytes * point.messages, median(point.seconds)
        base = takes(nbytes, 0.0)
        records = (takes(nbytes, probe) - base) / probe
        one = Point(records, measured - base, 1 / (measured * measured))
        (short if nbytes <= limits.PREPARED_BYTES else long).append(one)
    (prepared, call), record = lines([short, long])
    if prepared > call:  # then the difference is noise, and both are taken as equal
        (call,), record = lines([short + long])
        prepared = call
    return with_figures(
        profile,
        "sealed",
        "two ranks' sealed all-reduces by size",
        send_s=record / 2,
        receive_s=record / 2,
        call_s=call,
        prepared_s=call - prepared,
    )


# ---- a profile of the GPU, from `python -m sealring.lab gpu`  Rates come from the GPU's kernels.
# The speed of a wire comes from the all-reduce of the most ranks on the GPU: its time without the
# kernels' time. In the profile several ranks share one GPU, as they did in the measurement.


_HALVINGS: Final = 50


def gpu_of(results: Results) -> str | None:
    """The name of the GPU whose kernels a results file has."""
    return results.gpu[0].device if results.gpu else None


def gpu_profile_of(results: Results) -> Profile:
    name = gpu_of(results)
    kernels: dict[str, KernelCase] = {
        case.kernel: case for case in usable(results.gpu) if case.device == name
    }
    for needed in ("copy", "seal", "open", "open_reduce"):
        if name is None or needed not in kernels:
            raise ConfigurationError(
                f"these results have no {needed} among a GPU's kernels: measure with `python "
                "-m sealring.lab gpu --results results.json`"
            )
    assert name is not None
    profile = Profile(
        name="this GPU",
        about=f"{name}, measured {results.made}",
        network="100gbe",
        device=_gpu(results, name, kernels),
        plain=_gpu_plain_route(kernels),
        cc=None,
        sealed=_gpu_sealed_route(kernels),
    )
    for way in ("plain", "sealed"):
        profile = _with_wire(profile, way, _exchange(results, name, way))
    return profile


def _kernel_rate(case: KernelCase, what: str = "") -> Figure:
    return Figure(
        case.bytes / median(case.seconds),
        f"{what or case.kernel} kernel, {case.bytes} bytes a call, median",
    )


def _gpu(results: Results, name: str, kernels: dict[str, KernelCase]) -> Device:
    count = Figure(float(max(1, results.machine.gpus.count(name))), "GPUs of this machine")
    memory = results.machine.gpu_memory_bytes
    product = kernels.get("matmul")
    if product is None:
        peak = Figure(1e14, "assumption: no matrix product was measured")
    else:
        rate = product.operations / median(product.seconds)
        peak = Figure(rate, "float32 matrix product by its tensor cores (TF32), measured")
    training = list(reached(results, name))
    copy = _kernel_rate(kernels["copy"])
    return Device(
        kind="gpu",
        ranks_per_host=count,
        cores_per_host=count,
        memory_bytes=Figure(float(memory), "as its driver says")
        if memory
        else Figure(8e10, "assumption: the results do not say"),
        fp32_flops=peak,
        bf16_flops=Figure(2 * peak.value, f"assumption: twice as fast as TF32. {peak.source}"),
        efficiency=Figure(median(training) / peak.value, "training steps without communication")
        if training
        else Figure(0.4, "38 to 43 % reached in training Llama 3 (arXiv 2407.21783, table 4)"),
        memory_bytes_per_s=Figure(2 * copy.value, f"twice: {copy.source}"),
    )


def _gpu_sealed_route(kernels: dict[str, KernelCase]) -> Route:
    opening, both = _kernel_rate(kernels["open"]), _kernel_rate(kernels["open_reduce"])
    more = 1 / both.value - 1 / opening.value
    launch = kernels.get("launch")
    route = {
        "seal_bytes_per_s": _kernel_rate(kernels["seal"]),
        "open_bytes_per_s": opening,
        "reduce_bytes_per_s": Figure(
            1 / more if more > 0 else 0.0, "what open_reduce takes more than open"
        ),
        "copy_bytes_per_s": _kernel_rate(kernels["copy"]),
        "record_bytes": Figure(float(kernels["seal"].record_bytes), "as the kernels were measured"),
        "overlaps": Figure(1.0, "DDP exchanges a bucket as soon as it is full"),
        "core_share": Figure(1.0, "the kernels fill the GPU while they run"),
    }
    if launch is not None:
        took = median(launch.seconds)
        route["call_s"] = Figure(took, "one small record, launch to completion, median")
    return route_of(**route)


def _gpu_plain_route(kernels: dict[str, KernelCase]) -> Route:
    copy = _kernel_rate(kernels["copy"])
    route = {
        "reduce_bytes_per_s": Figure(
            2 * copy.value / 3, f"two reads and a write per byte: {copy.source}"
        ),
        "copy_bytes_per_s": copy,
        "record_bytes": Figure(524288.0, "assumption: NCCL's slices of its 4 MiB buffers"),
        "overlaps": Figure(1.0, "DDP exchanges a bucket as soon as it is full"),
        "core_share": Figure(0.1, "assumption: NCCL's channels on a tenth of the GPU"),
    }
    return route_of(**route)


# ---- wires


def _exchange(results: Results, name: str, way: Way) -> CollectiveCase:
    """The all-reduce of the most ranks over the fastest wire; NCCL is preferred to Gloo."""
    cases = [
        case
        for case in usable(results.allreduce)
        if case.device == name and case.variant == way and case.collective == "all_reduce"
    ]
    if not cases:
        raise ConfigurationError(
            f"these results have no {way} all-reduce on {name}: measure with `python -m "
            "sealring.lab gpu --results results.json`"
        )
    most = max(case.ranks for case in cases)
    largest = [case for case in cases if case.ranks == most]
    nccl = [case for case in largest if way == "plain" and case.transport == "nccl"]
    return min(nccl or largest, key=lambda case: median(case.seconds))


def _with_wire(profile: Profile, way: Way, case: CollectiveCase) -> Profile:
    """Finds the wire's speed by bisection, because a slower wire gives a longer all-reduce."""
    network = load_network(profile.network)
    cluster = Cluster(case.ranks, case.ranks)
    measured = median(case.seconds)
    # All ranks were on one GPU, however many the machine has.
    one = Figure(1.0, "one GPU")
    shared = dataclasses.replace(profile.device, cores_per_host=one)

    source = (
        f"an all-reduce of {case.bytes} bytes by {case.ranks} ranks on one GPU ({case.transport}), "
        "less its kernels"
    )

    def at(bytes_per_s: float) -> Profile:
        return with_figures(profile, way, source, inside_bytes_per_s=bytes_per_s)

    def takes(bytes_per_s: float) -> float:
        tried = dataclasses.replace(at(bytes_per_s), device=shared)
        return alone(ClusterSetting(tried, way, network, cluster), Operation.ALL_REDUCE, case.bytes)

    slow, fast = 1e6, 1e13
    for _ in range(_HALVINGS):
        middle = (slow * fast) ** 0.5
        slow, fast = (middle, fast) if takes(middle) > measured else (slow, middle)
    return at(fast)
