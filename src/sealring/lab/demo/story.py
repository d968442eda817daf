"""The demo, from its first worker to its verdict. All its statements are computed from the run."""

from __future__ import annotations

import statistics
import struct
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

import torch.distributed  # noqa: F401 (makes the module below importable)
from rich.console import RenderableType
from rich.markup import escape
from rich.rule import Rule
from rich.table import Table
from rich.text import Text
from torch._C._distributed_c10d import TCPStore

from sealring import limits
from sealring.core.engine.collective import DType, ReduceKind
from sealring.core.schedule import Algorithm, Operation, chunks, segment_bytes
from sealring.core.settings import with_settings
from sealring.errors import TamperedRecord
from sealring.lab.bench.harness import Timings
from sealring.lab.bench.models import ModelShape, make_model
from sealring.lab.bench.workers import run_workers
from sealring.lab.demo.train import (
    ATTACKED_STEPS,
    TAPPED_STEPS,
    Act,
    AuditedRun,
    Backend,
    Ending,
    Gradients,
    TrainingPlan,
    TrainingStep,
    work,
)
from sealring.lab.demo.wiretap import (
    GROUP,
    PAIR,
    SEALED_HEADER_BYTES,
    SHORTEST_RUN,
    Flip,
    Flipped,
    Relay,
    Sighting,
    TappedWire,
    entropy,
    longest_plaintext_run,
    real_address,
)
from sealring.limits import RECORD_BYTES
from sealring.record.audit.page import Beside

BATCH: Final = 2
FLIP: Final = Flip(gradient=4)
"""DDP sends one bucket in its first step and two in each later one: this is in the third step."""
_RING: Final = with_settings({}, algorithm="ring")
"""Forces the ring, in which it is known which record carries a rank's own gradient."""
EARLY_STEPS: Final = 20
EARLY_TOLERANCE: Final = 1e-3
FINAL_TOLERANCE: Final = 0.05
"""The two backends add the same numbers in different orders, and training magnifies the rounding.
So the losses agree closely at first, and at the end as well as those of two good runs."""
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
    _partial: dict[tuple[Backend, int], list[TrainingStep]] = field(default_factory=dict)

    def add(self, step: TrainingStep) -> bool:
        """Adds a rank's step; returns whether all ranks have now reported it."""
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
        """The number of finished steps; a step is finished when both backends have done it."""
        return sum(len(curve) for curve in self.curves.values()) / len(self.curves)

    def time_per_step(self, backend: Backend) -> Timings:
        return Timings(tuple(step.seconds for step in self.curves[backend]))

    def sealed_rate(self) -> float:
        """The bytes per second that all ranks together sealed in their latest steps."""
        recent = self.curves["sealring"][-_RECENT:]
        return sum(s.sealed_bytes for s in recent) / (sum(s.seconds for s in recent) or 1.0)

    def final_loss(self, backend: Backend) -> float:
        """The mean of the last steps' losses, because a single one depends on its batch."""
        return statistics.fmean(step.loss for step in self.curves[backend][-_RECENT:])

    @property
    def sealed_bytes(self) -> int:
        return sum(step.sealed_bytes for step in self.curves["sealring"])

    @property
    def overhead(self) -> float:
        return self.time_per_step("sealring").median / self.time_per_step("gloo").median

    def largest_difference(self, steps: int | None = None) -> float:
        """The largest difference of the two losses, over all steps or over the first `steps`."""
        sealed, gloo = self.curves["sealring"][:steps], self.curves["gloo"][:steps]
        return max(abs(one.loss - other.loss) for one, other in zip(sealed, gloo, strict=True))

    @property
    def final_difference(self) -> float:
        return abs(self.final_loss("sealring") - self.final_loss("gloo"))


@dataclass(frozen=True, slots=True)
class Tapped:
    """What the wiretap saw in its run, and the plaintext that it did not see."""

    listener: int
    lured: int
    bytes_seen: int
    setup_bytes: int
    records: int
    searched_bytes: int
    """The bytes of sealed payload of the last step, in both directions."""
    entropy: float
    plaintext_entropy: float
    longest_run: int
    record: Sighting
    header: bytes
    sealed: bytes
    plain: bytes
    """The bytes of the gradient before sealing."""


