"""The report's pictures, each with what it says in words and in numbers.

matplotlib's SVG is made part of a page: its colours are the page's, its size is the screen's. A
picture is drawn twice, for a desk and for a phone, so that letters have the same size on both.
Colours are drawn as stand-ins and then named: the page's style sheet says what they are in the
light and in the dark.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from io import StringIO
from statistics import median
from textwrap import fill
from typing import TYPE_CHECKING, Any, Final

from sealring.errors import ConfigurationError
from sealring.lab.bench.collectives import line_words, predicted
from sealring.lab.bench.gpu import Row, rows_of
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
from sealring.lab.results import KernelCase, Results, ScaleCase, usable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


DESK: Final = 860
PHONE: Final = 358
"""Widths in CSS pixels: a column of text, and a phone's screen without its margins."""

COLOURS: Final = {
    name: f"#0{index:x}0{index:x}0{index:x}"
    for index, name in enumerate(
        ("ink", "muted", "grid", "surface", "plain", "sealed", "cc", "published", "compute",
         "seal", "transfer", "open", "reduce", "wait"),
        start=1,
    )
}  # fmt: skip
"""Stand-ins that no picture would use by itself; each becomes a variable of the style sheet."""

_SETTINGS: Final[dict[str, Any]] = {
    "svg.fonttype": "none",  # letters stay letters
    "text.parse_math": False,  # a name in a file is a name, whatever characters it has
    "font.family": ["DejaVu Sans"],
    "font.size": 12,
    "axes.edgecolor": COLOURS["muted"],
    "axes.labelcolor": COLOURS["ink"],
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": COLOURS["grid"],
    "text.color": COLOURS["ink"],
    "xtick.color": COLOURS["ink"],
    "ytick.color": COLOURS["ink"],
    "hatch.color": COLOURS["surface"],
    "legend.frameon": False,
    "legend.fontsize": 12,
    "figure.facecolor": "none",
}
_FONTS: Final = "system-ui, 'DejaVu Sans', Verdana, sans-serif"


@dataclass(frozen=True, slots=True)
class Picture:
    key: str
    title: str
    said: str
    """What the picture shows, for readers who do not see it."""
    desk: str = ""
    phone: str = ""
    """Both empty: the numbers stand alone."""
    columns: tuple[str, ...] = ()
    rows: list[tuple[str, ...]] = field(default_factory=list)
    """The same as numbers."""


Draw = Callable[["Figure", "Axes", bool], None]
"""Draws into the axes; True where the screen is narrow."""


def draw(
    key: str, height: int, picture: Draw, *, phone_height: int | None = None
) -> tuple[str, str]:
    """The SVG for a desk and the one for a phone."""
    return (
        _svg(f"{key}-desk", DESK, height, picture, narrow=False),
        _svg(f"{key}-phone", PHONE, phone_height or height, picture, narrow=True),
    )


def _svg(name: str, width: int, height: int, picture: Draw, *, narrow: bool) -> str:
    matplotlib = plotting_library()
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**_SETTINGS, "svg.hashsalt": name}):
        # 72 units to the inch, and one unit is one CSS pixel.
        figure = Figure(figsize=(width / 72, height / 72), dpi=72, layout="constrained")
        FigureCanvasSVG(figure)
        picture(figure, figure.add_subplot(), narrow)
        out = StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return _for_the_page(out.getvalue(), name, width)


def plotting_library() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ConfigurationError(
            "the report's plots need matplotlib: pip install 'sealring[report]'"
        ) from None
    return matplotlib


