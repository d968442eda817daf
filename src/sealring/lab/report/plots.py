"""The report's pictures, each with a text and a table of its numbers.

A picture consists of rows of bars on one scale. It is HTML with a style sheet, so that labels have
a readable size on every screen. The command line prints the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10
from statistics import median
from typing import Final, Literal, NamedTuple

from sealring.lab.bench.collectives import line_words
from sealring.lab.bench.gpu import rows_of
from sealring.lab.bench.harness import BenchRow, Comparison
from sealring.lab.report.findings import (
    FIGURES,
    Overhead,
    Pair,
    best_buckets,
    hops,
    kernels,
    span_of,
    split_steps,
    timeline_step,
)
from sealring.lab.results import (
    KernelCase,
    LinkCase,
    Results,
    ScaleCase,
    StepCase,
    spread_of,
    usable,
)


class Numbers(NamedTuple):
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Picture:
    key: str
    title: str
    said: str
    """What the picture shows, for readers who do not see it."""
    numbers: Numbers
    drawn: str = ""
    """The picture as HTML; if it is empty, only the numbers are shown."""


# ---- marks on a scale


@dataclass(frozen=True, slots=True)
class Mark:
    """A mark from one value to another."""

    start: float
    end: float
    colour: str
    """A CSS class of the style sheet."""
    shape: Literal["bar", "thin", "below"] = "bar"


@dataclass(frozen=True, slots=True)
class Bars:
    """One row of a picture."""

    label: str
    marks: Sequence[Mark]
    text: str = ""
    """The text after the bars."""


def draw(
    rows: Sequence[Bars], axis: str, legend: Mapping[str, str], base: float = 0.0, unit: str = ""
) -> str:
    """Draws the rows as HTML. `legend` names the colours. A line marks `base`, which is always on
    the scale."""
    values = [base, *(value for row in rows for mark in row.marks for value in _ends(mark))]
    low, high = min(values), max(values)
    width = (high - low) or 1.0

    def place(value: float) -> str:
        return f"{(value - low) / width:.2%}"

    def mark(one: Mark) -> str:
        start, end = sorted(_ends(one))
        size = f"left:{place(start)};width:{(end - start) / width:.2%}"
        return f'<i class="{one.colour} {one.shape}" style="{size}"></i>'

    line = f'<i class="base" style="left:{place(base)}"></i>'
    drawn = [
        f'<span class="label">{escape(row.label)}</span>'
        f'<span class="track">{"".join(map(mark, row.marks))}{line}</span>'
        f'<span class="value">{escape(row.text)}</span>'
        for row in rows
    ]
    ticks = "".join(
        f'<b style="left:{place(tick)}">{tick:g}{unit}</b>' for tick in ticks_of(low, high)
    )
    named = "".join(
        f'<span><i class="{colour}"></i>{escape(text)}</span>' for colour, text in legend.items()
    )
    return (
        f'<p class="legend">{named}</p><div class="bars">{"".join(drawn)}'
        f'<span class="label muted">{escape(axis)}</span><span class="axis">{ticks}</span></div>'
    )


def _ends(mark: Mark) -> tuple[float, float]:
    return mark.start, mark.end


def ticks_of(low: float, high: float) -> list[float]:
    """Two to six round numbers between `low` and `high`."""
    rough = (high - low or 1.0) / 4
    power = 10.0 ** floor(log10(rough))
    step = next(each * power for each in (1, 2, 5, 10) if each * power >= rough)
    first, last = -floor(-low / step), floor(high / step)
    return [round(index * step, 12) for index in range(first, last + 1)]


def _compared(label: str, told: Comparison, colour: str) -> Bars:
    """A bar from 1 to the ratio, so that its length is what is added. The thin line is the
    interval."""
    marks = [Mark(1.0, told.ratio, colour), Mark(told.low, told.high, "ink", "thin")]
    return Bars(label, marks, "only noise" if told.only_noise else f"{told.ratio:.2f}×")


# ---- pictures of training steps


VARIANTS: Final = {
    "plain": "plain (torch)",
    "sealed": "sealring",
    "unsealed": "sealring's path, unsealed",
    "cc": "GPU-TEE path, emulated here",
    "compute": "without communication",
}
_PROTECTED: Final = {each: VARIANTS[each] for each in ("sealed", "cc")}
_MOST: Final = 28
"""The most rows of a picture; the tables have all."""


def clipped(text: str, most: int = 40) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def overhead(found: Sequence[Overhead]) -> Picture | None:
    """The overheads of sealring and of the emulated path. Published figures are given as text,
    because their bars would be many times as long and are from other machines."""
    best = best_buckets(found)
    if not best:
        return None
    rows = [
        _compared(clipped(each.setting), each.against_plain, each.case.variant)
        for setting in dict.fromkeys(each.setting for each in best)
        for each in best
        if each.setting == setting
    ]
    sealed = [each for each in best if each.case.variant == "sealed"]
    span = span_of([each.against_plain for each in sealed])
    ours = (
        f"sealring's steps take {span} times as long as the plain ones in "
        f"{sum(not each.against_plain.only_noise for each in sealed)} of {len(sealed)} settings"
        if span
        else "sealring's steps cannot be told from the plain ones by these samples"
    )
    return Picture(
        "overhead",
        "What protection costs a training step",
        f"A bar is what protection adds: {ours} on this machine. Published for GPU TEEs are "
        + ", ".join(f"{figure.overhead:g} ({figure.what})" for figure in FIGURES)
        + ".",
        Numbers(
            ("model", "ranks", "batch", "precision", "buckets", "variant", "step", "plain = 1"),
            [
                (
                    each.case.model,
                    str(each.case.ranks),
                    str(each.case.batch),
                    each.case.precision,
                    f"{each.case.bucket_cap_mb:g} MB ({each.case.all_reduces})",
                    VARIANTS[each.case.variant],
                    f"{median(each.case.seconds) * 1e3:,.1f} ms",
                    str(each.against_plain),
                )
                for each in found
            ],
        ),
        draw(rows[:_MOST], "time of a step, plain = 1", _PROTECTED, base=1.0, unit="×"),
    )


def buckets(found: Sequence[Overhead]) -> Picture | None:
    """The overheads by bucket size, if several sizes were measured."""
    lines: dict[tuple[str, str], list[Overhead]] = {}
    for each in found:
        lines.setdefault((each.setting, each.case.variant), []).append(each)
    points = [
        each
        for line in lines.values()
        if len({each.case.bucket_cap_mb for each in line}) > 1
        for each in sorted(line, key=lambda each: each.case.bucket_cap_mb)
    ]
    if not points:
        return None
    settings = dict.fromkeys(clipped(each.setting) for each in points)
    rows = [
        _compared(
            f"{clipped(each.setting)}, {each.case.bucket_cap_mb:g} MB",
            each.against_plain,
            each.case.variant,
        )
        for each in points
    ]
    return Picture(
        "buckets",
        "Overhead against DDP's bucket size",
        "Bars by bucket size for "
        + ", ".join(settings)
        + ": a larger bucket means fewer all-reduces for the same bytes.",
        Numbers(
            ("setting", "variant", "bucket_cap_mb", "all-reduces", "plain = 1"),
            [
                (
                    each.setting,
                    VARIANTS[each.case.variant],
                    f"{each.case.bucket_cap_mb:g}",
                    str(each.case.all_reduces),
                    str(each.against_plain),
                )
                for each in points
            ],
        ),
        draw(rows[:_MOST], "time of a step, plain = 1", _PROTECTED, base=1.0, unit="×"),
    )


PARTS: Final = ("compute", "seal", "transfer", "open", "reduce", "wait")


def split(results: Results) -> Picture | None:
    """The parts of the recorded steps."""
    cases = split_steps(results)
    if not cases:
        return None
    return Picture(
        "split",
        "Where a step's time goes",
        f"Stacked bars of {len(cases)} recorded steps: computing, sealing, transfer, opening, "
        "reducing and waiting, each as far as the step is longer for it, and, in the narrow bars "
        "below, as far as it is hidden behind the backward pass.",
        split_numbers(cases),
        draw(
            [Bars(clipped(_step_label(case), 60), list(_stacked(case))) for case in cases[:_MOST]],
            "ms of one step on rank 0",
            {name: name for name in PARTS},
        ),
    )


def _step_label(case: StepCase) -> str:
    bucket = f"{case.bucket_cap_mb:g} MB"
    return f"{case.model}, {case.ranks} ranks, {bucket}, {_SHORT.get(case.variant, case.variant)}"


_SHORT: Final = {"sealed": "sealring", "cc": "GPU-TEE path"}


def _stacked(case: StepCase) -> Iterator[Mark]:
    parts = {part.name: part for part in case.split}
    at = behind = 0.0
    for name in PARTS:
        if (part := parts.get(name)) is not None:
            exposed, hidden = part.exposed_s * 1e3, part.hidden_s * 1e3
            yield Mark(at, at + exposed, name)
            yield Mark(behind, behind + hidden, name, "below")
            at, behind = at + exposed, behind + hidden


def split_numbers(cases: Sequence[StepCase]) -> Numbers:
    """The milliseconds of each part of a step: exposed (+ hidden behind backward)."""

    def cell(case: StepCase, name: str) -> str:
        part = next((each for each in case.split if each.name == name), None)
        if part is None:
            return "-"
        hidden = f" (+{part.hidden_s * 1e3:,.1f})" if part.hidden_s else ""
        return f"{part.exposed_s * 1e3:,.1f}{hidden}"

    rows = [(_step_label(case), *(cell(case, name) for name in PARTS)) for case in cases]
    return Numbers(("ms, exposed (+ hidden)", *PARTS), rows)


def timeline(results: Results) -> Picture | None:
    case = timeline_step(results)
    if case is None:
        return None
    colours = {"forward": "plain", "backward": "compute", "optimizer": "published"}

    def lane(name: str) -> list[Mark]:
        return [
            Mark(span.start_s * 1e3, span.end_s * 1e3, colours.get(span.name, "sealed"))
            for span in case.timeline
            if span.lane == name
        ]

    collectives = lane("collective")
    return Picture(
        "timeline",
        f"One step of {clipped(case.model)}, {case.ranks} ranks, {case.bucket_cap_mb:g} MB buckets",
        f"A timeline of rank 0 in two lanes: forward, backward and optimizer above, "
        f"{len(collectives)} sealed collectives below; what of these lies under the gap between "
        "backward and optimizer is exposed.",
        Numbers(
            ("lane", "what", "from", "to", "bytes"),
            [
                (
                    span.lane,
                    span.name,
                    f"{span.start_s * 1e3:,.2f} ms",
                    f"{span.end_s * 1e3:,.2f} ms",
                    f"{span.bytes:,}" if span.bytes else "-",
                )
                for span in case.timeline
            ],
        ),
        draw(
            [Bars("model", lane("compute")), Bars("group", collectives)],
            "ms since the step began",
            {colour: name for name, colour in colours.items()} | {"sealed": "sealed collectives"},
        ),
    )


def comparison(found: Sequence[Pair]) -> Picture | None:
    """The times of the second results as multiples of the first's."""
    if not found:
        return None
    told = [each for each in found if not each.change.only_noise]
    shown = sorted(told, key=lambda each: abs(each.change.ratio - 1), reverse=True)[:_MOST]
    shown = sorted(shown or found[:_MOST], key=lambda each: each.change.ratio)
    rows = [
        _compared(
            clipped(each.label, 60), each.change, "sealed" if each.change.ratio <= 1 else "cc"
        )
        for each in shown
    ]
    faster = sum(each.change.ratio < 1 for each in told)
    return Picture(
        "comparison",
        "The second against the first",
        f"Of {len(found)} cases that both have, {faster} became faster, {len(told) - faster} "
        f"slower or equal, and {len(found) - len(told)} differ by noise alone.",
        Numbers(
            ("case", "first", "second", "second : first"),
            [
                (
                    each.label,
                    f"{each.before * 1e3:,.3f} ms",
                    f"{each.after * 1e3:,.3f} ms",
                    str(each.change),
                )
                for each in found
            ],
        ),
        draw(rows, "second : first", {"sealed": "faster", "cc": "slower"}, base=1.0, unit="×"),
    )


