"""The report's picture of what forming groups costs as they grow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sealring.report.drawing import COLOURS, Picture, draw
from sealring.report.plots import legend
from sealring.results import Results, ScaleCase

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PARTS: Final = {
    "world": ("the group of all ranks", "sealed"),
    "all_reduce": ("its first all-reduce", "plain"),
    "mesh": ("rows and columns of a mesh, afterwards", "cc"),
}


def forming(results: Results) -> Picture | None:
    """CPU time of a rank by the number of ranks, for each part; the table has the rest."""
    parts = {what: _of(results, what) for what in _PARTS}
    if len(parts["world"]) < 2:
        return None

    def picture(figure: Figure, axes: Axes, narrow: bool) -> None:
        for what, (name, colour) in _PARTS.items():
            cases = parts[what]
            axes.plot(
                [case.ranks for case in cases],
                [case.cpu_seconds_per_rank * 1e3 for case in cases],
                "o-", markersize=6, color=COLOURS[colour], label=name,
            )  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        numbers = sorted({case.ranks for case in parts["world"]})
        axes.set_xticks(numbers, [str(number) for number in numbers])
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.minorticks_off()
        axes.set_xlabel("ranks")
        axes.set_ylabel("CPU milliseconds of a rank")
        legend(figure, 1 if narrow else 3)

    desk, phone = draw("forming", 360, picture, phone_height=420)
    few, many = parts["world"][0], parts["world"][-1]
    return Picture(
        "forming",
        "What it takes to form a job as it grows",
        f"A rank's processor works {few.cpu_seconds_per_rank * 1e3:,.0f} ms to form a group of "
        f"{few.ranks} and {many.cpu_seconds_per_rank * 1e3:,.0f} ms for one of {many.ranks}: every "
        f"member verifies every member. {many.handshakes / many.ranks:.1f} TLS handshakes a rank.",
        desk,
        phone,
        ("ranks", "what", "TLS", "resumed", "sockets", "seconds", "CPU ms a rank", "RSS MB"),
        [
            (
                str(case.ranks),
                _PARTS[what][0],
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
