"""A profile of the GPU that a results file was measured on, from `sealring bench gpu`.

Rates come from its kernels. How fast a wire is follows from the all-reduces of the most ranks on
the GPU: it is what is left of their time when the kernels' has been taken off. Several ranks on one
GPU share it in the profile as they did when they were measured.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import Final

from sealring.core.schedule import Operation
from sealring.errors import ConfigurationError
from sealring.lab.plan.collectives import Cluster
from sealring.lab.plan.fit import reached
from sealring.lab.plan.layouts import Setting, alone
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
from sealring.lab.results import CollectiveCase, KernelCase, Results, median_of, usable

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
                f"these results have no {needed} among a GPU's kernels: measure with `sealring "
                "bench gpu --results results.json`"
            )
    assert name is not None
    profile = Profile(
        name="this GPU",
        about=f"{name}, measured {results.made}",
        network="100gbe",
        device=_device(results, name, kernels),
        plain=_plain_route(kernels),
        cc=None,
        sealed=_sealed_route(kernels),
    )
    for way in ("plain", "sealed"):
        profile = _with_wire(profile, way, _exchange(results, name, way))
    return profile


def _rate(case: KernelCase, what: str = "") -> Figure:
    return Figure(
        case.bytes / median_of(case.seconds),
        f"{what or case.kernel} kernel, {case.bytes} bytes a call, median",
    )


def _device(results: Results, name: str, kernels: dict[str, KernelCase]) -> Device:
    count = Figure(float(max(1, results.machine.gpus.count(name))), "GPUs of this machine")
    memory = results.machine.gpu_memory_bytes
    product = kernels.get("matmul")
    if product is None:
        peak = Figure(1e14, "assumption: no matrix product was measured")
    else:
        rate = product.operations / median_of(product.seconds)
        peak = Figure(rate, "float32 matrix product by its tensor cores (TF32), measured")
    training = list(reached(results, name))
    copy = _rate(kernels["copy"])
    return Device(
        kind="gpu",
        ranks_per_host=count,
        cores_per_host=count,
        memory_bytes=Figure(float(memory), "as its driver says")
        if memory
        else Figure(8e10, "assumption: the results do not say"),
        fp32_flops=peak,
        bf16_flops=Figure(2 * peak.value, f"assumption: twice as fast as TF32. {peak.source}"),
        efficiency=Figure(
            statistics.median(training) / peak.value, "training steps without communication"
        )
        if training
        else Figure(0.4, "38 to 43 % reached in training Llama 3 (arXiv 2407.21783, table 4)"),
        memory_bytes_per_s=Figure(2 * copy.value, f"twice: {copy.source}"),
    )


def _sealed_route(kernels: dict[str, KernelCase]) -> Route:
    opening, both = _rate(kernels["open"]), _rate(kernels["open_reduce"])
    more = 1 / both.value - 1 / opening.value
    launch = kernels.get("launch")
    route = {
        "seal_bytes_per_s": _rate(kernels["seal"]),
        "open_bytes_per_s": opening,
        "reduce_bytes_per_s": Figure(
            1 / more if more > 0 else 0.0, "what open_reduce takes more than open"
        ),
        "copy_bytes_per_s": _rate(kernels["copy"]),
        "record_bytes": Figure(float(kernels["seal"].record_bytes), "as the kernels were measured"),
        "overlaps": Figure(1.0, "DDP exchanges a bucket as soon as it is full"),
        "core_share": Figure(1.0, "the kernels fill the GPU while they run"),
    }
    if launch is not None:
        took = median_of(launch.seconds)
        route["call_s"] = Figure(took, "one small record, launch to completion, median")
    return route_of(**route)


def _plain_route(kernels: dict[str, KernelCase]) -> Route:
    copy = _rate(kernels["copy"])
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
    """That of the most ranks, by the wire that is fastest: NCCL before Gloo where both are."""
    cases = [
        case
        for case in usable(results.allreduce)
        if case.device == name and case.variant == way and case.collective == "all_reduce"
    ]
    if not cases:
        raise ConfigurationError(
            f"these results have no {way} all-reduce on {name}: measure with `sealring bench gpu "
            "--results results.json`"
        )
    most = max(case.ranks for case in cases)
    largest = [case for case in cases if case.ranks == most]
    nccl = [case for case in largest if way == "plain" and case.transport == "nccl"]
    return min(nccl or largest, key=lambda case: median_of(case.seconds))


def _with_wire(profile: Profile, way: Way, case: CollectiveCase) -> Profile:
    """By bisection: the slower the wire, the longer the all-reduce."""
    network = load_network(profile.network)
    cluster = Cluster(case.ranks, case.ranks)
    measured = median_of(case.seconds)
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
        return alone(Setting(tried, way, network, cluster), Operation.ALL_REDUCE, case.bytes)

    slow, fast = 1e6, 1e13
    for _ in range(_HALVINGS):
        middle = (slow * fast) ** 0.5
        slow, fast = (middle, fast) if takes(middle) > measured else (slow, middle)
    return at(fast)
