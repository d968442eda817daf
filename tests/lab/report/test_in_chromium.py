"""The page as a person sees it: in a real browser, on a desk and on a phone, light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sealring.lab.report import write_page
from tests.lab.report.browser import Browser, chromium
from tests.lab.report.examples import whole

KEYS = [
    "overhead",
    "buckets",
    "split",
    "timeline",
    "links",
    "gpu",
]

SEEN = """
[...document.querySelectorAll('section[id] figure svg')]
  .filter(svg => svg.getClientRects().length)
  .map(svg => {
    const box = svg.getBoundingClientRect(), scale = box.width / svg.viewBox.baseVal.width;
    const shapes = [...svg.querySelectorAll('path, use, line, rect')]
      .filter(each => { const b = each.getBoundingClientRect(); return b.width + b.height > 2; });
    return {
      key: svg.closest('section').id,
      said: svg.parentElement.getAttribute('aria-label'),
      left: box.left, right: box.right, height: box.height, shapes: shapes.length,
      texts: [...svg.querySelectorAll('text')].map(text => {
        const b = text.getBoundingClientRect(), style = getComputedStyle(text);
        return {
          text: text.textContent, size: parseFloat(style.fontSize) * scale, fill: style.fill,
          left: b.left, right: b.right, top: b.top, bottom: b.bottom,
        };
      }),
    };
  })
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, html: str) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(html)
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)], ids=["desk", "phone"])
def test_every_plot_is_drawn_and_legible(
    browser: Browser, page: Path, width: int, height: int, scheme: str
) -> None:
    browser.open(page, width, height, scheme)
    seen = browser.value(SEEN)
    assert [svg["key"] for svg in seen] == KEYS
    assert browser.value("document.documentElement.scrollWidth") <= width
    ground = colour(browser.value("getComputedStyle(document.body).backgroundColor"))
    assert (luminance(ground) < 0.1) is (scheme == "dark")
    for svg in seen:
        assert len(svg["said"]) > 60, svg["key"]
        assert svg["shapes"] >= 10, svg["key"]
        assert svg["height"] >= 150, svg["key"]
        assert 0 <= svg["left"] < svg["right"] <= width, svg["key"]
        assert len(svg["texts"]) >= 6, svg["key"]
        for text in svg["texts"]:
            where = (svg["key"], text["text"])
            assert text["size"] >= 10.5, where
            assert svg["left"] - 1 <= text["left"], where
            assert text["right"] <= svg["right"] + 1, where
            assert contrast(colour(text["fill"]), ground) >= 4.5, where
        assert not overlapping(svg["texts"]), svg["key"]
    assert browser.complaints() == []
    assert browser.fetched() == [page.as_uri()]


def test_two_results_compared_are_drawn_too(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "two.html"
    write_page(path, whole(), whole(seed=1, factor=0.8))
    for width, height in ((1280, 900), (390, 844)):
        browser.open(path, width, height, "light")
        seen = browser.value(SEEN)
        assert [svg["key"] for svg in seen] == ["comparison", *KEYS[:-1]]
        assert all(not overlapping(svg["texts"]) for svg in seen)
        assert browser.value("document.documentElement.scrollWidth") <= width
    assert browser.complaints() == []


def overlapping(texts: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Pairs of labels of which one covers a good part of the other."""
    found = []
    for index, one in enumerate(texts):
        for other in texts[index + 1 :]:
            wide = min(one["right"], other["right"]) - max(one["left"], other["left"])
            high = min(one["bottom"], other["bottom"]) - max(one["top"], other["top"])
            smaller = min(area(one), area(other))
            if wide > 0 and high > 0 and wide * high > 0.25 * smaller:
                found.append((one["text"], other["text"]))
    return found


def area(text: dict[str, Any]) -> float:
    return float((text["right"] - text["left"]) * (text["bottom"] - text["top"]))


def colour(text: str) -> tuple[float, float, float]:
    red, green, blue = (float(part) for part in text[text.index("(") + 1 : -1].split(",")[:3])
    return red, green, blue


def luminance(rgb: tuple[float, float, float]) -> float:
    """As WCAG 2 defines it."""
    parts = [
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
        for value in (each / 255 for each in rgb)
    ]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def contrast(one: tuple[float, float, float], other: tuple[float, float, float]) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