def _for_the_page(text: str, name: str, width: int) -> str:
    svg = text[text.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # Several pictures are in one document: what one refers to must not be another's.
    svg = re.sub(r'\bid="([^"]*)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", svg)
    for colour, stand_in in COLOURS.items():
        svg = svg.replace(stand_in, f"var(--{colour})")
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", rf"font: \1px {_FONTS}", svg)
    head, _, rest = svg.partition(">")
    box = re.search(r'viewBox="[^"]*"', head)
    shape = box[0] if box else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'{shape} style="max-width: {width}px" aria-hidden="true" focusable="false">{rest}'
    )


# ---- of training steps


VARIANTS: Final = {
    "plain": "plain (torch)",
    "sealed": "sealring",
    "unsealed": "sealring's path, unsealed",
    "cc": "GPU-TEE path, emulated here",
    "compute": "without communication",
}
_SHORT: Final = {**VARIANTS, "cc": "GPU-TEE path"}
_MOST: Final = 14
"""Rows of one picture; the tables have all."""


def clipped(text: str, most: int = 40) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def legend(figure: Figure, columns: int) -> None:
    """Over the whole picture, where it hides nothing."""
    figure.legend(loc="outside upper left", ncols=columns, columnspacing=1.2, handlelength=1.4)


def _locator(most: int) -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(most, steps=[1, 2, 5, 10])  # so that 1 is among them


def _rows(axes: Axes, labels: Sequence[str], narrow: bool) -> None:
    """A row for each label, the first on top; on a narrow screen few ticks below."""
    axes.set_yticks(range(len(labels)), labels, fontsize=11)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.grid(False, axis="y")
    if narrow:
        axes.xaxis.set_major_locator(_locator(4))


def _two_logarithms(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()


def overhead(found: Sequence[Overhead]) -> Picture | None:
    """Ours and the emulated path here. What others published is text: its bars would be many
    times as long, and are of other machines."""
    best = best_buckets(found)
    if not best:
        return None
    settings = list(dict.fromkeys(each.setting for each in best))[:_MOST]
    bars: list[tuple[str, str, float, tuple[float, float], str]] = []
    for setting in settings:
        for each in best:
            if each.setting == setting:
                told = each.against_plain
                error = (told.ratio - told.low, told.high - told.ratio)
                label = f"{told.ratio:.2f}×" if not told.only_noise else "only noise"
                bars.append((setting, each.case.variant, told.ratio, error, label))

    def picture(figure: Figure, axes: Axes, narrow: bool) -> None:
        places: list[float] = []
        at, last = 0.0, ""
        for setting, *_ in bars:
            at += 0.0 if not places else 1.0 if setting == last else 1.5
            places.append(at)
            last = setting
        for variant in ("sealed", "cc"):
            mine = [(y, bar) for y, bar in zip(places, bars, strict=True) if bar[1] == variant]
            if not mine:
                continue
            # From 1 on: what a bar is long is what protection adds.
            axes.barh(
                [y for y, _ in mine],
                [bar[2] - 1 for _, bar in mine],
                left=1,
                height=0.8,
                color=COLOURS[variant],
                label=VARIANTS[variant],
            )
            for y, bar in mine:
                low, high = bar[2] - bar[3][0], bar[2] + bar[3][1]
                axes.plot([low, high], [y, y], color=COLOURS["ink"], linewidth=1.2)
                axes.annotate(
                    bar[4], (max(high, 1.0), y), (5, 0), textcoords="offset points", va="center",
                    fontsize=11,
                )  # fmt: skip
        ticks: dict[str, list[float]] = {}
        for y, (setting, *_) in zip(places, bars, strict=True):
            ticks.setdefault(setting, []).append(y)
        axes.set_yticks([sum(ys) / len(ys) for ys in ticks.values()])
        axes.set_yticklabels(
            [fill(clipped(name), 15) if narrow else clipped(name) for name in ticks], fontsize=11
        )
        low = min(1.0, *(bar[2] - bar[3][0] for bar in bars))
        high = max(1.05, *(bar[2] + bar[3][1] for bar in bars))
        room = (high - low) * (0.35 if narrow else 0.15)  # for the figures behind the bars
        axes.set_xlim(low - 0.05 * (high - low), high + room)
        axes.xaxis.set_major_locator(_locator(5 if narrow else 8))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
        axes.axvline(1, color=COLOURS["ink"], linewidth=1.2)
        axes.set_xlabel(
            "time of a step, plain = 1"
            if narrow
            else "time of a training step, as a multiple of the plain one"
        )
        axes.grid(False, axis="y")
        axes.invert_yaxis()
        legend(figure, 1 if narrow else 3)

    height = 110 + 28 * len(bars)
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
        *draw("overhead", height, picture, phone_height=height + 50),
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
    )


def buckets(found: Sequence[Overhead]) -> Picture | None:
    """Overhead against the bucket size, where more than one was measured."""
    lines: dict[tuple[str, str], list[Overhead]] = {}
    for each in found:
        lines.setdefault((each.setting, each.case.variant), []).append(each)
    lines = {
        key: sorted(points, key=lambda each: each.case.bucket_cap_mb)
        for key, points in lines.items()
        if len({each.case.bucket_cap_mb for each in points}) > 1
    }
    if not lines:
        return None
    settings = list(dict.fromkeys(setting for setting, _ in lines))[:6]
    marks = dict(zip(settings, "osD^vP", strict=False))

    def picture(figure: Figure, axes: Axes, narrow: bool) -> None:
        for (setting, variant), points in lines.items():
            if setting not in marks:
                continue
            xs = [each.case.bucket_cap_mb for each in points]
            ys = [each.against_plain.ratio for each in points]
            low = [each.against_plain.ratio - each.against_plain.low for each in points]
            high = [each.against_plain.high - each.against_plain.ratio for each in points]
            name = (
                f"{clipped(setting, 24)}: {'sealring' if variant == 'sealed' else 'GPU-TEE path'}"
            )
            axes.errorbar(
                xs, ys, [low, high], marker=marks[setting], color=COLOURS[variant], capsize=3,
                markersize=7, linestyle="-" if variant == "sealed" else "--", label=name,
            )  # fmt: skip
        caps = sorted({each.case.bucket_cap_mb for points in lines.values() for each in points})
        _two_logarithms(axes)
        axes.set_xticks(caps, [f"{cap:g}" for cap in caps])
        axes.axhline(1, color=COLOURS["ink"], linewidth=1.2)
        top = axes.get_ylim()[1]
        ticks = [each for each in (0.5, 1, 1.5, 2, 3, 5, 10, 20, 40) if each <= top * 1.05]
        axes.set_yticks(ticks, [f"{each:g}×" for each in ticks])
        axes.set_xlabel("bucket_cap_mb")
        axes.set_ylabel("step, plain = 1")
        legend(figure, 1 if narrow else 2)

    rows = len(lines)
    return Picture(
        "buckets",
        "Overhead against DDP's bucket size",
        "Lines over the bucket size for "
        + ", ".join(clipped(setting) for setting in settings)
        + ": a larger bucket means fewer all-reduces for the same bytes.",
        *draw("buckets", 320 + 18 * ((rows + 1) // 2), picture, phone_height=300 + 18 * rows),
        ("setting", "variant", "bucket_cap_mb", "all-reduces", "plain = 1"),
        [
            (
                each.setting,
                VARIANTS[variant],
                f"{each.case.bucket_cap_mb:g}",
                str(each.case.all_reduces),
                str(each.against_plain),
            )
            for (_, variant), points in lines.items()
            for each in points
        ],
    )


PARTS: Final = ("compute", "seal", "transfer", "open", "reduce", "wait")


def split(results: Results) -> Picture | None:
    """What a recorded step was made of."""
    cases = split_steps(results)[:_MOST]
    if not cases:
        return None
    labels = [
        f"{case.model}, {case.ranks} ranks, {case.bucket_cap_mb:g} MB, {_SHORT[case.variant]}"
        for case in cases
    ]

    def picture(figure: Figure, axes: Axes, narrow: bool) -> None:
        for index, case in enumerate(cases):
            parts = {part.name: part for part in case.split}
            at = behind = 0.0
            for name in PARTS:
                part = parts.get(name)
                if part is None:
                    continue
                axes.barh(
                    index, part.exposed_s * 1e3, left=at, height=0.5, color=COLOURS[name],
                    label=name if index == 0 else None,
                )  # fmt: skip
                axes.barh(
                    index + 0.38, part.hidden_s * 1e3, left=behind, height=0.2, color=COLOURS[name],
                    hatch="//", linewidth=0,
                )  # fmt: skip
                at += part.exposed_s * 1e3
                behind += part.hidden_s * 1e3
        shown = [label.replace(", ", "\n", 1) if narrow else label for label in labels]
        _rows(axes, shown, narrow)
        axes.set_xlabel(
            "ms; hatched: hidden"
            if narrow
            else "milliseconds of one step on rank 0; hatched: hidden behind the backward pass"
        )
        legend(figure, 3 if narrow else 6)

    height = 110 + 40 * len(cases)
    return Picture(
        "split",
        "Where a step's time goes",
        f"Stacked bars of {len(cases)} recorded steps: computing, sealing, transfer, opening, "
        "reducing and waiting, each as far as the step is longer for it, and as far as it is "
        "hidden behind the backward pass.",
        *draw("split", height, picture, phone_height=height + 40),
        ("step", *PARTS),
        [
            (
                label,
                *(
                    " + ".join(
                        [f"{part.exposed_s * 1e3:,.1f} ms"]
                        + ([f"{part.hidden_s * 1e3:,.1f} hidden"] if part.hidden_s else [])
                    )
                    if (part := {each.name: each for each in case.split}.get(name))
                    else "-"
                    for name in PARTS
                ),
            )
            for label, case in zip(labels, cases, strict=True)
        ],
    )


def timeline(results: Results) -> Picture | None:
    case = timeline_step(results)
    if case is None:
        return None
    spans = case.timeline
    shades = {"forward": "plain", "backward": "compute", "optimizer": "published"}

    def picture(figure: Figure, axes: Axes, narrow: bool) -> None:
        for span in spans:
            computing = span.lane == "compute"
            width = (span.end_s - span.start_s) * 1e3
            colour = COLOURS[shades.get(span.name, "compute") if computing else "sealed"]
            axes.barh(
                0 if computing else 1, width, left=span.start_s * 1e3, height=0.6, color=colour,
                edgecolor=COLOURS["surface"], linewidth=0.8,
                label=span.name if computing else None,
            )  # fmt: skip
        axes.barh(0, 0, color=COLOURS["sealed"], label="sealed collectives")
        _rows(axes, ["model", "group"], narrow)
        axes.set_xlabel("milliseconds since the step began")
        legend(figure, 2 if narrow else 4)

    collectives = [span for span in spans if span.lane == "collective"]
    return Picture(
        "timeline",
        f"One step of {clipped(case.model)}, {case.ranks} ranks, {case.bucket_cap_mb:g} MB buckets",
        f"A timeline of rank 0 in two lanes: forward, backward and optimizer above, "
        f"{len(collectives)} sealed collectives below; what of these lies under the gap between "
        "backward and optimizer is exposed.",
        *draw("timeline", 210, picture, phone_height=250),
        ("lane", "what", "from", "to", "bytes"),
        [
            (
                span.lane,
                span.name,
                f"{span.start_s * 1e3:,.2f} ms",
                f"{span.end_s * 1e3:,.2f} ms",
                f"{span.bytes:,}" if span.bytes else "-",
            )
            for span in spans
        ],
    )


def comparison(found: Sequence[Pair], before: str, after: str) -> Picture | None:
    """The second results' times as multiples of the first's."""
    if not found:
        return None
    told = [each for each in found if not each.change.only_noise]
    shown = sorted(told, key=lambda each: abs(each.change.ratio - 1), reverse=True)[:_MOST]
    shown = sorted(shown or found[:_MOST], key=lambda each: each.change.ratio)

    def picture(figure: Figure, axes: Axes, narrow: bool) -> None:
        for index, each in enumerate(shown):
            told = each.change
            axes.errorbar(
                told.ratio, index,
                xerr=[[told.ratio - told.low], [told.high - told.ratio]],
                marker="o", markersize=8, capsize=3,
                color=COLOURS["sealed" if told.ratio <= 1 else "cc"],
            )  # fmt: skip
        labels = [each.label.replace(", ", "\n", 1) if narrow else each.label for each in shown]
        _rows(axes, [clipped(label, 60) for label in labels], narrow)
        axes.axvline(1, color=COLOURS["ink"], linewidth=1.2)
        axes.set_xlabel("second : first, below 1 is faster")

    faster = sum(each.change.ratio < 1 for each in told)
    return Picture(
        "comparison",
        "The second against the first",
        f"Of {len(found)} cases that both have, {faster} became faster, {len(told) - faster} "
        f"slower or equal, and {len(found) - len(told)} differ by noise alone.",
        *draw("comparison", 90 + 30 * len(shown), picture, phone_height=90 + 40 * len(shown)),
        ("case", clipped(before), clipped(after), "second : first"),
        [
            (
                each.label,
                f"{each.before * 1e3:,.3f} ms",
                f"{each.after * 1e3:,.3f} ms",
                str(each.change),
            )
            for each in found
        ],
    )


# ---- below a step: the link between two ranks, and the kernels


_DASHES: Final = {"shm": "-", "tcp": "--", "gpu": ":", "none": "-"}


def links(results: Results) -> Picture | None:
    """Time of an exchange by size, with the line T = alpha * messages + bytes / beta."""
    cases = [case for case in hops(results) if case.operation == "all_reduce"] or hops(results)
    if not cases:
        return None

    def picture(figure: Figure, axes: Axes, narrow: bool) -> None:
        drawn = set()
        for case in cases:
            name = f"{VARIANTS[case.variant].split(',')[0]}, {case.transport}"
            if name in drawn:  # Gloo is measured again beside each transport
                continue
            drawn.add(name)
            sizes = [point.bytes * point.messages for point in case.points]
            axes.plot(
                sizes, [median(point.seconds) * 1e3 for point in case.points], "o", markersize=6,
                color=COLOURS[case.variant],
                fillstyle="none" if case.transport == "tcp" else "full",
            )  # fmt: skip
            if case.fit is not None:
                line = [predicted(case.fit, p.messages, p.bytes) * 1e3 for p in case.points]
                axes.plot(
                    sizes, line, _DASHES[case.transport], color=COLOURS[case.variant], label=name
                )
        _two_logarithms(axes)
        axes.set_xticks(
            [1 << 12, 1 << 16, 1 << 20, 1 << 24], ["4 KiB", "64 KiB", "1 MiB", "16 MiB"]
        )
        axes.set_xlabel("bytes, all-reduced by two ranks")
        axes.set_ylabel("milliseconds")
        legend(figure, 1 if narrow else 2)

    fitted = [(case, case.fit) for case in hops(results)]
    return Picture(
        "links",
        "What a message costs and what a byte costs: α and β per hop",
        "Points are measured times, lines are T = α · messages + bytes / β. "
        + "; ".join(
            f"{VARIANTS[case.variant]} over {case.transport}: α {line.alpha_s * 1e6:,.0f} µs, "
            f"β {line.beta_bytes_per_s / 1e9:.2f} GB/s"
            for case, line in fitted
            if line is not None and case.operation == "all_reduce"
        )
        + ".",
        *draw("links", 400, picture, phone_height=420),
        ("operation", "transport", "variant", "α, µs", "β, GB/s", "off the line by"),
        [
            (case.operation, case.transport, VARIANTS[case.variant], *line_words(line))
            for case, line in fitted
        ],
    )  # fmt: skip


def rooflines(results: Results) -> Iterator[Picture | None]:
    """How close each kernel is to what memory can carry and arithmetic can do: of a core, a GPU."""
    yield roofline(
        kernels(results),
        "roofline",
        "The roofline: how close each kernel is to what one core can do",
        unit=(1e9, "billion"),
    )
    yield roofline(
        usable(results.gpu),
        "gpu-roofline",
        "The GPU's roofline: how close each kernel is to what its memory can carry",
        unit=(1e12, "trillion"),
    )


def roofline(
    found: list[KernelCase], key: str, title: str, unit: tuple[float, str]
) -> Picture | None:
    """Of one device's kernels; `unit` of its arithmetic."""
    placed = [case for case in found if case.operations and case.moved_bytes]
    if not placed or not any(case.kernel == "copy" for case in found):
        return None
    # A roof is above all that was measured: some kernels move more than a copy does.
    carrier = max(found, key=lambda case: case.moved_bytes / median(case.seconds))
    memory = carrier.moved_bytes / median(carrier.seconds)
    ceilings = _ceilings(found)
    scale, word = unit
    initial = {"billion": "G", "trillion": "T"}[word]

    return Picture(
        key,
        title,
        f"The most that a kernel moved through memory is {memory / 1e9:,.1f} GB/s "
        f"({carrier.kernel}). "
        + " ".join(
            f"{name}: {rate / scale:,.1f} {word} operations a second."
            for name, rate in ceilings.items()
        )
        + " Kernels: "
        + ", ".join(
            f"{case.kernel} {_of_roof(case, memory, ceilings):.0%} of its roof" for case in placed
        )
        + ".",
        columns=(
            "kernel",
            "device",
            "GB/s of data",
            "GB/s of memory",
            f"{initial}op/s",
            "of its roof",
        ),
        rows=[
            (
                f"{case.kernel} from {'memory' if case.moved_bytes else 'cache'}",
                case.device,
                f"{case.bytes / median(case.seconds) / 1e9:,.2f}",
                f"{case.moved_bytes / median(case.seconds) / 1e9:,.2f}",
                f"{case.operations / median(case.seconds) / scale:,.2f}",
                f"{_of_roof(case, memory, ceilings):.0%}"
                if case.operations and case.moved_bytes
                else "-",
            )
            for case in found
        ],
    )


_PRODUCTS: Final = "float32 products"


def _ceilings(found: list[KernelCase]) -> dict[str, float]:
    """The most arithmetic seen of each kind: of a cipher where the cache held its data, and of
    floats. Without such a cipher only memory is known to limit it."""
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


_PARTS: Final = {
    "world": "the group of all ranks",
    "all_reduce": "its first all-reduce",
    "mesh": "rows and columns of a mesh, afterwards",
}


def forming(results: Results) -> Picture | None:
    """What each part of it took, by the number of ranks."""
    parts = {what: _of(results, what) for what in _PARTS}
    if len(parts["world"]) < 2:
        return None

    few, many = parts["world"][0], parts["world"][-1]
    return Picture(
        "forming",
        "What it takes to form a job as it grows",
        f"A rank's processor works {few.cpu_seconds_per_rank * 1e3:,.0f} ms to form a group of "
        f"{few.ranks} and {many.cpu_seconds_per_rank * 1e3:,.0f} ms for one of {many.ranks}: every "
        f"member verifies every member. {many.handshakes / many.ranks:.1f} TLS handshakes a rank.",
        columns=(
            "ranks",
            "what",
            "TLS",
            "resumed",
            "sockets",
            "seconds",
            "CPU ms a rank",
            "RSS MB",
        ),
        rows=[
            (
                str(case.ranks),
                _PARTS[what],
                str(case.handshakes),
                str(case.resumptions),
                str(case.sockets),
                f"{case.seconds:.2f}",
                f"{case.cpu_seconds_per_rank * 1e3:.1f}",
                f"{case.rss_bytes / 1e6:.0f}",
            )
            for what, cases in parts.items()
            for case in cases
        ],
    )


def _of(results: Results, what: str) -> list[ScaleCase]:
    found = [each for each in results.scale if each.what == what and each.cpu_seconds_per_rank > 0]
    return sorted(found, key=lambda case: case.ranks)


# ---- a GPU: what was measured against its bar


def bars(results: Results) -> Picture | None:
    """Each measurement that has a bar, as a multiple of it; the table has the others too."""
    rows = rows_of(results)
    judged = [(row, reached) for row in rows if (reached := row.reached) is not None]
    if not judged:
        return None

    def picture(figure: Figure, axes: Axes, narrow: bool) -> None:
        for index, (row, reached) in enumerate(judged):
            # From 1 on: to the right of the bar is better than it asks, to the left is worse.
            axes.barh(
                index, reached - 1, left=1, height=0.6, color=COLOURS["sealed" if row.met else "cc"]
            )
            axes.annotate(
                f"{row.value:,g} {row.unit}", (max(reached, 1.0), index), (5, 0),
                textcoords="offset points", va="center", fontsize=11,
            )  # fmt: skip
        _rows(axes, [_label(row, narrow) for row, _ in judged], narrow)
        most = max(reached for _, reached in judged)
        least = min(reached for _, reached in judged)
        axes.set_xlim(min(0.8, 0.95 * least), max(1.2, most) * (1.9 if narrow else 1.25))
        axes.set_xticks(*_ticks(most))
        axes.axvline(1, color=COLOURS["ink"], linewidth=1.2)
        axes.set_xlabel("times as good as its bar" if narrow else "times as good as its bar asks")

    height = 90 + 34 * len(judged)
    missed = [row for row, _ in judged if not row.met]
    return Picture(
        "gpu",
        f"Sealed on {clipped(', '.join(dict.fromkeys(results.machine.gpus)) or 'a GPU')}",
        f"{len(judged) - len(missed)} of {len(judged)} measurements reach their bar. "
        "A ratio is the sealed time by that of what stands behind the colon, over the wire before "
        "it. " + "".join(f"Missed: {row.what}, {row.value:,g} ({row.bar}). " for row in missed),
        *draw("gpu", height, picture, phone_height=height + 26 * len(judged)),
        ("what", "measured", "19 of 20 find it in", "bar", "met", "detail"),
        [
            (
                row.what,
                f"{row.value:,g} {row.unit}",
                f"{row.low:g} to {row.high:g}" if row.low is not None else "-",
                row.bar,
                {True: "yes", False: "no", None: "-"}[row.met],
                row.detail,
            )
            for row in rows
        ],
    )


def _label(row: Row, narrow: bool) -> str:
    if not narrow:
        return clipped(f"{row.what} {row.bar}", 74)
    return fill(clipped(f"{row.what} {row.bar}", 74), 20)


def _ticks(most: float) -> tuple[list[float], list[str]]:
    step = 0.5 if most < 3 else 1.0 if most < 6 else 2.0
    places = [1 + step * index for index in range(int((most - 1) / step) + 1)]
    return places, [f"{each:g}×" for each in places]