# ---- below a step: the link between two ranks, and the kernels


def links(results: Results) -> Picture | None:
    """The lines T = alpha * messages + bytes / beta."""
    cases = hops(results)
    if not cases:
        return None
    return Picture(
        "links",
        "What a message costs and what a byte costs: α and β per hop",
        "Lines T = α · messages + bytes / β through measured times. "
        + "; ".join(
            f"{VARIANTS[case.variant]} over {case.transport}: α {case.fit.alpha_s * 1e6:,.0f} µs, "
            f"β {case.fit.beta_bytes_per_s / 1e9:.2f} GB/s"
            for case in cases
            if case.fit is not None and case.operation == "all_reduce"
        )
        + ".",
        link_numbers(cases),
    )


def link_numbers(cases: Sequence[LinkCase]) -> Numbers:
    return Numbers(
        ("operation", "transport", "variant", "α, µs", "β, GB/s", "off the line by"),
        [
            (case.operation, case.transport, VARIANTS[case.variant], *line_words(case.fit))
            for case in cases
        ],
    )


def rooflines(results: Results) -> Iterator[Picture | None]:
    """The rooflines of a core and of a GPU: how close each kernel is to the limits of the
    device."""
    yield roofline(
        kernels(results),
        "roofline",
        "The roofline: how close each kernel is to what one core can do",
    )
    yield roofline(
        usable(results.gpu),
        "gpu-roofline",
        "The GPU's roofline: how close each kernel is to what its memory can carry",
    )