@dataclass(frozen=True, slots=True)
class Attacked:
    lured: int
    flipped: Flipped | None
    endings: dict[int, Ending]

    @property
    def caught_by(self) -> list[int]:
        """The ranks that themselves detected the changed record."""
        return [
            rank
            for rank, ending in sorted(self.endings.items())
            if ending.error == TamperedRecord.code and ending.reported_by is None
        ]

    @property
    def told(self) -> list[int]:
        """The ranks that ended with this error because the lured rank reported it."""
        return [
            rank
            for rank, ending in sorted(self.endings.items())
            if ending.error == TamperedRecord.code and ending.reported_by == self.lured
        ]

    @property
    def weights_intact(self) -> bool:
        """Whether all ranks have the same weights, those of the last complete step."""
        held = {ending.weights for ending in self.endings.values()}
        return len(held) == 1 and all(
            ending.weights == ending.weights_before for ending in self.endings.values()
        )

    def milliseconds(self, rank: int) -> float:
        """The milliseconds from the flip to the exception in the training loop."""
        return (self.endings[rank].at - self.flipped.at) * 1e3 if self.flipped else 0.0


@dataclass(frozen=True, slots=True)
class DemoOutcome:
    training: Training
    tapped: Tapped
    attacked: Attacked
    audits: list[str] = field(default_factory=list)
    """Unexpected results of the audits of recorded runs."""

    def surprises(self) -> list[str]:
        """Everything that was not as sealring promises; empty if all is well."""
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
    """Runs the demo; yields the training as it proceeds, then the results of the other runs."""
    with ExitStack() as stack:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        tap = stack.enter_context(Relay(lambda: real_address(store)))
        attack = stack.enter_context(Relay(lambda: real_address(store), FLIP))
        plan = TrainingPlan(
            ranks,
            steps,
            BATCH,
            ModelShape(),
            ("127.0.0.1", store.port),
            tap.address,
            attack.address,
        )
        training = Training(ranks, steps)
        yield training
        gradients = Gradients()
        leaving: set[int] = set()
        endings: dict[int, Ending] = {}
        for rank, report in run_workers(ranks, work, plan, environment=_RING):
            match report:
                case TrainingStep():
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


def _examine(plan: TrainingPlan, tap: Relay, gradients: Gradients) -> Tapped:
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


def _payloads(wire: TappedWire, collectives: list[int]) -> bytes:
    return b"".join(
        wire.stream[sighting.payload]
        for sighting in wire.sightings
        if sighting.is_gradient and sighting.fields["collective"] in collectives
    )


