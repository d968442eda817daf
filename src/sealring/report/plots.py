"""The report's pictures of training steps, each with what it says in words and in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from textwrap import fill
from typing import TYPE_CHECKING, Any, Final

from sealring.report.drawing import COLOURS, Picture, draw
from sealring.report.findings import (
    Overhead,
    Pair,
    best_buckets,
    span_of,
    split_steps,
    timeline_step,
)
from sealring.report.published import FIGURES
from sealring.results import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
    desk, phone = draw("overhead", height, picture, phone_height=height + 50)
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
        desk,
        phone,
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
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(caps, [f"{cap:g}" for cap in caps])
        axes.minorticks_off()
        axes.axhline(1, color=COLOURS["ink"], linewidth=1.2)
        top = axes.get_ylim()[1]
        ticks = [each for each in (0.5, 1, 1.5, 2, 3, 5, 10, 20, 40) if each <= top * 1.05]
        axes.set_yticks(ticks, [f"{each:g}×" for each in ticks])
        axes.set_xlabel("bucket_cap_mb")
        axes.set_ylabel("step, plain = 1")
        legend(figure, 1 if narrow else 2)

    rows = len(lines)
    desk, phone = draw(
        "buckets", 320 + 18 * ((rows + 1) // 2), picture, phone_height=300 + 18 * rows
    )
    return Picture(
        "buckets",
        "Overhead against DDP's bucket size",
        "Lines over the bucket size for "
        + ", ".join(clipped(setting) for setting in settings)
        + ": a larger bucket means fewer all-reduces for the same bytes.",
        desk,
        phone,
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
        axes.set_yticks(
            range(len(cases)),
            [label.replace(", ", "\n", 1) if narrow else label for label in labels],
            fontsize=11,
        )
        axes.set_xlabel(
            "ms; hatched: hidden"
            if narrow
            else "milliseconds of one step on rank 0; hatched: hidden behind the backward pass"
        )
        axes.grid(False, axis="y")
        axes.invert_yaxis()
        if narrow:
            axes.xaxis.set_major_locator(_few())
        legend(figure, 3 if narrow else 6)

    height = 110 + 40 * len(cases)
    desk, phone = draw("split", height, picture, phone_height=height + 40)
    return Picture(
        "split",
        "Where a step's time goes",
        f"Stacked bars of {len(cases)} recorded steps: computing, sealing, transfer, opening, "
        "reducing and waiting, each as far as the step is longer for it, and as far as it is "
        "hidden behind the backward pass.",
        desk,
        phone,
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


def _few() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(4)


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
        axes.set_yticks([0, 1], ["model", "group"])
        axes.set_ylim(1.6, -0.6)
        axes.set_xlabel("milliseconds since the step began")
        axes.grid(False, axis="y")
        if narrow:
            axes.xaxis.set_major_locator(_few())
        legend(figure, 2 if narrow else 4)

    desk, phone = draw("timeline", 210, picture, phone_height=250)
    collectives = [span for span in spans if span.lane == "collective"]
    return Picture(
        "timeline",
        f"One step of {clipped(case.model)}, {case.ranks} ranks, {case.bucket_cap_mb:g} MB buckets",
        f"A timeline of rank 0 in two lanes: forward, backward and optimizer above, "
        f"{len(collectives)} sealed collectives below; what of these lies under the gap between "
        "backward and optimizer is exposed.",
        desk,
        phone,
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
        axes.set_yticks(range(len(shown)), [clipped(label, 60) for label in labels], fontsize=11)
        axes.axvline(1, color=COLOURS["ink"], linewidth=1.2)
        axes.set_xlabel("second : first, below 1 is faster")
        axes.set_ylim(len(shown) - 0.5, -0.5)
        if narrow:
            axes.xaxis.set_major_locator(_few())

    desk, phone = draw(
        "comparison", 90 + 30 * len(shown), picture, phone_height=90 + 40 * len(shown)
    )
    faster = sum(each.change.ratio < 1 for each in told)
    return Picture(
        "comparison",
        "The second against the first",
        f"Of {len(found)} cases that both have, {faster} became faster, {len(told) - faster} "
        f"slower or equal, and {len(found) - len(told)} differ by noise alone.",
        desk,
        phone,
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
