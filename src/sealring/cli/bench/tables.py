"""Measured cases as tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

from sealring.cli.terminal import human_bytes, number_table
from sealring.core.schedule.table import AlgorithmTable, names
from sealring.lab.bench.algorithms import Cell
from sealring.lab.bench.collectives import (
    LARGE_BYTES,
    OF_FLOOR,
    OF_GLOO,
    SMALL_BYTES,
    CollectiveRun,
)
from sealring.lab.bench.harness import BenchRow, Comparison, Measured, Timings, against_plain
from sealring.lab.bench.step import StepRun
from sealring.lab.bench.vault import Case
from sealring.lab.report import plots
from sealring.lab.results import KernelCase, LinkCase, ScaleCase

_MARKS = {True: "[green]yes[/]", False: "[red]no[/]", None: "-"}


def _time(samples: Timings | None, unit: float, name: str) -> str:
    if samples is None:
        return "-"
    return f"{samples.median * unit:,.0f} {name} ±{samples.spread:.0%}"


def _ratio(compared: Comparison | None) -> str:
    if compared is None:
        return "-"
    return str(compared) if compared.only_noise else f"[bold]{compared}[/bold]"


def kernels(cases: Sequence[KernelCase]) -> Table:
    return number_table("Kernels on this machine's cores (medians)", *plots.kernel_numbers(cases))


def links(cases: Sequence[LinkCase]) -> Table:
    return number_table(
        "A link between two ranks: T = α · messages + bytes / β",
        *plots.link_numbers(cases),
        caption="In brackets: 19 of 20 repetitions would find it there. all_reduce: both send at "
        "once, as in every hop of a ring; ping_pong: one way.",
    )


def exchanges(cases: Sequence[CollectiveRun], rows: Sequence[Mapping[str, Any]]) -> Table:
    """A table of collectives. `rows` are the same cases as in the JSON output."""
    met = [row["meets_bar"] for row in rows if row["meets_bar"] is not None]
    variants = [
        name for name in ("sealed", "plain", "cc") if any(name in case.samples for case in cases)
    ]
    others = variants[1:]

    def cells(case: CollectiveRun, row: Mapping[str, Any]) -> Iterable[Any]:
        yield from (case.collective, case.ranks, human_bytes(case.bytes) if case.bytes else "-")
        yield from (_time(case.samples.get(name), 1e6, "µs") for name in variants)
        yield from (_ratio(against_plain(case.samples, one)) for one in ("sealed", *others[1:]))
        yield from (f"{row['floor_us']:,.0f} µs", _MARKS[row["meets_bar"]])

    named = {"sealed": "sealed", "plain": "Gloo", "cc": "GPU-TEE"}
    return number_table(
        f"Collectives over {cases[0].transport}: sealed by sealring, plaintext by Gloo, the "
        "GPU-TEE path emulated (medians of the slowest rank's times)",
        (
            "collective", "ranks", "size", *(named[name] for name in variants),
            *(f"{named[name]} : Gloo" for name in ("sealed", *others[1:])), "floor", "met",
        ),
        (tuple(cells(case, row)) for case, row in zip(cases, rows, strict=True)),
        caption=f"floor: what the busiest core seals and opens, at the "
        f"{rows[0]['aes_bytes_per_s'] / 1e9:.2f} GB/s of AES-256-GCM that one core does here. Bar: "
        f"up to {human_bytes(SMALL_BYTES)} Gloo's time; from {human_bytes(LARGE_BYTES)} on, in "
        f"shared memory, {OF_GLOO} x Gloo or {OF_FLOOR} x floor, whichever is larger. {sum(met)} "
        f"of {len(met)} cases meet it.",
    )  # fmt: skip


def steps(cases: Sequence[StepRun], notes: Sequence[str] = ()) -> Table:
    place = cases[0].place
    plain = {"gloo": "Gloo", "nccl": "NCCL"}[place.backend]
    where = "" if place.kind == "cpu" else f" on {place.name}"

    def cells(case: StepRun) -> Iterable[Any]:
        sealed, overlap = case.recorded.get("sealed"), case.overlap()
        yield from (case.setting.model, case.ranks)
        yield f"{case.setting.batch} {case.setting.precision}"
        yield f"{sealed.all_reduces} of {case.setting.bucket_cap_mb:g} MB" if sealed else "-"
        for variant in ("compute", "plain", "sealed", "cc"):
            yield _time(case.samples.get(variant), 1e3, "ms")
        yield _ratio(case.against_plain())
        yield _ratio(case.against_plain("cc"))
        yield "-" if overlap is None else f"{overlap:.0%}"

    return number_table(
        f"A DDP training step{where}: sealed by sealring, plaintext by {plain}, the GPU-TEE path "
        "emulated (medians)",
        ("model", "ranks", "batch", "buckets", "compute", plain, "sealed", "GPU-TEE",
         f"sealed : {plain}", f"GPU-TEE : {plain}", "hidden"),
        (tuple(cells(case)) for case in cases),
        caption="buckets: all-reduces in one step, and their cap. Hidden: the part of the sealed "
        "collectives, by time, that ran while the backward pass computed." + _sentences(notes),
    )  # fmt: skip


def _sentences(notes: Sequence[str]) -> str:
    return "".join(f" {note[0].upper()}{note[1:]}." for note in notes)


def splits(cases: Sequence[StepRun]) -> Table:
    """A table of where the time of recorded steps went."""
    recorded = [one for case in cases for one in case.cases if one.split]
    numbers = plots.split_numbers([one for one in recorded if one.variant != "compute"])
    return number_table("Where a recorded step went on rank 0", *numbers)


def vault(cases: Sequence[Case]) -> Table:
    return number_table(
        "A vault: sealed against plain (medians)",
        ("what", "ranks", "sealed GB/s", "plain GB/s", "ratio", "read / needed"),
        (
            (
                case.what,
                case.ranks,
                *(f"{one:.2f}" for one in (case.sealed_gb_s, case.plain_gb_s, case.ratio)),
                f"{(case.bytes_read or 0) / case.bytes_needed:.3f}" if case.bytes_needed else "",
            )
            for case in cases
        ),
    )


def summary(measured: Sequence[Measured]) -> Table:
    """The table at the end of `bench all`: one line for each comparison. The report has the
    rest."""
    compared = [each for each in measured if isinstance(each, CollectiveRun | StepRun)]
    return number_table(
        "What protection costs here: times as multiples of torch's own backend",
        ("case", "sealed", "GPU-TEE path, emulated"),
        (
            (
                f"{each.label}, {human_bytes(each.bytes)}"
                if isinstance(each, CollectiveRun) and each.bytes
                else each.label,
                _ratio(each.against_plain()),
                _ratio(each.against_plain("cc")),
            )
            for each in compared
            if each.against_plain() is not None
        ),
    )


def gpu(name: str, rows: Sequence[BenchRow], notes: Sequence[str] = ()) -> Table:
    ratios = "x: the sealed time by that of what stands behind the colon, over the wire before it."
    return number_table(
        f"Sealed on one {name}",
        *plots.bar_numbers(rows),
        caption=f"{ratios}{_sentences(notes)}",
    )


# ---- tables of python -m sealring.lab


def scale(cases: Sequence[ScaleCase], exponents: Mapping[str, Mapping[str, float]]) -> Table:
    floor = "signatures: the CPU ms/rank that the signatures alone take on this machine"
    grown = (
        f"{what}: " + ", ".join(f"{name} ~ n^{exponent:g}" for name, exponent in each.items())
        for what, each in exponents.items()
    )
    return number_table(
        "Forming groups of light workers",
        *plots.forming_numbers(cases),
        caption="\n".join([floor, *grown]),
    )


def algorithms(cells: Sequence[Cell], fitted: AlgorithmTable) -> Table:
    columns = list(dict.fromkeys(cell.algorithm for cell in cells))
    rows: dict[tuple[str, str, int, str], dict[str, Cell]] = {}
    for cell in cells:
        where = (cell.operation, cell.hosts, cell.ranks, human_bytes(cell.bytes))
        rows.setdefault(where, {})[cell.algorithm] = cell

    def times(by_algorithm: Mapping[str, Cell]) -> Iterable[str]:
        fastest = min(cell.fastest_us for cell in by_algorithm.values())
        for column in columns:
            one = by_algorithm.get(column)
            text = "-" if one is None else f"{one.fastest_us:,.0f}"
            yield f"[bold green]{text}[/]" if one and one.fastest_us == fastest else text

    return number_table(
        "Algorithms against each other (the slowest rank's times in the fastest block, µs)",
        ("operation", "hosts", "ranks", "size", *columns),
        ((*where, *times(by_algorithm)) for where, by_algorithm in rows.items()),
        caption="\n".join(
            f"{operation}, hosts {hosts}, from {ranks} ranks: {words}"
            for operation, hosts, ranks, words in _choices(fitted)
        ),
        left=2,
    )


def as_markdown(table: AlgorithmTable) -> str:
    head = "| operation | hosts | ranks from | algorithm by one rank's bytes |"
    lines = [f"| {' | '.join(row)} |" for row in _choices(table)]
    return "\n".join([head, "|---|---|---|---|", *lines])


def _choices(table: AlgorithmTable) -> list[tuple[str, str, str, str]]:
    choices = []
    for (operation, placement), rows in table.rows.items():
        for row in rows:
            *short, last = names(row.algorithms)
            limits = zip(short, row.up_to_bytes, strict=True)
            parts = [*(f"{name} up to {human_bytes(limit)}" for name, limit in limits), last]
            words = ", then ".join(parts)
            choices.append((operation.name.lower(), placement.value, str(row.ranks), words))
    return choices
