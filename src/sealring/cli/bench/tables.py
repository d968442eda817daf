"""Measured cases as tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from sealring.bench.collectives import LARGE_BYTES, OF_FLOOR, OF_GLOO, SMALL_BYTES, Case
from sealring.bench.exchange import Exchange
from sealring.bench.gpu.bars import Row
from sealring.bench.kernels import Kernels
from sealring.bench.link import Hop
from sealring.bench.measure import Samples
from sealring.bench.noise import Comparison
from sealring.bench.session import Measured
from sealring.bench.step import Step
from sealring.cli.terminal import human_bytes
from sealring.results import ScaleCase


def _columns(table: Table, *names: str) -> Table:
    table.add_column(names[0], no_wrap=True)
    for name in names[1:]:
        table.add_column(name, justify="right")
    return table


def _time(samples: Samples | None, unit: float, name: str) -> str:
    if samples is None:
        return "-"
    return f"{samples.median * unit:,.0f} {name} ±{samples.spread:.0%}"


def _ratio(compared: Comparison | None) -> str:
    if compared is None:
        return "-"
    return str(compared) if compared.only_noise else f"[bold]{compared}[/bold]"


def kernels(runs: Sequence[Kernels]) -> Table:
    table = Table(title="Kernels on this machine's cores (medians)")
    _columns(table, "kernel", "data", "processes", "a core", "memory", "arithmetic")
    for run in runs:
        for shape, samples in run.measured:
            where = "memory" if shape.moved_bytes else "cache"
            table.add_row(
                shape.kernel,
                f"{human_bytes(shape.bytes)} from {where}",
                str(run.processes),
                f"{shape.bytes / samples.median / 1e9:.2f} GB/s ±{samples.spread:.0%}",
                f"{shape.moved_bytes / samples.median / 1e9:.2f} GB/s",
                f"{shape.operations / samples.median / 1e9:.2f} Gop/s",
            )
    return table


def links(hops: Sequence[Hop]) -> Table:
    table = Table(
        title="A link between two ranks: T = α · messages + bytes / β",
        caption="In brackets: 19 of 20 repetitions would find it there. all_reduce: both send at "
        "once, as in every hop of a ring; ping_pong: one way.",
    )
    _columns(table, "operation", "transport", "variant", "α, µs", "β, GB/s", "off the line by")
    for hop in hops:
        for case in hop.cases(0):
            line = case.fit
            table.add_row(
                case.operation,
                case.transport,
                case.variant,
                *(
                    ["no line fits", "-", "-"]
                    if line is None
                    else [
                        f"{line.alpha_s * 1e6:,.0f} ({line.alpha_low_s * 1e6:,.0f} to "
                        f"{line.alpha_high_s * 1e6:,.0f})",
                        f"{line.beta_bytes_per_s / 1e9:.2f} ({line.beta_low_bytes_per_s / 1e9:.2f} "
                        f"to {line.beta_high_bytes_per_s / 1e9:.2f})",
                        f"{line.residual:.0%}",
                    ]
                ),
            )
    return table


def allreduce(cases: Sequence[Exchange]) -> Table:
    table = Table(
        title="All-reduce: sealed by sealring, plaintext by Gloo, the GPU-TEE path emulated "
        "(medians)"
    )
    _columns(
        table, "ranks", "size", "transport", "threads", "sealed", "Gloo", "GPU-TEE",
        "sealed : Gloo", "GPU-TEE : Gloo", "sealed a rank",
    )  # fmt: skip
    for case in cases:
        table.add_row(
            str(case.ranks),
            human_bytes(case.bytes),
            case.transport,
            str(case.threads),
            *(_time(case.samples.get(each), 1e6, "µs") for each in ("sealed", "plain", "cc")),
            _ratio(case.against_plain()),
            _ratio(case.against_plain("cc")),
            human_bytes(case.rank_bytes[0][0]),
        )
    return table


def collectives(cases: Sequence[Case]) -> Table:
    met = [case.meets_bar for case in cases if case.meets_bar is not None]
    table = Table(
        title=f"Collectives over {cases[0].transport}: sealed by sealring, plaintext by Gloo "
        "(medians of the slowest rank's times)",
        caption=f"floor: what the busiest core seals and opens, at the "
        f"{min(case.aes_bytes_per_s for case in cases) / 1e9:.2f} GB/s of AES-256-GCM that one "
        f"core does here. Bar: up to {human_bytes(SMALL_BYTES)} Gloo's time; from "
        f"{human_bytes(LARGE_BYTES)} on, in shared memory, {OF_GLOO} x Gloo or {OF_FLOOR} x "
        f"floor, whichever is larger. {sum(met)} of {len(met)} cases meet it.",
    )
    _columns(
        table, "collective", "ranks", "size", "sealed, µs", "Gloo, µs", "ratio", "floor", "bar",
        "met",
    )  # fmt: skip
    marks = {True: "[green]yes[/]", False: "[red]no[/]", None: "-"}
    for case in cases:
        noisy = "-" if case.noise is None else f"only noise (±{case.noise:.0%})"
        table.add_row(
            case.collective,
            str(case.ranks),
            human_bytes(case.bytes) if case.bytes else "-",
            f"{case.sealed_us:,.0f} ±{case.sealed_spread:.0%}",
            "-" if case.gloo_us is None else f"{case.gloo_us:,.0f} ±{case.gloo_spread:.0%}",
            noisy if case.ratio is None else f"[bold]{case.ratio:.3f}[/bold]",
            f"{case.floor_us:,.0f}",
            "-" if case.bar_us is None else f"{case.bar_us:,.0f}",
            marks[case.meets_bar],
        )
    return table


def steps(cases: Sequence[Step], notes: Sequence[str] = ()) -> Table:
    place = cases[0].place
    plain = {"gloo": "Gloo", "nccl": "NCCL"}[place.backend]
    where = "" if place.kind == "cpu" else f" on {place.name}"
    table = Table(
        title=f"A DDP training step{where}: sealed by sealring, plaintext by {plain}, the GPU-TEE "
        "path emulated (medians)",
        caption="buckets: all-reduces in one step, and their cap. Hidden: the part of the sealed "
        "collectives, by time, that ran while the backward pass computed."
        + "".join(f" {note[0].upper()}{note[1:]}." for note in notes),
    )
    _columns(
        table, "model", "ranks", "batch", "buckets", "compute", plain, "sealed", "GPU-TEE",
        f"sealed : {plain}", f"GPU-TEE : {plain}", "hidden",
    )  # fmt: skip
    for case in cases:
        sealed, overlap = case.recorded.get("sealed"), case.overlap()
        order = ("compute", "plain", "sealed", "cc")
        table.add_row(
            case.setting.model,
            str(case.ranks),
            f"{case.setting.batch} {case.setting.precision}",
            f"{sealed.all_reduces} of {case.setting.bucket_cap_mb:g} MB" if sealed else "-",
            *(_time(case.samples.get(each), 1e3, "ms") for each in order),
            _ratio(case.against_plain()),
            _ratio(case.against_plain("cc")),
            "-" if overlap is None else f"{overlap:.0%}",
        )
    return table


def splits(cases: Sequence[Step]) -> Table:
    """Where a step's time went, of those that were recorded."""
    table = Table(
        title="Where a recorded step went on rank 0, in ms: exposed (+ hidden behind backward)"
    )
    names = ("compute", "seal", "transfer", "open", "reduce", "wait")
    _columns(table, "model", "ranks", "bucket, MB", "variant", *names)
    for case in cases:
        for variant in ("sealed", "cc"):
            recorded = case.recorded.get(variant)
            if recorded is None:
                continue
            parts = {part.name: part for part in recorded.split}
            table.add_row(
                case.setting.model,
                str(case.ranks),
                f"{case.setting.bucket_cap_mb:g}",
                variant,
                *(
                    f"{parts[name].exposed_s * 1e3:,.1f}"
                    + (f" (+{parts[name].hidden_s * 1e3:,.1f})" if parts[name].hidden_s else "")
                    if name in parts
                    else "-"
                    for name in names
                ),
            )
    return table


