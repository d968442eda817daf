"""How much of a step's communication is exposed, and what its time went into."""

from __future__ import annotations

import pytest

from sealring.lab.bench.step import PARTS, Ran, Stamps, exposed_ns, parts_of, ran_in, spans_of
from sealring.observe import CollectiveAccount

STEP = Stamps(start=0, forward=100, backward=200, end=250)


def ran(queued: int, started: int, ended: int) -> Ran:
    return Ran("all_reduce", 64, queued, started, ended)


@pytest.mark.parametrize(
    ("collectives", "exposed"),
    [
        ([(110, 110, 140), (150, 150, 151)], 1),  # the last gradient came at 150
        ([(110, 110, 140), (150, 150, 190)], 40),
        ([(110, 110, 160), (150, 160, 190)], 40),  # the first still ran when the last was queued
        ([(150, 150, 200)], 50),
        ([(10, 10, 30), (110, 110, 140), (150, 150, 150)], 20),  # buffers, before the forward pass
        ([], 0),
    ],
)
def test_exposed_is_what_ran_while_nothing_computed(
    collectives: list[tuple[int, int, int]], exposed: int
) -> None:
    assert exposed_ns(STEP, [ran(*times) for times in collectives]) == exposed


def test_the_parts_add_up_to_the_step_and_to_the_engines_time() -> None:
    spent = dict.fromkeys(PARTS, 5e-09) | {"seal": 30e-9, "open": 20e-9, "wait": 10e-9}
    collectives = [ran(110, 110, 140), ran(150, 150, 190)]
    split = parts_of(STEP, collectives, spent)
    assert [part.name for part in split] == [
        "compute",
        "seal",
        "transfer",
        "open",
        "reduce",
        "wait",
    ]
    assert sum(part.exposed_s for part in split) == pytest.approx(250e-9)
    engine = sum(part.exposed_s + part.hidden_s for part in split[1:])
    assert engine == pytest.approx(70e-9)
    seal = split[1]
    assert seal.exposed_s == pytest.approx(30e-9 * 40 / 70)
    assert seal.hidden_s == pytest.approx(30e-9 * 30 / 70)
    # A GPU's collectives do not tell what their time went into, so they are one part.
    compute, transfer = parts_of(STEP, collectives, None)
    assert (compute.name, transfer.name) == ("compute", "transfer")
    assert compute.exposed_s + transfer.exposed_s == pytest.approx(250e-9)
    assert (transfer.exposed_s, transfer.hidden_s) == pytest.approx((40e-9, 30e-9))


def test_the_timeline_counts_from_the_steps_start() -> None:
    late = Stamps(1000, 1100, 1200, 1250)
    spans = spans_of(late, [ran(1110, 1110, 1140), ran(1150, 1160, 1190)])
    told = [
        (each.lane, each.name, round(each.start_s * 1e9), round(each.end_s * 1e9)) for each in spans
    ]
    assert told == [
        ("compute", "forward", 0, 100),
        ("compute", "backward", 100, 150),
        ("compute", "optimizer", 200, 250),
        ("collective", "all_reduce", 110, 140),
        ("collective", "all_reduce", 160, 190),
    ]


def test_only_what_ran_within_the_step_is_its_own() -> None:
    def entry(started: int | None, ended: int | None) -> CollectiveAccount:
        return CollectiveAccount(
            1,
            "all_reduce",
            "ring",
            64,
            "float32",
            "sum",
            None,
            "done",
            0,
            started,
            ended,
            0,
            0,
            None,
        )

    within = ran_in(STEP, [entry(-5, 10), entry(10, 20), entry(240, 260), entry(30, None)])
    assert [(each.started, each.ended) for each in within] == [(10, 20)]