def roofline(found: list[KernelCase], key: str, title: str) -> Picture | None:
    """The roofline of one device's kernels; None if needed kernels were not measured."""
    placed = [case for case in found if case.operations and case.moved_bytes]
    if not placed or not any(case.kernel == "copy" for case in found):
        return None
    # The memory limit is the largest rate of all kernels: some move more than a copy does.
    carrier = max(found, key=lambda case: case.moved_bytes / median(case.seconds))
    memory = carrier.moved_bytes / median(carrier.seconds)
    ceilings = _ceilings(found)
    columns, rows = kernel_numbers(found)
    return Picture(
        key,
        title,
        f"The most that a kernel moved through memory is {memory / 1e9:,.1f} GB/s "
        f"({carrier.kernel}). "
        + " ".join(
            f"{name}: {rate / 1e9:,.1f} billion operations a second."
            for name, rate in ceilings.items()
        ),
        Numbers(
            (*columns, "of its roof"),
            [
                (*row, f"{_of_roof(case, memory, ceilings):.0%}" if case in placed else "-")
                for case, row in zip(found, rows, strict=True)
            ],
        ),
    )


def kernel_numbers(cases: Sequence[KernelCase]) -> Numbers:
    def row(case: KernelCase) -> tuple[str, ...]:
        took = median(case.seconds)
        return (
            f"{case.kernel} from {'memory' if case.moved_bytes else 'cache'}",
            case.device,
            str(case.processes),
            f"{case.bytes / took / 1e9:,.2f} ±{spread_of(case.seconds):.0%}",
            f"{case.moved_bytes / took / 1e9:,.2f}",
            f"{case.operations / took / 1e9:,.2f}",
        )

    columns = ("kernel", "device", "processes", "GB/s of data", "GB/s of memory", "Gop/s")
    return Numbers(columns, list(map(row, cases)))


