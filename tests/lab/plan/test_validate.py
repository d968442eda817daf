"""A profile from measurements predicts cases that it has not seen."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from sealring.core.schedule import Operation, chunks, program_for
from sealring.core.schedule.table import Placement, parse_table
from sealring.errors import ConfigurationError
from sealring.lab.plan.fit import profile_of
from sealring.lab.plan.profiles import Profile, Route
from sealring.lab.plan.validate import computing, validate
from sealring.lab.results import read_results
from tests.lab.plan.measured import RATES, SIZES, figure, results_of

RESULTS = Path(__file__).parents[3] / "docs" / "results"


def imagined() -> Profile:
    """Returns a profile in the form of fit.py's, with its own overheads, latencies and shares."""
    blank = {field.name: figure(0.0) for field in dataclasses.fields(Route)}
    sealed = Route(
        **{
            **blank,
            "seal_bytes_per_s": figure(RATES["seal"]),
            "open_bytes_per_s": figure(RATES["open"]),
            "reduce_bytes_per_s": figure(RATES["reduce"]),
            "copy_bytes_per_s": figure(RATES["copy"]),
            "inside_pull_bytes_per_s": figure(RATES["copy"]),
            "inside_forward_bytes_per_s": figure(RATES["copy"]),
            "record_bytes": figure(126976),
            "call_s": figure(120e-6),
            "prepared_s": figure(70e-6),
            "send_s": figure(4e-6),
            "receive_s": figure(4e-6),
            "turn_s": figure(30e-6),
            "overlaps": figure(1),
            "core_share": figure(1),
        }
    )
    plain = Route(
        **{
            **blank,
            "copy_bytes_per_s": figure(RATES["copy"]),
            "turn_s": figure(400e-6),
            "inside_latency_s": figure(900e-6),
            "inside_push_bytes_per_s": figure(2.8e9),
            "inside_forward_bytes_per_s": figure(2.8e9),
            "inside_pull_bytes_per_s": figure(2.8e9),
            "overlaps": figure(1),
            "core_share": figure(0.6),
        }
    )
    from sealring.lab.plan.profiles import Device

    device = Device(
        "cpu", figure(65536), figure(2), figure(8 << 30), figure(3e10), figure(3e10), figure(0.5),
        figure(1e10),
    )  # fmt: skip
    return Profile("imagined", "", "100gbe", device, plain, None, sealed)


def test_a_profile_is_found_again_from_what_it_would_measure() -> None:
    truth = imagined()
    found = profile_of(results_of(truth))
    assert truth.sealed is not None
    assert found.sealed is not None
    for name in (
        "call_s", "prepared_s", "send_s", "receive_s", "seal_bytes_per_s",
        "inside_pull_bytes_per_s",
    ):  # fmt: skip
        expected, value = getattr(truth.sealed, name).value, getattr(found.sealed, name).value
        assert value == pytest.approx(expected, rel=0.02), name
    assert found.plain.inside_latency_s.value == pytest.approx(900e-6, rel=0.02)
    assert found.plain.inside_push_bytes_per_s.value == pytest.approx(2.8e9, rel=0.02)
    assert found.plain.core_share.value == pytest.approx(0.6, abs=0.051)
    assert found.plain.turn_s.value == pytest.approx(400e-6, rel=0.05)
    assert found.sealed.turn_s.value == pytest.approx(30e-6, rel=0.05)
    assert found.cc is None


def test_the_profile_does_not_look_at_steps_that_communicate() -> None:
    results = results_of(imagined())
    slower = [
        case if case.variant == "compute" else dataclasses.replace(case, seconds=[9.0])
        for case in results.step
    ]
    assert profile_of(dataclasses.replace(results, step=slower)) == profile_of(results)


def test_every_case_is_compared_and_none_is_chosen() -> None:
    results = results_of(imagined())
    found = validate(results)
    steps = [case for case in results.step if case.variant != "compute"]
    assert sum(case.kind == "step" for case in found.cases) == len(steps) == 6
    assert sum(case.kind == "all_reduce" for case in found.cases) == len(results.allreduce) == 30
    seen = {(case.variant, case.ranks) for case in found.cases if case.seen}
    assert seen == {("plain", 2), ("plain", 3), ("plain", 4), ("sealed", 2), ("sealed", 3)}
    # Of sealed cases with several ranks a core, the fit uses only the shortest.
    (turned,) = [
        case for case in found.cases if case.seen and case.variant == "sealed" and case.ranks > 2
    ]
    assert turned.bytes == min(SIZES)