def _example(
    plan: TrainingPlan, wire: TappedWire, collective: int, bucket: bytes
) -> tuple[Sighting, bytes]:
    """Returns a record whose plaintext is the sender's own gradient, and that plaintext.

    In a ring, a rank's first chunk is its own; all later ones are sums.
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


# ---- printing the results


_ROW: Final = 12
"""Bytes in a line of the dump: three floats."""
_ROWS: Final = 4


def opening(ranks: int, steps: int) -> Iterator[RenderableType]:
    parameters = sum(value.numel() for value in make_model(ModelShape(), 0).parameters())
    yield Rule("1. Training over sealed links")
    yield (
        f"{ranks} workers train a GPT of {parameters / 1e6:.2f} million parameters on the Python "
        f"standard library's sources, {steps} steps over sealring and, in turn with them, the "
        "same steps over plaintext Gloo.\n"
    )


def training(training: Training) -> Iterator[RenderableType]:
    first, final = training.curves["sealring"][0].loss, training.final_loss("sealring")
    yield (
        f"{training.steps} steps: loss {first:.3f} -> [bold]{final:.3f}[/] nats per byte. "
        f"The ranks sealed {_size(training.sealed_bytes)} of gradients for it.\n"
    )


def wiretap(tapped: Tapped) -> Iterator[RenderableType]:
    listener, lured = tapped.listener, tapped.lured
    yield Rule(f"2. A wiretap between rank {listener} and rank {lured}")
    yield (
        f"The rendezvous store is the attacker's. It told rank {lured} a false address for rank "
        f"{listener}, so {TAPPED_STEPS} more steps, over TCP, go through the attacker's relay. "
        "What it saw:\n"
    )
    facts = Table.grid(padding=(0, 2))
    facts.add_row(
        "traffic",
        f"{_size(tapped.bytes_seen)}: {_size(tapped.setup_bytes)} of TLS 1.3, then "
        f"{tapped.records:,} records",
    )
    facts.add_row(
        "entropy",
        f"{tapped.entropy:.4f} bits per byte of sealed payload "
        f"({tapped.plaintext_entropy:.4f} before)",
    )
    colour = "red" if tapped.longest_run else "green"
    facts.add_row(
        "plaintext",
        f"longest run of plaintext found: [bold {colour}]{tapped.longest_run} bytes[/]\n"
        f"(rank {listener}'s gradients and their sum, sought in "
        f"{_size(tapped.searched_bytes)} of the last\nstep's payload; "
        f"no run of {SHORTEST_RUN} bytes or more can be missed)",
    )
    yield facts
    yield ""
    yield _dump(tapped)


def _dump(tapped: Tapped) -> Table:
    """A table of the record's header, field by field, and of its payload beside the plaintext."""
    table = Table(title=f"One record from rank {tapped.listener} to rank {tapped.lured}")
    table.add_column("at", justify="right", style="dim")
    table.add_column("on the wire", style="cyan", no_wrap=True)
    table.add_column("meaning")
    header = tapped.header
    for start, end, meaning in _meanings(tapped.record.fields):
        table.add_row(str(start), _hex(header[start:end]), meaning)
    table.add_section()
    table.add_row("", "[dim]payload, sealed[/]", "[dim]before sealing[/]")
    for row in range(_ROWS):
        at = slice(row * _ROW, (row + 1) * _ROW)
        values = struct.unpack(f"<{_ROW // 4}f", tapped.plain[at])
        table.add_row(
            str(len(header) + at.start),
            _hex(tapped.sealed[at]),
            " ".join(f"{value:+.2e}" for value in values),
        )
    return table


def _meanings(fields: dict[str, int]) -> Iterator[tuple[int, int, str]]:
    kind = {PAIR: "for one peer", GROUP: "for the group"}[fields["kind"]]
    dtype, reduction = DType(fields["dtype"]), ReduceKind(fields["reduction"])
    operation, algorithm = Operation(fields["operation"]), Algorithm(fields["algorithm"])
    yield 0, 4, f'"SR", version 1, {kind}'
    yield 4, 8, f"length: {fields['length']:,} bytes"
    yield 8, 16, f"count: {fields['count']} under this key"
    yield 16, 24, f"lane {fields['lane']}, key generation {fields['generation']}"
    yield 24, 32, f"from rank {fields['sender']} to rank {fields['receiver']}"
    yield 32, 40, f"collective {fields['collective']}"
    words = " ".join(part.name.lower() for part in (operation, reduction, dtype, algorithm))
    yield 40, 44, words
    yield 44, 52, f"message {fields['message']}, segment {fields['segment']}"
    yield 52, 56, f"root {fields['root']}"
    yield 56, 64, f"of {fields['total']:,} bytes in all"
    yield 64, 80, "the header's tag"