_PRODUCTS: Final = "float32 products"


def _ceilings(found: list[KernelCase]) -> dict[str, float]:
    """The largest measured arithmetic rates: of a cipher on cached data, and of float products.
    Without a cipher on cached data, only memory is known as a limit."""
    ceilings = {}
    ciphers = [case for case in found if case.suite]
    if any(not case.moved_bytes and case.kernel in ("seal", "open") for case in ciphers):
        most = max(case.operations / median(case.seconds) for case in ciphers)
        ceilings[f"{ciphers[0].suite} in cache"] = most
    products = [case for case in found if case.kernel == "matmul" and case.operations]
    if products:
        ceilings[_PRODUCTS] = max(case.operations / median(case.seconds) for case in products)
    return ceilings


def _of_roof(case: KernelCase, memory: float, ceilings: dict[str, float]) -> float:
    rate = case.operations / median(case.seconds)
    slope = memory * case.operations / case.moved_bytes
    flat = ceilings.get(f"{case.suite} in cache" if case.suite else _PRODUCTS, slope)
    return rate / min(slope, flat)


# ---- groups as they grow


def forming(results: Results) -> Picture | None:
    """The costs of forming groups, by the number of ranks."""
    cases = [each for each in results.scale if each.cpu_seconds_per_rank > 0]
    worlds = sorted((each for each in cases if each.what == "world"), key=lambda each: each.ranks)
    if len(worlds) < 2:
        return None
    few, many = worlds[0], worlds[-1]
    return Picture(
        "forming",
        "What it takes to form a job as it grows",
        f"A rank's processor works {few.cpu_seconds_per_rank * 1e3:,.0f} ms to form a group of "
        f"{few.ranks} and {many.cpu_seconds_per_rank * 1e3:,.0f} ms for one of {many.ranks}: every "
        f"member verifies every member. {many.handshakes / many.ranks:.1f} TLS handshakes a rank.",
        forming_numbers(cases),
    )