def test_a_machine_that_keeps_to_the_model_is_predicted() -> None:
    found = validate(results_of(imagined()))
    for kind in ("step", "all_reduce"):
        error = found.median_error(kind)
        assert error is not None
        assert error < 0.02
    assert max(abs(case.error) for case in found.cases) < 0.06


def test_a_machine_that_does_not_is_said_to_differ() -> None:
    results = results_of(imagined())
    doubled = [
        dataclasses.replace(case, seconds=[2 * each for each in case.seconds])
        if case.variant == "sealed"
        else case
        for case in results.step
    ]
    found = validate(dataclasses.replace(results, step=doubled))
    sealed = [
        case.error for case in found.cases if case.kind == "step" and case.variant == "sealed"
    ]
    assert sealed == [pytest.approx(-0.5, abs=0.03)] * 3


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("xeon-2-cores", ("step", "all_reduce")), ("neoverse-2-cores", ("all_reduce",))],
)
def test_what_was_measured_on_two_cores_is_predicted_as_documented(
    name: str, kinds: tuple[str, ...]
) -> None:
    found = validate(read_results(RESULTS / f"{name}.json"))
    documented = (RESULTS / f"{name}.txt").read_text()
    for kind in kinds:
        error = found.median_error(kind)
        assert error is not None
        assert error <= 0.10
        assert f"{kind}: median error {error:.1%}" in documented


def test_the_steps_that_were_measured_are_of_several_kinds() -> None:
    steps = [case for case in read_results(RESULTS / "xeon-2-cores.json").step if case.ranks > 1]
    assert {case.ranks for case in steps} == {2, 3, 4}
    assert len({case.model for case in steps}) == 3
    assert {case.bucket_cap_mb for case in steps} == {0.0, 1.0, 5.0, 25.0, 100.0}


@pytest.mark.parametrize("name", ["xeon-2-cores", "neoverse-2-cores"])
def test_the_table_of_a_file_agrees_with_what_its_ranks_opened(name: str) -> None:
    results = read_results(RESULTS / f"{name}.json")
    table = parse_table(results.algorithms, name)
    sealed = [case for case in results.allreduce if case.variant == "sealed"]
    for case in sealed:
        row = table.row(Operation.ALL_REDUCE, Placement.ONE, case.ranks)
        programs = [
            program_for(Operation.ALL_REDUCE, row.at(case.bytes), case.ranks, rank)
            for rank in range(case.ranks)
        ]
        lengths = [length for _, length in chunks(case.bytes // 4, case.ranks, 4)]
        slots = lengths if programs[0].slots > 1 else [case.bytes]
        opened = {program.opened_bytes(slots) for program in programs}
        assert case.opened_bytes in opened, (case.ranks, case.bytes)
    assert {case.ranks for case in sealed} == {2, 3, 4}


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        ({"aead": []}, "have no copy among their kernels"),
        ({"link": []}, "have no all-reduces of two ranks by size for 'plain'"),
        ({"step": [], "allreduce": []}, "no steps and no all-reduces to compare with"),
    ],
)
def test_results_that_lack_a_part_are_refused_with_a_way_out(
    missing: dict[str, list[object]], sentence: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"{sentence}.*sealring bench all"):
        validate(dataclasses.replace(results_of(imagined()), **missing))  # type: ignore[arg-type]


def test_compute_of_one_rank_stands_for_others_where_theirs_was_not_measured() -> None:
    results = results_of(imagined())
    without = [case for case in results.step if case.variant != "compute" or case.ranks == 1]
    found = validate(dataclasses.replace(results, step=without))
    # Two ranks have a core each, so one rank's 70 ms replace their 77 ms.
    errors = [case.error for case in found.cases if case.kind == "step"]
    assert all(-0.12 < error < -0.01 for error in errors)


def test_computing_of_the_same_run_is_preferred() -> None:
    results = results_of(imagined())
    (one,) = [case for case in results.step if case.variant == "compute" and case.ranks == 2]
    busy = dataclasses.replace(one, run=4, seconds=[3 * each for each in one.seconds])
    asked = (results.step[0].model, 2, "fp32", 2)
    both = dataclasses.replace(results, step=[*results.step, busy])
    slow, usual = computing(both, *asked, run=4), computing(both, *asked, run=3)
    assert slow is not None
    assert usual is not None
    assert slow.total_s == pytest.approx(3 * usual.total_s)
