"""Computes what follows from a results file, and has the figures that others published."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from sealring.lab.bench.harness import Comparison, compare, compare_apart
from sealring.lab.results import (
    CollectiveCase,
    KernelCase,
    LinkCase,
    Machine,
    Results,
    StepCase,
    usable,
)


@dataclass(frozen=True, slots=True)
class OverheadFigure:
    what: str
    overhead: float
    """The time of a step with protection, as a multiple of the time without."""
    source: str


# Published figures of others, with their sources. None was measured here.
STUDY: Final = "arXiv 2501.11771v3, 4 H100 TEEs, emulated driver path"
FIGURES: Final = (
    OverheadFigure("average of its models", 8.68, STUDY),
    OverheadFigure("GPT-2-XL, 25 MB buckets", 41.6, STUDY),
    OverheadFigure("GPT-2-XL, its best buckets", 3.03, STUDY),
)


# ---- what follows from a results file


@dataclass(frozen=True, slots=True)
class Overhead:
    """A protected step, compared with the plain step of the same run."""

    case: StepCase
    against_plain: Comparison

    @property
    def setting(self) -> str:
        return f"{self.case.model}, {self.case.ranks} ranks{on_gpu(self.case)}"


@dataclass(frozen=True, slots=True)
class Change:
    """An advice, and the part of a step's time that it saves."""

    what: str
    why: str
    gain: float


@dataclass(frozen=True, slots=True)
class Pair:
    """A case that two results have in common."""

    label: str
    before: float
    after: float
    change: Comparison


def on_gpu(case: StepCase | CollectiveCase) -> str:
    """The addition to a label if the tensors were on a GPU."""
    return "" if case.device == "cpu" else f" on GPUs, {case.transport}"


def overheads(results: Results) -> list[Overhead]:
    """The overheads in the order measured. Only steps of one run are compared."""
    steps = [case for case in usable(results.step) if case.bucket_cap_mb > 0]
    plain = {case.run: case for case in steps if case.variant == "plain"}
    return [
        Overhead(case, compare(case.seconds, plain[case.run].seconds))
        for case in steps
        if case.variant in ("sealed", "cc")
        and case.run in plain
        and len(case.seconds) == len(plain[case.run].seconds)
    ]


def best_buckets(found: Sequence[Overhead]) -> list[Overhead]:
    """The fastest bucket size for each model, ranks, batch, precision and variant."""
    fastest: dict[tuple[Any, ...], Overhead] = {}
    for each in found:
        case = each.case
        key = (case.model, case.ranks, case.batch, case.precision, case.variant)
        known = fastest.get(key)
        if known is None or median(case.seconds) < median(known.case.seconds):
            fastest[key] = each
    return list(fastest.values())


def collective_overheads(results: Results) -> list[Comparison]:
    """Compares sealed collectives of CPU tensors with Gloo's in the same run.

    On a GPU a run has several plain variants, which plots.bars compares.
    """
    cases = [
        case for case in usable([*results.allreduce, *results.collectives]) if case.device == "cpu"
    ]

    def key(case: CollectiveCase) -> tuple[Any, ...]:
        return (case.run, case.collective, case.ranks, case.bytes)

    plain = {key(case): case.seconds for case in cases if case.variant == "plain"}
    return [
        compare(case.seconds, plain[key(case)])
        for case in cases
        if case.variant == "sealed" and len(plain.get(key(case), ())) == len(case.seconds)
    ]


def span_of(found: Sequence[Comparison]) -> str:
    """A text with the least and the largest ratio that is more than noise; '' if there is none."""
    told = [each for each in found if not each.only_noise]
    ratios = sorted({f"{each.ratio:.2f}" for each in told}, key=float)
    return " to ".join(dict.fromkeys((ratios[0], ratios[-1]))) if ratios else ""


def split_steps(results: Results) -> list[StepCase]:
    """The steps of communicating variants whose parts were recorded."""
    return [case for case in usable(results.step) if case.split and case.variant != "compute"]


