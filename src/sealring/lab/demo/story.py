"""The demo from its first worker to its verdict. Every sentence of it is computed, none assumed."""

from __future__ import annotations

import statistics
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

import torch.distributed  # noqa: F401 (makes the module below importable)
from torch._C._distributed_c10d import TCPStore

from sealring.core.schedule import chunks, segment_bytes
from sealring.errors import TamperedRecord
from sealring.lab.bench.harness import Samples
from sealring.lab.bench.models import Shape
from sealring.lab.bench.workers import run_workers
from sealring.lab.demo.train import Act, Backend, Ending, Gradients, Plan, Step, work
from sealring.lab.demo.wiretap import (
    PAIR,
    SEALED_HEADER_BYTES,
    Flip,
    Flipped,
    Relay,
    Sighting,
    Wire,
    entropy,
    longest_plaintext_run,
    real_address,
)
from sealring.limits import RECORD_BYTES

BATCH: Final = 2
FLIP: Final = Flip(gradient=4)
"""DDP sends one bucket in its first step and two in each that follows: this is the third's."""
_RING: Final = {"SEALRING_ALGORITHM": "ring"}
"""In a ring it is known which record carries a rank's own gradient, whatever the table chooses."""
EARLY_STEPS: Final = 20
EARLY_TOLERANCE: Final = 1e-3
FINAL_TOLERANCE: Final = 0.05
"""Both backends add the same numbers in another order, and training magnifies the last digit: the
losses agree closely at first, and in the end as two good runs do."""
LEAST_ENTROPY: Final = 7.99
_RECENT: Final = 10


@dataclass(frozen=True, slots=True)
class WholeStep:
    """One training step over all ranks."""

    loss: float
    seconds: float
    sealed_bytes: int


@dataclass
class Training:
    ranks: int
    steps: int
    curves: dict[Backend, list[WholeStep]] = field(
        default_factory=lambda: {"sealring": [], "gloo": []}
    )
    _partial: dict[tuple[Backend, int], list[Step]] = field(default_factory=dict)

    def add(self, step: Step) -> bool:
        """Whether the step is whole now: all ranks have reported it."""
        parts = self._partial.setdefault((step.backend, step.number), [])
        parts.append(step)
        if len(parts) < self.ranks:
            return False
        self.curves[step.backend].append(
            WholeStep(
                loss=statistics.fmean(part.loss for part in parts),
                seconds=statistics.fmean(part.seconds for part in parts),
                sealed_bytes=sum(part.sealed_bytes for part in parts),
            )
        )
        return True

    @property
    def done(self) -> float:
        """In steps; one over both backends counts as a whole."""
        return sum(len(curve) for curve in self.curves.values()) / len(self.curves)

    def time_per_step(self, backend: Backend) -> Samples:
        return Samples(tuple(step.seconds for step in self.curves[backend]))

    def sealed_rate(self) -> float:
        """Bytes a second that all ranks together sealed in their latest sealed steps."""
        recent = self.curves["sealring"][-_RECENT:]
        return sum(s.sealed_bytes for s in recent) / (sum(s.seconds for s in recent) or 1.0)

    def final_loss(self, backend: Backend) -> float:
        """The mean of the last steps: a single step's depends on what its batch happens to be."""
        return statistics.fmean(step.loss for step in self.curves[backend][-_RECENT:])

    @property
    def sealed_bytes(self) -> int:
        return sum(step.sealed_bytes for step in self.curves["sealring"])

    @property
    def overhead(self) -> float:
        return self.time_per_step("sealring").median / self.time_per_step("gloo").median

    def largest_difference(self, steps: int | None = None) -> float:
        """Of the losses, at any step or any of the first ones."""
        sealed, gloo = self.curves["sealring"][:steps], self.curves["gloo"][:steps]
        return max(abs(one.loss - other.loss) for one, other in zip(sealed, gloo, strict=True))

    @property
    def final_difference(self) -> float:
        return abs(self.final_loss("sealring") - self.final_loss("gloo"))


@dataclass(frozen=True, slots=True)
class Tapped:
    """What the wiretap knows after its run, and what it would have liked to know."""

    listener: int
    lured: int
    bytes_seen: int
    setup_bytes: int
    records: int
    searched_bytes: int
    """Sealed payload of the last step, both ways."""
    entropy: float
    plaintext_entropy: float
    longest_run: int
    record: Sighting
    header: bytes
    sealed: bytes
    plain: bytes
    """The same bytes of the gradient, before sealing."""


