"""The printed story tells what happened, even if that is not what was promised."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from io import StringIO

from rich.console import Console, RenderableType

from sealring.lab.demo import story
from sealring.lab.demo.story import DemoOutcome
from sealring.lab.demo.wiretap import Sighting
from tests.core.engine.attacker import HEADER_FIELDS, header
from tests.lab.demo.test_story import CAUGHT, TOLD, UNHARMED, attacked, tapped, training

FIELDS = dict.fromkeys(HEADER_FIELDS, 1) | {"kind": 1, "length": 64, "sender": 5, "receiver": 6}


def printed(parts: Iterable[RenderableType]) -> str:
    console = Console(file=StringIO(), width=100)
    console.print(*parts, sep="\n")
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_the_wiretaps_record_is_shown_field_by_field() -> None:
    seen = tapped(record=Sighting(FIELDS, 0), header=header(**FIELDS) + bytes(range(16)))
    text = printed(story.wiretap(seen))
    assert "longest run of plaintext found: 0 bytes" in text
    assert "05 00 00 00 06 00 00 00" in text
    assert "from rank 5 to rank 6" in text
    assert "00 01 02 03 04 05 06 07 08 09 0a .." in text
    assert "+0.00e+00 +0.00e+00 +0.00e+00" in text


def test_plaintext_that_was_found_is_shown() -> None:
    seen = tapped(record=Sighting(FIELDS, 0), header=header(**FIELDS) + bytes(16), longest_run=48)
    assert "longest run of plaintext found: 48 bytes" in printed(story.wiretap(seen))


def test_an_attack_that_was_caught() -> None:
    text = printed(story.attack(attacked(TOLD, CAUGHT)))
    assert "Rank 1 caught it in step 3; the run ended on every rank." in text
    assert "all ranks hold weights aa" in text
    assert "500 ms" in text


def test_an_attack_that_was_not_caught() -> None:
    text = printed(story.attack(attacked(UNHARMED, replace(UNHARMED, weights="bb"))))
    assert "caught it" not in text
    assert "nothing, in 6 steps" in text
    assert "The ranks hold weights aa, bb." in text


def test_an_unnoticed_change_is_not_called_harmless() -> None:
    text = printed(story.attack(attacked(UNHARMED, UNHARMED)))
    assert "Nothing of the changed gradient" not in text
    assert "The ranks hold weights aa." in text


def test_a_run_that_did_not_end_everywhere() -> None:
    text = printed(story.attack(attacked(UNHARMED, CAUGHT)))
    assert "the run did not end on every rank" in text


def test_no_flip() -> None:
    text = printed(story.attack(attacked(TOLD, CAUGHT, flipped=False)))
    assert "The attacker flipped no bit." in text


def test_the_comparison_and_both_verdicts() -> None:
    assert "sealring : Gloo = 1.000" in printed(story.comparison(training()))
    good = DemoOutcome(training(), tapped(), attacked(TOLD, CAUGHT))
    assert "went as sealring promises, in 12 s." in printed(story.verdict(good, 12.3))
    bad = DemoOutcome(training(), tapped(longest_run=99), attacked(TOLD, CAUGHT))
    text = printed(story.verdict(bad, 12.3))
    assert "Not as promised" in text
    assert "the wiretap found 99 bytes of a gradient" in text
