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
    Exchange,
    line_words,
)
from sealring.lab.bench.gpu import Row
from sealring.lab.bench.harness import Comparison, Measured, Samples
from sealring.lab.bench.records import AuditCost, RecordingCost
from sealring.lab.bench.step import Step
from sealring.lab.bench.vault import Case
from sealring.lab.results import KernelCase, LinkCase, ScaleCase

_MARKS = {True: "[green]yes[/]", False: "[red]no[/]", None: "-"}


def _time(samples: Samples | None, unit: float, name: str) -> str:
    if samples is None:
        return "-"
    return f"{samples.median * unit:,.0f} {name} ±{samples.spread:.0%}"


def _ratio(compared: Comparison | None) -> str:
    if compared is None:
        return "-"
    return str(compared) if compared.only_noise else f"[bold]{compared}[/bold]"


def kernels(cases: Sequence[KernelCase]) -> Table:
    return number_table(
        "Kernels on this machine's cores (medians)",
        ("kernel", "data", "processes", "a core", "memory", "arithmetic"),
        (
            (
                case.kernel,
                f"{human_bytes(case.bytes)} from {'memory' if case.moved_bytes else 'cache'}",
                case.processes,
                f"{case.bytes / taken.median / 1e9:.2f} GB/s ±{taken.spread:.0%}",
                f"{case.moved_bytes / taken.median / 1e9:.2f} GB/s",
                f"{case.operations / taken.median / 1e9:.2f} Gop/s",
            )
            for case in cases
            for taken in [Samples(tuple(case.seconds))]
        ),
    )


def links(cases: Sequence[LinkCase]) -> Table:
    return number_table(
        "A link between two ranks: T = α · messages + bytes / β",
        ("operation", "transport", "variant", "α, µs", "β, GB/s", "off the line by"),
        ((case.operation, case.transport, case.variant, *line_words(case.fit)) for case in cases),
        caption="In brackets: 19 of 20 repetitions would find it there. all_reduce: both send at "
        "once, as in every hop of a ring; ping_pong: one way.",
    )


def allreduce(cases: Sequence[Exchange]) -> Table:
    return number_table(
        "All-reduce: sealed by sealring, plaintext by Gloo, the GPU-TEE path emulated (medians)",
        ("ranks", "size", "transport", "threads", "sealed", "Gloo", "GPU-TEE", "sealed : Gloo",
         "GPU-TEE : Gloo", "sealed a rank"),
        (
            (
                case.ranks,
                human_bytes(case.bytes),
                case.transport,
                case.threads,
                *(_time(case.samples.get(each), 1e6, "µs") for each in ("sealed", "plain", "cc")),
                _ratio(case.against_plain()),
                _ratio(case.against_plain("cc")),
                human_bytes(case.rank_bytes[0][0]),
            )
            for case in cases
        ),
    )  # fmt: skip