@dataclass(frozen=True, slots=True)
class Attacked:
    lured: int
    flipped: Flipped | None
    endings: dict[int, Ending]

    @property
    def caught_by(self) -> list[int]:
        """The ranks that saw for themselves that a record was changed."""
        return [
            rank
            for rank, ending in sorted(self.endings.items())
            if ending.error == TamperedRecord.__name__ and ending.reported_by is None
        ]

    @property
    def told(self) -> list[int]:
        """The ranks that ended with the same error because that rank reported it."""
        return [
            rank
            for rank, ending in sorted(self.endings.items())
            if ending.error == TamperedRecord.__name__ and ending.reported_by == self.lured
        ]

    @property
    def weights_intact(self) -> bool:
        """Every rank holds the weights of the last whole step, and all hold the same."""
        held = {ending.weights for ending in self.endings.values()}
        return len(held) == 1 and all(
            ending.weights == ending.weights_before for ending in self.endings.values()
        )

    def milliseconds(self, rank: int) -> float:
        """From the flip to the exception in the training loop."""
        return (self.endings[rank].at - self.flipped.at) * 1e3 if self.flipped else 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    training: Training
    tapped: Tapped
    attacked: Attacked
    audits: list[str] = field(default_factory=list)
    """What the audits of recorded runs did not say as they should."""

    def surprises(self) -> list[str]:
        """What did not go as sealring promises; empty if all is well."""
        tapped, attacked = self.tapped, self.attacked
        early, final = self.training.largest_difference(EARLY_STEPS), self.training.final_difference
        others = sorted(set(attacked.endings) - {attacked.lured})
        expectations = {
            f"the losses over sealring and over Gloo differ by {early:.3g} within the first "
            f"{EARLY_STEPS} steps": early <= EARLY_TOLERANCE,
            f"the final losses over sealring and over Gloo differ by {final:.3g}": final
            <= FINAL_TOLERANCE,
            f"the wiretap found {tapped.longest_run} bytes of a gradient": tapped.longest_run == 0,
            f"the sealed payload has {tapped.entropy:.4f} bits of entropy per byte": tapped.entropy
            >= LEAST_ENTROPY,
            "no bit was flipped: the gradient that the attacker waited for never passed": (
                attacked.flipped is not None
            ),
            f"rank {attacked.lured} should have caught the flipped bit, and {attacked.caught_by} "
            "did": attacked.caught_by == [attacked.lured],
            f"ranks {others} should have ended with rank {attacked.lured}'s report, and "
            f"{attacked.told} did": attacked.told == others,
            "the ranks' weights are not those of the last whole step": attacked.weights_intact,
        }
        return [*(text for text, good in expectations.items() if not good), *self.audits]


def perform(ranks: int, steps: int) -> Generator[Training | Tapped | Attacked]:
    """Runs the demo; yields the training as it proceeds, then what became of the other runs."""
    with ExitStack() as stack:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        tap = stack.enter_context(Relay(lambda: real_address(store)))
        attack = stack.enter_context(Relay(lambda: real_address(store), FLIP))
        plan = Plan(
            ranks, steps, BATCH, Shape(), ("127.0.0.1", store.port), tap.address, attack.address
        )
        training = Training(ranks, steps)
        yield training
        gradients = Gradients()
        leaving: set[int] = set()
        endings: dict[int, Ending] = {}
        for rank, report in run_workers(ranks, work, plan, environment=_RING):
            match report:
                case Step():
                    if training.add(report):
                        yield training
                case Gradients():
                    gradients = report
                case Act("attack"):
                    leaving.add(rank)
                    if len(leaving) == ranks:
                        yield _examine(plan, tap, gradients)
                case Ending():
                    endings[rank] = report
        towards, _ = attack.link
        yield Attacked(plan.lured, towards.flipped, endings)


def _examine(plan: Plan, tap: Relay, gradients: Gradients) -> Tapped:
    towards, back = tap.link
    last = towards.gradients[-len(gradients.own) :]
    sealed = b"".join(_payloads(wire, last) for wire in (towards, back))
    record, plain = _example(plan, towards, last[0], gradients.own[0])
    return Tapped(
        listener=plan.listener,
        lured=plan.lured,
        bytes_seen=towards.dissector.seen + back.dissector.seen,
        setup_bytes=towards.dissector.setup_bytes + back.dissector.setup_bytes,
        records=len(towards.sightings) + len(back.sightings),
        searched_bytes=len(sealed),
        entropy=entropy(sealed),
        plaintext_entropy=entropy(b"".join(gradients.own)),
        longest_run=longest_plaintext_run(sealed, (*gradients.own, *gradients.summed)),
        record=record,
        header=bytes(towards.stream[record.start : record.start + SEALED_HEADER_BYTES]),
        sealed=bytes(towards.stream[record.payload]),
        plain=plain,
    )


def _payloads(wire: Wire, collectives: list[int]) -> bytes:
    return b"".join(
        wire.stream[sighting.payload]
        for sighting in wire.sightings
        if sighting.is_gradient and sighting.fields["collective"] in collectives
    )


def _example(plan: Plan, wire: Wire, collective: int, bucket: bytes) -> tuple[Sighting, bytes]:
    """A record whose plaintext is the sender's own gradient, and that plaintext.

    In a ring, a rank's first chunk leaves as it is; all later ones are sums already.
    """
    chunk = (plan.listener - 1) % plan.ranks
    cuts = chunks(len(bucket) // 4, plan.ranks, 4)
    start, length = cuts[chunk]
    size = min(length, segment_bytes(max(length for _, length in cuts), RECORD_BYTES))
    expected = {
        "kind": PAIR,
        "sender": plan.listener,
        "collective": collective,
        "message": chunk,
        "segment": 0,
        "total": len(bucket),
        "length": size,
    }
    for sighting in wire.sightings:
        if expected.items() <= sighting.fields.items():
            return sighting, bucket[start : start + size]
    raise RuntimeError(f"the wiretap did not see a record with {expected}")