def scale(cases: Sequence[ScaleCase], exponents: Mapping[str, Mapping[str, float]]) -> Table:
    table = Table(title="Forming groups of light workers")
    for column in (
        "ranks", "what", "TLS", "resumed", "sockets", "MB sent", "seconds", "CPU ms/rank",
        "signatures", "RSS MB",
    ):  # fmt: skip
        table.add_column(column, justify="left" if column == "what" else "right")
    for case in cases:
        table.add_row(
            str(case.ranks),
            case.what,
            str(case.handshakes),
            str(case.resumptions),
            str(case.sockets),
            f"{case.bytes / 1e6:.1f}",
            f"{case.seconds:.2f}",
            f"{case.cpu_seconds_per_rank * 1e3:.1f}",
            f"{case.floor_seconds_per_rank * 1e3:.1f}",
            f"{case.rss_bytes / 1e6:.0f}",
        )
    said = [
        f"{what}: " + ", ".join(f"{name} ~ n^{exponent:g}" for name, exponent in each.items())
        for what, each in exponents.items()
    ]
    floor = "signatures: the CPU ms/rank that the signatures alone take on this machine"
    table.caption = "\n".join([floor, *said])
    return table


def summary(measured: Sequence[Measured]) -> Table:
    """What `bench all` says in the end: each comparison in one line; the report has the rest."""
    table = Table(title="What protection costs here: times as multiples of torch's own backend")
    _columns(table, "case", "sealed", "GPU-TEE path, emulated")
    for each in measured:
        if not isinstance(each, Exchange | Step) or each.against_plain() is None:
            continue
        size = f", {human_bytes(each.bytes)}" if isinstance(each, Exchange) and each.bytes else ""
        cc = _ratio(each.against_plain("cc"))
        table.add_row(f"{each.label}{size}", _ratio(each.against_plain()), cc)
    return table


def gpu(name: str, rows: Sequence[Row], notes: Sequence[str] = ()) -> Table:
    ratios = "x: the sealed time by that of what stands behind the colon, over the wire before it"
    said = ". ".join([ratios, *(f"{note[0].upper()}{note[1:]}" for note in notes)])
    table = Table(title=f"Sealed on one {name}", caption=f"{said}.")
    table.add_column("what")
    for column in ("measured", "bar", "met"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("detail", style="dim")
    marks = {True: "[green]yes[/]", False: "[red]no[/]", None: "-"}
    for row in rows:
        between = f" ({row.low:g} to {row.high:g})" if row.low is not None else ""
        measured = f"{row.value:,} {row.unit}{between}"
        table.add_row(row.what, measured, row.bar, marks[row.met], row.detail)
    return table
