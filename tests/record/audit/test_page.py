"""The audit's page is one file. It is used here in a real browser, by mouse and keyboard."""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sealring.record.audit.audit import AuditQuestion, AuditResult, audit
from sealring.record.audit.claims import RunClaims
from sealring.record.audit.graph import Graph, NodeKind
from sealring.record.audit.page import draw, page, write_page
from tests.lab.report.browser import Browser, chromium
from tests.record.audit.made_runs import MODEL, RAW, MadeRun
from tests.record.audit.stated_lies import one_link


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> AuditResult:
    folder = tmp_path_factory.mktemp("audit")
    made = MadeRun()
    one_link(made)
    (folder / "model.bin").write_bytes(MODEL)
    claims = RunClaims(trained_only_on=frozenset({RAW.sha256}), no_gaps=True)
    run = made.write(folder / "run")
    return audit(run.path, made.trust, AuditQuestion(claims, folder / "model.bin"))


@pytest.mark.threat("A14")
def test_the_policy_names_the_one_style_sheet_and_the_one_script(result: AuditResult) -> None:
    html = page(result)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', html)
    (style,) = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    assert policy.startswith("default-src 'none'; ")
    for text in (style, script):
        assert base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() in policy
    assert "unsafe" not in policy
    assert "style=" not in html.replace(style, "")


def test_what_is_said_without_a_script(result: AuditResult) -> None:
    html = page(result)
    head = html.partition("<h2>The run</h2>")[0]
    assert "rank 1 or rank 2" in head
    assert "trained_only_on" in head
    assert "found by contradiction" in head


def test_a_long_run_has_several_intervals_in_one_cell(result: AuditResult) -> None:
    nodes = list(result.graph.nodes.values())
    far = [replace(node, sequence=node.sequence * 100_000) for node in nodes]
    graph = type(result.graph)({node.key: node for node in far}, dict(result.graph.edges))
    assert len(page(replace(result, graph=graph))) < 200_000


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_all_checkpoints_of_one_interval_are_inside_the_drawing(count: int) -> None:
    """The frame had room for one checkpoint, and the others were drawn below it."""
    graph = Graph()
    interval = graph.add("interval", NodeKind.INTERVAL, "interval 0 of rank 0")
    interval.rank = interval.sequence = 0
    for number in range(count):
        graph.add(f"checkpoint {number}", NodeKind.CHECKPOINT, f"run@{number}").sequence = 0
    picture = draw(graph)
    assert len(picture.shapes) == 1 + count
    assert picture.frame is not None
    left, top, width, height = picture.frame
    for shape in picture.shapes:
        assert left <= shape.x <= shape.x + shape.width <= left + width <= picture.width
        assert top <= shape.y <= shape.y + shape.height <= top + height <= picture.height


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


def opened(browser: Browser, path: Path, width: int = 1280, scheme: str = "light") -> None:
    browser.open(path, width, 900, scheme)
    until = time.monotonic() + 60
    while not browser.value("document.documentElement.dataset.opened || ''"):
        assert time.monotonic() < until
        time.sleep(0.02)


def press(browser: Browser, key: str) -> None:
    for kind in ("keyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)


def shown(browser: Browser) -> str:
    found: str = browser.value("document.querySelector('#details h3').textContent")
    return found


def go_to(browser: Browser, title: str) -> None:
    buttons = "[...document.querySelectorAll('#details button')]"
    browser.value(f"{buttons}.find(each => each.textContent === '{title}').click()")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_opens_and_says_nothing_to_the_console(
    browser: Browser, result: AuditResult, tmp_path: Path, width: int, scheme: str
) -> None:
    path = tmp_path / "page.html"
    write_page(path, result)
    opened(browser, path, width, scheme)
    assert browser.complaints() == []
    assert browser.fetched() == [path.as_uri()]
    assert browser.value("document.documentElement.scrollWidth") <= width
    assert shown(browser) == "rank 1, interval 1"  # the first one at fault


def test_the_graph_is_walked_by_keys_and_by_links(
    browser: Browser, result: AuditResult, tmp_path: Path
) -> None:
    path = tmp_path / "page.html"
    write_page(path, result)
    opened(browser, path)
    browser.value("document.querySelector('svg [tabindex=\"0\"]').focus()")
    press(browser, "ArrowRight")
    assert shown(browser) == "rank 1, interval 2"
    press(browser, "ArrowDown")
    assert shown(browser) == "rank 2, interval 2"
    assert browser.value("document.activeElement.getAttribute('aria-label')") == shown(browser)
    press(browser, "n")
    assert shown(browser) == "rank 1, interval 1"
    go_to(browser, "rank 1, interval 0")
    assert shown(browser) == "rank 1, interval 0"
    go_to(browser, "corpus")
    assert shown(browser) == "corpus"
    browser.value("document.querySelector('[data-node]').click()")
    record = browser.value("document.querySelector('#details pre').textContent")
    assert '"predicateType": "https://sealring.github.io/sealring/' in record
    assert browser.complaints() == []
