"""The page in a real browser, on a desk and on a phone, in light and dark colours."""

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
    "gpu",
]

SEEN = """
[...document.querySelectorAll('section[id] figure [role=img]')]
  .map(picture => {
    const box = picture.getBoundingClientRect();
    const shapes = [...picture.querySelectorAll('i')]
      .filter(each => { const b = each.getBoundingClientRect(); return b.width + b.height > 2; });
    const texts = [...picture.querySelectorAll('.legend span, .label, .value, .axis b')];
    return {
      key: picture.closest('section').id,
      said: picture.getAttribute('aria-label'),
      left: box.left, right: box.right, height: box.height, shapes: shapes.length,
      texts: texts.filter(text => text.textContent).map(text => {
        const b = text.getBoundingClientRect(), style = getComputedStyle(text);
        return {
          text: text.textContent, size: parseFloat(style.fontSize), fill: style.color,
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
    assert [picture["key"] for picture in seen] == KEYS
    assert browser.value("document.documentElement.scrollWidth") <= width
    ground = colour(browser.value("getComputedStyle(document.body).backgroundColor"))
    assert (luminance(ground) < 0.1) is (scheme == "dark")
    for picture in seen:
        assert len(picture["said"]) > 60, picture["key"]
        assert picture["shapes"] >= 10, picture["key"]
        assert picture["height"] >= 90, picture["key"]
        assert 0 <= picture["left"] < picture["right"] <= width, picture["key"]
        assert len(picture["texts"]) >= 6, picture["key"]
        for text in picture["texts"]:
            where = (picture["key"], text["text"])
            assert text["size"] >= 10.5, where
            assert picture["left"] - 1 <= text["left"], where
            assert text["right"] <= picture["right"] + 1, where
            assert contrast(colour(text["fill"]), ground) >= 4.5, where
        assert not overlapping(picture["texts"]), picture["key"]
    assert browser.complaints() == []
    assert browser.fetched() == [page.as_uri()]


def test_two_results_compared_are_drawn_too(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "two.html"
    write_page(path, whole(), whole(seed=1, factor=0.8))
    for width, height in ((1280, 900), (390, 844)):
        browser.open(path, width, height, "light")
        seen = browser.value(SEEN)
        assert [picture["key"] for picture in seen] == ["comparison", *KEYS[:-1]]
        assert all(not overlapping(picture["texts"]) for picture in seen)
        assert browser.value("document.documentElement.scrollWidth") <= width
    assert browser.complaints() == []


def overlapping(texts: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Returns the pairs of labels in which one covers a good part of the other."""
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
    """Computes the luminance by WCAG 2."""
    parts = [
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
        for value in (each / 255 for each in rgb)
    ]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def contrast(one: tuple[float, float, float], other: tuple[float, float, float]) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
