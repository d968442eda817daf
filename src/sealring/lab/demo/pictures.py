"""The demo's results as people read them."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

from rich.console import RenderableType
from rich.markup import escape
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from sealring import limits
from sealring.core.engine.datatypes import DType, ReduceKind
from sealring.core.schedule import Algorithm, Operation
from sealring.lab.bench.models import Shape, make_model
from sealring.lab.demo.recorded import Audited
from sealring.lab.demo.story import Attacked, Outcome, Tapped, Training
from sealring.lab.demo.train import ATTACKED_STEPS, TAPPED_STEPS, Backend
from sealring.lab.demo.wiretap import GROUP, PAIR, SHORTEST_RUN
from sealring.record.audit.page import Beside

_ROW: Final = 12
"""Bytes in a line of a dump: three floats."""
_ROWS: Final = 4


def opening(ranks: int, steps: int) -> Iterator[RenderableType]:
    parameters = sum(value.numel() for value in make_model(Shape(), 0).parameters())
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
    """The record's header field by field, then its payload beside what it hides."""
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
    """A step over each backend."""
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


def audits(audited: list[Audited]) -> Iterator[RenderableType]:
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


def verdict(outcome: Outcome, seconds: float) -> Iterator[RenderableType]:
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
