"""The report's pictures of what lies below a step: the link between two ranks, and the kernels."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Final

from sealring.bench.fit import predicted
from sealring.report.drawing import COLOURS, Picture, draw
from sealring.report.findings import hops, kernels
from sealring.report.plots import VARIANTS, legend
from sealring.results import KernelCase, Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(
            [1 << 12, 1 << 16, 1 << 20, 1 << 24], ["4 KiB", "64 KiB", "1 MiB", "16 MiB"]
        )
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.minorticks_off()
        axes.set_xlabel("bytes, all-reduced by two ranks")
        axes.set_ylabel("milliseconds")
        legend(figure, 1 if narrow else 2)

    desk, phone = draw("links", 400, picture, phone_height=420)
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
        desk,
        phone,
        ("operation", "transport", "variant", "α, µs", "β, GB/s", "off the line by"),
        [
            (
                case.operation,
                case.transport,
                VARIANTS[case.variant],
                f"{line.alpha_s * 1e6:,.1f} ({line.alpha_low_s * 1e6:,.1f} to "
                f"{line.alpha_high_s * 1e6:,.1f})" if line else "no line fits",
                f"{line.beta_bytes_per_s / 1e9:.2f} ({line.beta_low_bytes_per_s / 1e9:.2f} to "
                f"{line.beta_high_bytes_per_s / 1e9:.2f})" if line else "-",
                f"{line.residual:.0%}" if line else "-",
            )
            for case, line in fitted
        ],
    )  # fmt: skip


def roofline(results: Results) -> Picture | None:
    """Each kernel of a core under what memory can carry and what arithmetic can do."""
    return roofline_of(
        kernels(results),
        "roofline",
        "The roofline: how close each kernel is to what one core can do",
        unit=(1e9, "billion"),
    )


def roofline_of(
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

    def picture(figure: Figure, axes: Axes, narrow: bool) -> None:
        xs = [case.operations / case.moved_bytes for case in placed]
        left, right = min(xs) / 4, max(xs) * 6
        top = max(ceilings.values()) if ceilings else memory * right
        knee = min(top / memory, right)
        axes.plot(
            [left, knee, right], [each * memory / scale for each in (left, knee, knee)],
            color=COLOURS["ink"], linewidth=1.6,
            label=f"memory ({carrier.kernel}): {memory / 1e9:,.1f} GB/s",
        )  # fmt: skip
        for (name, rate), dashes in zip(ceilings.items(), ("--", ":"), strict=False):
            axes.plot(
                [min(rate / memory, right), right], [rate / scale] * 2, dashes,
                color=COLOURS["muted"], linewidth=2,
                label=f"{name}: {rate / scale:,.1f} {initial}op/s",
            )  # fmt: skip
        colours = {"seal": "sealed", "open": "open", "reduce": "reduce", "matmul": "compute"}
        for case, x in zip(placed, xs, strict=True):
            y = case.operations / median(case.seconds) / scale
            axes.plot(x, y, "o", markersize=9, color=COLOURS[colours.get(case.kernel, "transfer")])
            # Kernels of a kind lie close together: each has a corner of its own for its name.
            after = case.kernel not in ("hop", "open_reduce")
            above = case.kernel not in ("open", "open_reduce")
            axes.annotate(
                case.kernel, (x, y), (9 if after else -9, 5 if above else -12),
                ha="left" if after else "right", textcoords="offset points", fontsize=11,
            )  # fmt: skip
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(left, right)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlabel("operations per byte moved")
        axes.set_ylabel(f"{word} operations a second")
        legend(figure, 1 if narrow else 3)

    desk, phone = draw(key, 380, picture, phone_height=360)
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
        desk,
        phone,
        ("kernel", "device", "GB/s of data", "GB/s of memory", f"{initial}op/s", "of its roof"),
        [
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