def timeline_step(results: Results) -> StepCase | None:
    """The recorded step of the largest model, with the most collectives; None without one."""
    recorded = [case for case in results.step if case.timeline]
    return max(recorded, key=lambda case: (case.parameters, len(case.timeline)), default=None)


def hops(results: Results) -> list[LinkCase]:
    """The links with samples at every size, whose line, if there is one, has a slope."""
    return [
        case
        for case in results.link
        if usable(case.points) == case.points != []
        and all(point.bytes * point.messages > 0 for point in case.points)
        and (case.fit is None or case.fit.beta_low_bytes_per_s > 0)
    ]


def kernels(results: Results) -> list[KernelCase]:
    """The kernels measured with one process, which show the speed of one core."""
    return [case for case in usable(results.aead) if case.processes == 1]


# ---- advice


def changes(results: Results) -> list[Change]:
    """The advice, with the largest gain first. A gain is never more than the measured time that was
    spent on its cause."""
    found = [*_better_buckets(results), *_largest_parts(results), *_better_transport(results)]
    return sorted(found, key=lambda change: change.gain, reverse=True)


def _better_buckets(results: Results) -> Iterator[Change]:
    """Advice on bucket sizes. These are measured one after the other, while the machine's speed may
    drift, so this compares their overheads over the plain steps measured at the same time."""
    by_setting: dict[tuple[Any, ...], list[Overhead]] = {}
    for each in overheads(results):
        case = each.case
        if case.variant == "sealed":
            key = (case.model, case.ranks, case.batch, case.precision)
            by_setting.setdefault(key, []).append(each)
    for (model, ranks, _, _), found in by_setting.items():
        best = min(found, key=lambda each: each.against_plain.ratio)
        usual = min(found, key=lambda each: abs(each.case.bucket_cap_mb - 25))
        if best.against_plain.high < usual.against_plain.low:
            yield Change(
                f"Give DDP bucket_cap_mb={best.case.bucket_cap_mb:g} for {model} on {ranks} ranks",
                f"{best.case.all_reduces} all-reduces a step instead of {usual.case.all_reduces} "
                f"with {usual.case.bucket_cap_mb:g} MB; measured here",
                1 - best.against_plain.ratio / usual.against_plain.ratio,
            )


_WHY = {
    "wait": (
        "Let ranks start together, and give each a core of its own",
        "ranks wait for each other's records; with more ranks than cores they wait for a core",
    ),
    "transfer": (
        "Move less, or move it faster: shared memory inside a host, a faster link between hosts, "
        "gradients in bf16",
        "copies and system calls that carry the records",
    ),
    "reduce": ("Reduce less: gradients in bf16", "adding up what the others sent"),
}


_WIDE_AES: Final = {"vaes", "vpclmulqdq", "avx512f"}
_FIRST_WITH_WIDE_AES: Final = (3, 1)


def _faster_cipher(machine: Machine) -> str:
    """What would seal faster than this CPU with this OpenSSL."""
    version = re.search(r"(\d+)\.(\d+)", machine.openssl)
    known = (int(version[1]), int(version[2])) if version else _FIRST_WITH_WIDE_AES
    if machine.architecture != "x86_64":
        return "a faster core, or sealring's GPU engine"
    if not set(machine.features) >= _WIDE_AES:
        return "a CPU with vector AES (VAES and AVX-512), or sealring's GPU engine"
    if known < _FIRST_WITH_WIDE_AES:
        return (
            f"this CPU has vector AES (VAES), which {machine.openssl} does not use: build sealring "
            "with OpenSSL 3.1 or later (docs/configuration.md)"
        )
    return "sealring's GPU engine; vector AES (VAES) is in use already"


def _advice(part: str, machine: Machine) -> tuple[str, str] | None:
    if part in ("seal", "open"):
        verb, noun = ("Seal", "sealing") if part == "seal" else ("Open", "opening")
        return f"{verb} faster: {_faster_cipher(machine)}", f"{noun} is bound by one core's AES"
    return _WHY.get(part)