def collectives(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Of rows as JSON has them, each beside its floor and its bar."""
    met = [row["meets_bar"] for row in rows if row["meets_bar"] is not None]

    def cells(row: Mapping[str, Any]) -> Iterable[Any]:
        noisy = "-" if row["noise"] is None else f"only noise (±{row['noise']:.0%})"
        gloo, bar = row["gloo_us"], row["bar_us"]
        yield from (row["collective"], row["ranks"])
        yield human_bytes(row["bytes"]) if row["bytes"] else "-"
        yield f"{row['sealed_us']:,.0f} ±{row['sealed_spread']:.0%}"
        yield "-" if gloo is None else f"{gloo:,.0f} ±{row['gloo_spread']:.0%}"
        yield noisy if row["ratio"] is None else f"[bold]{row['ratio']:.3f}[/bold]"
        yield f"{row['floor_us']:,.0f}"
        yield "-" if bar is None else f"{bar:,.0f}"
        yield _MARKS[row["meets_bar"]]

    return number_table(
        f"Collectives over {rows[0]['transport']}: sealed by sealring, plaintext by Gloo "
        "(medians of the slowest rank's times)",
        ("collective", "ranks", "size", "sealed, µs", "Gloo, µs", "ratio", "floor", "bar", "met"),
        (tuple(cells(row)) for row in rows),
        caption=f"floor: what the busiest core seals and opens, at the "
        f"{rows[0]['aes_bytes_per_s'] / 1e9:.2f} GB/s of AES-256-GCM that one core does here. Bar: "
        f"up to {human_bytes(SMALL_BYTES)} Gloo's time; from {human_bytes(LARGE_BYTES)} on, in "
        f"shared memory, {OF_GLOO} x Gloo or {OF_FLOOR} x floor, whichever is larger. {sum(met)} "
        f"of {len(met)} cases meet it.",
    )


def steps(cases: Sequence[Step], notes: Sequence[str] = ()) -> Table:
    place = cases[0].place
    plain = {"gloo": "Gloo", "nccl": "NCCL"}[place.backend]
    where = "" if place.kind == "cpu" else f" on {place.name}"

    def cells(case: Step) -> Iterable[Any]:
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


def splits(cases: Sequence[Step]) -> Table:
    """Where a step's time went, of those that were recorded."""
    parts: Sequence[Any] = ("compute", "seal", "transfer", "open", "reduce", "wait")

    def cell(part: Any) -> str:
        if part is None:
            return "-"
        hidden = f" (+{part.hidden_s * 1e3:,.1f})" if part.hidden_s else ""
        return f"{part.exposed_s * 1e3:,.1f}{hidden}"

    return number_table(
        "Where a recorded step went on rank 0, in ms: exposed (+ hidden behind backward)",
        ("model", "ranks", "bucket, MB", "variant", *parts),
        (
            (
                case.setting.model,
                case.ranks,
                f"{case.setting.bucket_cap_mb:g}",
                variant,
                *(cell({part.name: part for part in recorded.split}.get(name)) for name in parts),
            )
            for case in cases
            for variant in ("sealed", "cc")
            if (recorded := case.recorded.get(variant)) is not None
        ),
    )


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
    """What `bench all` says in the end: each comparison in one line; the report has the rest."""
    compared = [each for each in measured if isinstance(each, Exchange | Step)]
    return number_table(
        "What protection costs here: times as multiples of torch's own backend",
        ("case", "sealed", "GPU-TEE path, emulated"),
        (
            (
                f"{each.label}, {human_bytes(each.bytes)}"
                if isinstance(each, Exchange) and each.bytes
                else each.label,
                _ratio(each.against_plain()),
                _ratio(each.against_plain("cc")),
            )
            for each in compared
            if each.against_plain() is not None
        ),
    )


def gpu(name: str, rows: Sequence[Row], notes: Sequence[str] = ()) -> Table:
    ratios = "x: the sealed time by that of what stands behind the colon, over the wire before it."
    made = Table(title=f"Sealed on one {name}", caption=f"{ratios}{_sentences(notes)}")
    made.add_column("what")
    for column in ("measured", "bar", "met"):
        made.add_column(column, justify="right", no_wrap=True)
    made.add_column("detail", style="dim")
    for row in rows:
        between = f" ({row.low:g} to {row.high:g})" if row.low is not None else ""
        measured = f"{row.value:,} {row.unit}{between}"
        made.add_row(row.what, measured, row.bar, _MARKS[row.met], row.detail)
    return made


# ---- of python -m sealring.lab


def scale(cases: Sequence[ScaleCase], exponents: Mapping[str, Mapping[str, float]]) -> Table:
    floor = "signatures: the CPU ms/rank that the signatures alone take on this machine"
    grown = (
        f"{what}: " + ", ".join(f"{name} ~ n^{exponent:g}" for name, exponent in each.items())
        for what, each in exponents.items()
    )
    return number_table(
        "Forming groups of light workers",
        ("what", "ranks", "TLS", "resumed", "sockets", "MB sent", "seconds", "CPU ms/rank",
         "signatures", "RSS MB"),
        (
            (
                case.what,
                case.ranks,
                case.handshakes,
                case.resumptions,
                case.sockets,
                f"{case.bytes / 1e6:.1f}",
                f"{case.seconds:.2f}",
                f"{case.cpu_seconds_per_rank * 1e3:.1f}",
                f"{case.floor_seconds_per_rank * 1e3:.1f}",
                f"{case.rss_bytes / 1e6:.0f}",
            )
            for case in cases
        ),
        caption="\n".join([floor, *grown]),
    )  # fmt: skip


def recording(found: RecordingCost) -> Table:
    noise = "" if found.told is not None else f" (within the noise of {found.noise:.1%})"
    return number_table(
        f"{found.model}, {found.ranks} ranks, a statement every {found.every} steps",
        ("", ""),
        (
            ("step with statements", f"{found.recorded_ms:,.1f} ms"),
            ("step without", f"{found.unrecorded_ms:,.1f} ms"),
            ("ratio", f"{found.ratio:.4f}{noise}; bar {found.bar}"),
            ("bytes per rank and interval", f"{found.bytes_per_statement:,.0f}"),
            ("bytes of the folder", f"{found.disk_bytes:,}"),
        ),
    )


def audits(found: Sequence[AuditCost]) -> Table:
    return number_table(
        "Audits",
        ("run", "statements", "audit", "of one core", "page", "opened after"),
        (
            (
                f"{each.ranks} ranks, {each.intervals} intervals",
                f"{each.statements:,} of {each.statement_bytes:,} bytes",
                f"{each.seconds:g} s",
                f"{each.cpu_seconds:g} s",
                human_bytes(each.page_bytes),
                "no browser here" if each.opened_ms is None else f"{each.opened_ms:g} ms",
            )
            for each in found
        ),
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
