"""matplotlib's SVG, made part of a page: its colours are the page's, its size is the screen's.

A picture is drawn twice, for a desk and for a phone, so that letters have the same size on both.
Colours are drawn as stand-ins and then named: the page's style sheet says what they are in the
light and in the dark.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from io import StringIO
from typing import TYPE_CHECKING, Any, Final

from sealring.errors import ConfigurationError

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
    desk: str
    phone: str
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