_FORMED: Final = {
    "world": "the group of all ranks",
    "all_reduce": "its first all-reduce",
    "mesh": "rows and columns of a mesh, afterwards",
}


def forming_numbers(cases: Sequence[ScaleCase]) -> Numbers:
    """A table of the costs. `signatures` is the CPU time of only the signatures."""
    columns = (
        "what", "ranks", "TLS", "resumed", "sockets", "MB sent", "seconds", "CPU ms/rank",
        "signatures", "RSS MB",
    )  # fmt: skip
    rows = [
        (
            _FORMED.get(case.what, case.what),
            str(case.ranks),
            str(case.handshakes),
            str(case.resumptions),
            str(case.sockets),
            f"{case.bytes / 1e6:.1f}",
            f"{case.seconds:.2f}",
            f"{case.cpu_seconds_per_rank * 1e3:.1f}",
            f"{case.floor_seconds_per_rank * 1e3:.1f}",
            f"{case.rss_bytes / 1e6:.0f}",
        )
        for case in cases
    ]
    return Numbers(columns, rows)


# ---- a GPU: figures and their targets


def bars(results: Results) -> Picture | None:
    """The measurements that have a target, as multiples of it. The table has the others, too."""
    rows = rows_of(results)
    judged = [(row, reached) for row in rows if (reached := row.reached) is not None]
    if not judged:
        return None
    missed = [row for row, _ in judged if not row.met]
    # Bars from 1 to the right are better than the target, to the left worse.
    drawn = [
        Bars(
            clipped(f"{row.what} {row.bar}", 74),
            [Mark(1.0, reached, "sealed" if row.met else "cc")],
            f"{row.value:,g} {row.unit}",
        )
        for row, reached in judged
    ]
    return Picture(
        "gpu",
        f"Sealed on {clipped(', '.join(dict.fromkeys(results.machine.gpus)) or 'a GPU')}",
        f"{len(judged) - len(missed)} of {len(judged)} measurements reach their bar. "
        "A ratio is the sealed time by that of what stands behind the colon, over the wire before "
        "it. " + "".join(f"Missed: {row.what}, {row.value:,g} ({row.bar}). " for row in missed),
        bar_numbers(rows),
        draw(
            drawn,
            "times as good as its bar asks",
            {"sealed": "reaches its bar", "cc": "does not"},
            base=1.0,
            unit="×",
        ),
    )


def bar_numbers(rows: Sequence[BenchRow]) -> Numbers:
    """A table of the figures, without columns that are empty in all rows."""
    columns = ("what", "value", "19 of 20 find it in", "bar", "met", "detail")
    cells = [
        (
            row.what,
            f"{row.value:,.7g} {row.unit}",
            f"{row.low:g} to {row.high:g}" if row.low is not None else "-",
            row.bar,
            {True: "yes", False: "no", None: "-"}[row.met],
            row.detail or "-",
        )
        for row in rows
    ]
    kept = [at for at in range(len(columns)) if any(row[at] != "-" for row in cells)]
    return Numbers(
        tuple(columns[at] for at in kept), [tuple(row[at] for at in kept) for row in cells]
    )
