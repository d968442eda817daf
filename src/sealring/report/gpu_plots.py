"""The report's pictures of a GPU: what was measured against its bar, and its kernels' roofline."""

from __future__ import annotations

from textwrap import fill
from typing import TYPE_CHECKING

from sealring.bench.gpu.bars import Row, rows_of
from sealring.report.drawing import COLOURS, Picture, draw
from sealring.report.machine_plots import roofline_of
from sealring.report.plots import clipped
from sealring.results import Results, usable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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
        axes.set_yticks(range(len(judged)), [_label(row, narrow) for row, _ in judged], fontsize=11)
        most = max(reached for _, reached in judged)
        least = min(reached for _, reached in judged)
        axes.set_xlim(min(0.8, 0.95 * least), max(1.2, most) * (1.9 if narrow else 1.25))
        axes.set_xticks(*_ticks(most))
        axes.axvline(1, color=COLOURS["ink"], linewidth=1.2)
        axes.set_xlabel("times as good as its bar" if narrow else "times as good as its bar asks")
        axes.grid(False, axis="y")
        axes.set_ylim(len(judged) - 0.5, -0.5)

    height = 90 + 34 * len(judged)
    desk, phone = draw("gpu", height, picture, phone_height=height + 26 * len(judged))
    missed = [row for row, _ in judged if not row.met]
    return Picture(
        "gpu",
        f"Sealed on {clipped(', '.join(dict.fromkeys(results.machine.gpus)) or 'a GPU')}",
        f"{len(judged) - len(missed)} of {len(judged)} measurements reach their bar. "
        "A ratio is the sealed time by that of what stands behind the colon, over the wire before "
        "it. " + "".join(f"Missed: {row.what}, {row.value:,g} ({row.bar}). " for row in missed),
        desk,
        phone,
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


def roofline(results: Results) -> Picture | None:
    found = usable(results.gpu)
    return roofline_of(
        found,
        "gpu-roofline",
        "The GPU's roofline: how close each kernel is to what its memory can carry",
        unit=(1e12, "trillion"),
    )
