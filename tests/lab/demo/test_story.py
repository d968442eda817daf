"""What the demo concludes from its measurements, and one real run."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from sealring.cli import app
from sealring.lab.demo.story import Attacked, DemoOutcome, Tapped, Training
from sealring.lab.demo.train import Backend, Ending, TrainingStep
from sealring.lab.demo.wiretap import Flipped, Sighting

RECORD = Sighting({"length": 64, "kind": 1, "collective": 9}, 0)


def training(steps: int = 2, *, differ_from: int = 1 << 30) -> Training:
    """Makes losses of 3 over both backends; from a step on, Gloo's are half a nat higher."""
    result = Training(ranks=2, steps=steps)
    for number in range(steps):
        more = 0.5 if number >= differ_from else 0.0
        losses: dict[Backend, float] = {"sealring": 3.0, "gloo": 3.0 + more}
        for backend, loss in losses.items():
            assert not result.add(TrainingStep(backend, number, loss - 1, 0.5, 100))
            assert result.add(TrainingStep(backend, number, loss + 1, 0.5, 100))
    return result


def tapped(**changes: Any) -> Tapped:
    return replace(
        Tapped(0, 1, 1000, 100, 3, 500, 7.999, 7.5, 0, RECORD, bytes(80), bytes(64), bytes(64)),
        **changes,
    )


CAUGHT = Ending(
    2, "group.tampered_record", "group.tampered_record", "changed", None, 1.0, "aa", "aa"
)
TOLD = replace(CAUGHT, reported_by=1)
UNHARMED = replace(CAUGHT, raised=None, error=None, message="")


def attacked(*endings: Ending, flipped: bool = True) -> Attacked:
    return Attacked(1, Flipped(RECORD, 100, 3, 0.5) if flipped else None, dict(enumerate(endings)))


def test_a_run_as_promised_has_no_surprises() -> None:
    assert DemoOutcome(training(), tapped(), attacked(TOLD, CAUGHT)).surprises() == []


@pytest.mark.parametrize(
    ("outcome", "surprise"),
    [
        (
            DemoOutcome(training(40, differ_from=38), tapped(), attacked(TOLD, CAUGHT)),
            "final losses over sealring and over Gloo differ by 0.1",
        ),
        (DemoOutcome(training(), tapped(longest_run=32), attacked(TOLD, CAUGHT)), "32 bytes of a"),
        (DemoOutcome(training(), tapped(entropy=7.5), attacked(TOLD, CAUGHT)), "7.5000 bits"),
        (DemoOutcome(training(), tapped(), attacked(TOLD, CAUGHT, flipped=False)), "no bit was"),
        (DemoOutcome(training(), tapped(), attacked(TOLD, UNHARMED)), r"rank 1 should .* \[\] did"),
        (DemoOutcome(training(), tapped(), attacked(UNHARMED, CAUGHT)), r"ranks \[0\] .* \[\] did"),
        (
            DemoOutcome(training(), tapped(), attacked(replace(TOLD, weights="bb"), CAUGHT)),
            "weights are not those",
        ),
        (
            DemoOutcome(
                training(), tapped(), attacked(replace(TOLD, error="group.peer_lost"), CAUGHT)
            ),
            r"ranks \[0\] .* \[\] did",
        ),
    ],
)
def test_whatever_is_not_as_promised_is_said(outcome: DemoOutcome, surprise: str) -> None:
    (said,) = outcome.surprises()
    with pytest.raises(AssertionError, match=surprise):
        raise AssertionError(said)


def test_losses_that_differ_from_the_first_are_said_twice() -> None:
    outcome = DemoOutcome(training(differ_from=0), tapped(), attacked(TOLD, CAUGHT))
    assert [text[:26] for text in outcome.surprises()] == [
        "the losses over sealring a",
        "the final losses over seal",
    ]


def test_a_step_counts_over_all_ranks() -> None:
    result = training()
    assert result.done == 2
    assert [step.loss for step in result.curves["gloo"]] == [3.0, 3.0]
    assert result.sealed_bytes == 400
    assert result.sealed_rate() == 400


def test_the_demo_as_it_is_by_default() -> None:
    """All defaults except the length; the number of ranks decides the algorithms."""
    result = CliRunner().invoke(app, ["demo", "--steps", "2", "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["as_promised"]
    assert len(told["attack"]["endings"]) == 4


def test_the_demo_itself() -> None:
    result = CliRunner().invoke(app, ["demo", "--steps", "2", "--ranks", "2", "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["as_promised"]
    # With two ranks each sum is one addition, which has only one result.
    assert told["training"]["largest_loss_difference"] == 0
    assert told["wiretap"]["longest_plaintext_run"] == 0
    assert told["wiretap"]["searched_bytes"] > 1 << 20
    assert told["attack"]["caught_by"] == [1]
    assert [ending["error"] for ending in told["attack"]["endings"]] == [
        "group.tampered_record"
    ] * 2
    assert [ending["reported_by"] for ending in told["attack"]["endings"]] == [1, None]
    assert "rank 1 reported: " in told["attack"]["endings"][0]["message"]
    assert {ending["whole_steps"] for ending in told["attack"]["endings"]} == {2}
    assert told["attack"]["weights_intact"]
