"""One model in training by one variant, and what a step of it was made of."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Final, Literal

from sealring.bench.place import settle
from sealring.bench.timeline import Ran, Stamps, exposed_ns, parts_of, ran_in, spans_of
from sealring.results import Part, Span

if TYPE_CHECKING:
    import torch

    from sealring.bench.cc import CcRing

_RECORDED: Final = 3
"""Steps that are recorded after the timed ones; the one of median length is kept."""
_PHASED: Final = 7
"""Steps without communication from which the phases' lengths are taken."""


Precision = Literal["fp32", "bf16"]
WIDTHS: Final[dict[Precision, int]] = {"fp32": 4, "bf16": 2}
_COPIES: Final = 5
"""Of the parameters in one trainee: weights, gradients, their buckets, and AdamW's two moments."""


def count_of(model: str) -> int:
    """Its parameters, without the memory for them."""
    import torch

    from sealring.bench.models import build

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build(model).parameters())


def training_bytes(model: str, precision: Precision) -> int:
    """What one trainee takes, but for activations."""
    return _COPIES * count_of(model) * WIDTHS[precision]


@dataclass(frozen=True, slots=True)
class Recorded:
    split: list[Part]
    timeline: list[Span]
    all_reduces: int
    sealed_bytes: int


class Trainee:
    def __init__(
        self,
        variant: str,
        name: str,
        batch: int,
        precision: str,
        bucket_cap_mb: float,
        *,
        rank: int,
        device: torch.device,
        sealed: Any,
        plain: Any,
        ring: CcRing | None,
    ) -> None:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        from sealring.bench.models import build, find

        self._variant, self._group, self._ring = variant, sealed, ring
        self._device, self._on_gpu = device, device.type == "cuda"
        workload = find(name)
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
        with device:
            model = build(name).to(dtype)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.tokens = batch * workload.tokens
        inputs, targets = workload.draw(batch, torch.Generator().manual_seed(rank))
        self._inputs = inputs.to(device, dtype if inputs.is_floating_point() else inputs.dtype)
        self._targets = targets.to(device)
        self._model = model
        if variant != "compute":
            wrapped = DistributedDataParallel(
                model,
                process_group=sealed if variant == "sealed" else plain,
                bucket_cap_mb=bucket_cap_mb,
            )
            if variant == "cc":
                # A lambda: DDP compares annotations with its own types, and these are strings.
                wrapped.register_comm_hook(ring, lambda ring, bucket: ring.average(bucket))
            self._model = wrapped
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self._stamps: list[Stamps] = []

    def step(self, *, phased: bool = False) -> None:
        """One step to its end. Where a GPU computes behind the script's back, `phased` waits for it
        after each phase, so that the stamps are the phases'."""
        import torch

        def now(wait: bool = phased) -> int:
            if wait:
                settle(self._device)
            return time.monotonic_ns()

        start = now()
        loss = self._model(self._inputs, self._targets)
        self._optimizer.zero_grad()
        forward = now()
        with torch.profiler.record_function("backward"):
            loss.backward()
        backward = now()
        self._optimizer.step()
        self._stamps.append(Stamps(start, forward, backward, now(wait=True)))

    def recorded(self) -> Recorded:
        """All ranks call it: they train a few steps more."""
        if self._variant == "compute":
            # A CPU's timed steps have true stamps already.
            for _ in range(_PHASED if self._on_gpu else 0):
                self.step(phased=True)
            return Recorded(_phases(self._stamps[-_PHASED:]), [], 0, 0)
        steps = sorted((self._record() for _ in range(_RECORDED)), key=lambda each: each[0])
        return steps[_RECORDED // 2][1]

    def _record(self) -> tuple[int, Recorded]:
        before, spent = self._group.account(), dict(self._ring.spent_s) if self._ring else {}
        reduced = self._ring.all_reduces if self._ring else 0
        self.step(phased=True)
        stamps = self._stamps[-1]
        length = stamps.end - stamps.start
        if self._variant == "sealed":
            after = self._group.account()
            ran = ran_in(stamps, self._group.recorder.account(since_1970_ns=0).collectives)
            # On a GPU the engine's account is that of the thread that launches kernels.
            split = _talked(stamps, ran) if self._on_gpu else parts_of(stamps, ran, before, after)
            return length, Recorded(
                split=split,
                timeline=spans_of(stamps, ran),
                all_reduces=sum(each.name == "all_reduce" for each in ran),
                sealed_bytes=after["sealed_bytes"] - before["sealed_bytes"],
            )
        if self._ring is not None and self._variant == "cc":
            took = {name: now - spent[name] for name, now in self._ring.spent_s.items()}
            return length, Recorded(
                _all_exposed(length * 1e-9, took), [], self._ring.all_reduces - reduced, 0
            )
        return length, Recorded([], [], 0, 0)


def _phases(steps: list[Stamps]) -> list[Part]:
    return [
        Part("forward", median(each.forward - each.start for each in steps) * 1e-9, 0.0),
        Part("backward", median(each.backward - each.forward for each in steps) * 1e-9, 0.0),
        Part("optimizer", median(each.end - each.backward for each in steps) * 1e-9, 0.0),
    ]


def _talked(stamps: Stamps, ran: list[Ran]) -> list[Part]:
    """Computing, and all of the collectives as one part."""
    exposed = exposed_ns(stamps, ran) * 1e-9
    busy = sum(each.ended - each.started for each in ran) * 1e-9
    step = (stamps.end - stamps.start) * 1e-9
    return [
        Part("compute", max(0.0, step - exposed), 0.0),
        Part("transfer", exposed, busy - exposed),
    ]


def _all_exposed(step: float, took: dict[str, float]) -> list[Part]:
    rest = max(0.0, step - sum(took.values()))
    return [
        Part("compute", rest, 0.0),
        Part("seal", took["seal"], 0.0),
        Part("transfer", took["transfer"], 0.0),
        Part("open", took["open"], 0.0),
        Part("reduce", took["reduce"], 0.0),
    ]