def attack(attacked: Attacked) -> Iterator[RenderableType]:
    yield ""
    yield Rule("3. One flipped bit")
    flipped = attacked.flipped
    if flipped is None:
        yield "[red]The attacker flipped no bit.[/]\n"
    else:
        fields = flipped.record.fields
        yield (
            "A new group of the same workers trains on; this time the relay flips bit "
            f"{flipped.bit} of byte {flipped.offset - flipped.record.payload.start:,} of a sealed "
            f"gradient (collective {fields['collective']}) on its way to rank {attacked.lured}.\n"
        )
    table = Table()
    table.add_column("rank", justify="right")
    table.add_column("ended with", no_wrap=True)
    table.add_column("it says")
    table.add_column("after", justify="right", no_wrap=True)
    for rank, ending in sorted(attacked.endings.items()):
        caught = rank in attacked.caught_by
        table.add_row(
            f"[bold]{rank}[/]" if caught else str(rank),
            escape(ending.error or ending.raised or f"nothing, in {ATTACKED_STEPS} steps"),
            escape(_first_sentence(ending.message)),
            f"{attacked.milliseconds(rank):.0f} ms" if ending.raised else "",
            style="bold" if caught else "",
        )
    yield table
    for rank in attacked.caught_by:
        ending = attacked.endings[rank]
        yield (
            f"[bold green]Rank {rank} caught it[/] in step {ending.whole_steps + 1}; the run ended "
            "on every rank."
            if all(e.raised for e in attacked.endings.values())
            else f"[red]Rank {rank} caught it, and the run did not end on every rank.[/]"
        )
    held = {ending.weights[:8] for ending in attacked.endings.values()}
    if attacked.weights_intact and attacked.caught_by:
        yield (
            f"Nothing of the changed gradient was used: all ranks hold weights {held.pop()}, those "
            "of the last whole step.\n"
        )
    else:
        yield f"[red]The ranks hold weights {', '.join(sorted(held))}.[/]\n"


def costs(training: Training) -> Beside:
    """A table of the time of a step over each backend."""
    wires: tuple[tuple[Backend, str], ...] = (
        ("gloo", "plaintext"),
        ("sealring", f"sealed with {limits.SUITE}"),
    )
    rows = []
    for backend, wire in wires:
        samples = training.time_per_step(backend)
        took = f"{samples.median * 1e3:.0f} ms ±{samples.spread:.0%}"
        rows.append((backend, wire, took, f"{training.final_loss(backend):.4f}"))
    columns = ("backend", "on the wire", "time per step", "final loss")
    return Beside("What it costs", columns, rows)


def comparison(training: Training) -> Iterator[RenderableType]:
    found = costs(training)
    yield Rule(f"4. {found.title}")
    table = Table()
    for number, column in enumerate(found.columns):
        table.add_column(column, justify="right" if number > 1 else "left")
    for row in found.rows:
        table.add_row(*row)
    yield table
    yield (
        f"sealring : Gloo = [bold]{training.overhead:.3f}[/] (medians of {training.steps} steps "
        f"each). The losses never differ by more than {training.largest_difference():.1g}. "
        "Between workers of one machine sealring uses shared memory where it can, Gloo TCP.\n"
    )


def audits(audited: list[AuditedRun]) -> Iterator[RenderableType]:
    yield Rule("5. A recorded run, audited from its folder alone")
    table = Table("run", "workers", "the audit says")
    what = {
        "honest": "from a sealed vault",
        "resumed": "from its checkpoint, on fewer workers",
        "lying": "rank 1 signs another count",
    }
    for one in audited:
        said = "\n".join(one.findings) or "no record contradicts another"
        table.add_row(f"{one.name}: {what[one.name]}", str(one.ranks), Text(said))
    yield table


def verdict(outcome: DemoOutcome, seconds: float) -> Iterator[RenderableType]:
    surprises = outcome.surprises()
    if not surprises:
        yield f"[green]All of it went as sealring promises[/], in {seconds:.0f} s."
        return
    yield f"[bold red]Not as promised[/], after {seconds:.0f} s:"
    for surprise in surprises:
        yield f"  - {escape(surprise)}"


def _first_sentence(text: str) -> str:
    return text.split(". ", 1)[0]


def _hex(data: bytes) -> str:
    if len(data) > _ROW:
        return f"{data[: _ROW - 1].hex(' ')} .."
    return data.hex(" ")


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"