def _largest_parts(results: Results) -> Iterator[Change]:
    """Advice from the slowest sealed step: the gain if one of its parts took no time."""
    sealed = [case for case in split_steps(results) if case.variant == "sealed"]
    if not sealed:
        return
    slowest = max(sealed, key=lambda case: median(case.seconds))
    step = sum(part.exposed_s for part in slowest.split)
    for part in slowest.split:
        advice = _advice(part.name, results.machine)
        if advice is not None and step and part.exposed_s / step >= 0.01:
            what, why = advice
            yield Change(
                what,
                f"{why}: {part.exposed_s * 1e3:.1f} ms of a step of {slowest.model} on "
                f"{slowest.ranks} ranks, if it took no time at all",
                part.exposed_s / step,
            )


def _better_transport(results: Results) -> Iterator[Change]:
    lines = {
        case.transport: case.fit
        for case in hops(results)
        if case.operation == "all_reduce" and case.variant == "sealed" and case.fit is not None
    }
    steps = [case for case in usable(results.step) if case.variant == "sealed"]
    memory, network = lines.get("shm"), lines.get("tcp")
    over_network = [case for case in steps if case.transport == "tcp"]
    if memory is None or network is None or not over_network:
        return
    slower = median(over_network[0].seconds)
    saved = over_network[0].sealed_bytes * (
        1 / network.beta_bytes_per_s - 1 / memory.beta_bytes_per_s
    )
    if 0 < saved < slower:
        yield Change(
            "Let ranks of one host share memory (SEALRING_TRANSPORT=auto)",
            "a byte costs less there than over TCP, by the lines fitted below",
            saved / slower,
        )


# ---- two results


def pairs(before: Results, after: Results) -> list[Pair]:
    """The cases that both results have. If one result has several equal cases, the first counts."""
    found: list[Pair] = []
    for section, key, label in _SECTIONS:
        old, new = (
            {key(case): case for case in reversed(usable(getattr(each, section)))}
            for each in (before, after)
        )
        for name, case in reversed(new.items()):
            if (known := old.get(name)) is not None:
                found.append(
                    Pair(
                        label(case),
                        median(known.seconds),
                        median(case.seconds),
                        compare_apart(case.seconds, known.seconds),
                    )
                )
    return found


def _kernel_label(case: KernelCase) -> str:
    where = "memory" if case.moved_bytes else "cache"
    return f"{case.kernel} from {where}, {case.processes} at once"


_SECTIONS: Sequence[tuple[str, Callable[[Any], tuple[Any, ...]], Callable[[Any], str]]] = (
    (
        "step",
        lambda c: (
            c.model, c.ranks, c.batch, c.precision, c.bucket_cap_mb, c.transport, c.variant,
            c.device,
        ),
        lambda c: (
            f"step {c.model}, {c.ranks} ranks{on_gpu(c)}, {c.bucket_cap_mb:g} MB, {c.variant}"
        ),
    ),
    (
        "allreduce",
        lambda c: (c.collective, c.ranks, c.bytes, c.dtype, c.transport, c.variant, c.device),
        lambda c: f"all-reduce {c.bytes} B, {c.ranks} ranks{on_gpu(c)}, {c.variant}",
    ),
    (
        "collectives",
        lambda c: (c.collective, c.ranks, c.bytes, c.dtype, c.transport, c.variant, c.device),
        lambda c: f"{c.collective} {c.bytes} B, {c.ranks} ranks, {c.variant}",
    ),
    (
        "aead",
        lambda c: (
            c.kernel, c.device, c.suite, c.bytes, c.record_bytes, c.processes, c.moved_bytes
        ),
        _kernel_label,
    ),
    (
        "gpu",
        lambda c: (
            c.kernel, c.device, c.suite, c.bytes, c.record_bytes, c.processes, c.moved_bytes
        ),
        _kernel_label,
    ),
)  # fmt: skip
