"""What was measured on a GPU, each beside the bar that it has to reach."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Final

from sealring.lab.bench.harness import compare
from sealring.lab.results import CollectiveCase, KernelCase, Results, StepCase, usable

_RATES: Final = {"seal": 950.0, "open": 950.0, "open_reduce": 700.0, "hop": 450.0}
"""GB/s at least: of plaintext, or of wire, which is the same but for headers. NVLink 4 carries 450
one way."""
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
"""So many have this bar, over peer memory; by other numbers that is for information."""
_OVER_NCCL: Final = 1.0


@dataclass(frozen=True, slots=True)
class Row:
    part: str
    what: str
    value: float
    unit: str
    at_least: float | None = None
    at_most: float | None = None
    detail: str = ""
    low: float | None = None
    high: float | None = None
    """Where 19 of 20 repetitions would find a ratio."""

    @property
    def met(self) -> bool | None:
        if self.at_least is not None:
            return self.value >= self.at_least
        return None if self.at_most is None else self.value <= self.at_most

    @property
    def bar(self) -> str:
        if self.at_least is not None:
            return f"≥ {self.at_least:g}"
        return "-" if self.at_most is None else f"≤ {self.at_most:g}"

    @property
    def reached(self) -> float | None:
        """How many times as good as its bar; 1 is just good enough."""
        if self.at_least is not None:
            return self.value / self.at_least
        return self.at_most / self.value if self.at_most is not None and self.value else None

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.met}


def rows_of(results: Results) -> list[Row]:
    """In the order measured; samples are compared only with those of the same run."""
    return [
        *_kernels(usable(results.gpu)),
        *_exchanges([case for case in usable(results.allreduce) if case.device != "cpu"]),
        *_steps([case for case in usable(results.step) if case.device != "cpu"]),
    ]


def _kernels(cases: Sequence[KernelCase]) -> Iterator[Row]:
    for case in cases:
        seconds = median(case.seconds)
        name = _NAMES.get(case.kernel, case.kernel)
        size = f"{case.bytes / 2**30:g} GiB in {case.record_bytes >> 10} KiB records"
        if case.kernel == "launch":
            detail = "launch to completion"
            yield Row("kernels", name, round(seconds * 1e6, 1), "µs", None, _LAUNCH_US, detail)
        elif case.kernel == "matmul":
            yield Row("kernels", name, round(case.operations / seconds / 1e12, 1), "Top/s")
        else:
            rate = round(case.bytes / seconds / 1e9, 1)
            detail = size if case.suite else ""
            yield Row("kernels", name, rate, "GB/s", _RATES.get(case.kernel), None, detail)


def _exchanges(cases: Sequence[CollectiveCase]) -> Iterator[Row]:
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


def _steps(cases: Sequence[StepCase]) -> Iterator[Row]:
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
) -> Iterator[Row]:
    if len(one.seconds) != len(other.seconds):
        return
    told = compare(one.seconds, other.seconds)
    detail = f"sealed {_ms(one)}, {name} {_ms(other)}"
    yield Row(
        part, what, round(told.ratio, 3), "x", None, bar, detail,
        round(told.low, 3), round(told.high, 3),
    )  # fmt: skip


def _ms(case: CollectiveCase | StepCase) -> str:
    return f"{median(case.seconds) * 1e3:,.1f} ms"
