"""How long a job takes to form, by the figures of `bench scale`."""

from __future__ import annotations

import dataclasses
import json

import pytest
from typer.testing import CliRunner

from sealring.cli import app
from sealring.lab.plan.answer import Forming, answer, forming_of, forming_seconds, shipped
from sealring.lab.plan.profiles import Figure, load_network, load_profile
from sealring.lab.results import ScaleCase
from tests.lab.plan.test_answer import question


def case(ranks: int, cpu_s: float, what: str = "world") -> ScaleCase:
    return ScaleCase(ranks, what, ranks, 0, ranks, ranks, 1.0, cpu_s, 0.0, 1)


def test_a_line_through_the_groups_of_all_ranks() -> None:
    cases = [case(n, 0.02 + n * 0.0004) for n in (16, 32, 64)]
    other = [case(n, 9.0, "mesh") for n in (16, 32, 64)] + [case(4, 9.0)]
    found = forming_of([*cases, *other], "here")
    assert found is not None
    assert (found.rank_s.source, found.member_s.source) == ("here", "here")
    assert found.rank_s.value == pytest.approx(0.02)
    assert found.member_s.value == pytest.approx(0.0004)


@pytest.mark.parametrize("cpu", [(0.1, 0.2), (0.3, 0.2, 0.1)], ids=["too few", "a line that falls"])
def test_no_line(cpu: tuple[float, ...]) -> None:
    assert forming_of([case(16 << n, each) for n, each in enumerate(cpu)], "here") is None


def test_forming_grows_with_members_latency_and_ranks_on_a_core() -> None:
    small, large = (answer(question(ranks=ranks)).forming_s for ranks in (1024, 16384))
    assert 10 * small < large < 20 * small
    wide = dataclasses.replace(question(ranks=1024), network=load_network("wan"))
    assert answer(wide).forming_s > small + 0.1
    assert answer(question(ranks=1)).forming_s == 0.0
    figures = Forming(Figure(1.0, ""), Figure(0.0, ""), Figure(0.0, ""))
    device = dataclasses.replace(
        load_profile("h100-cc").device, kind="cpu", cores_per_host=Figure(2.0, "")
    )
    crowded = dataclasses.replace(question(ranks=8), per_host=8)
    network = crowded.network
    assert forming_seconds(figures, 8, crowded.cluster, device, network) == pytest.approx(4.0)


def test_measured_figures_take_the_place_of_the_shipped_ones() -> None:
    slow = Forming(Figure(1.0, ""), Figure(1.0, ""), shipped().member_bytes)
    asked = dataclasses.replace(question(ranks=4), forming=slow)
    assert answer(asked).forming_s == pytest.approx(1.0 + 4 * 1.0)
    assert answer(question(ranks=4)).forming_s < 1.0


def test_the_answer_and_the_sweep_say_it() -> None:
    done = CliRunner().invoke(app, ["plan", "gpt2", "--ranks", "1024", "--per-host", "8"])
    assert "The sealed group of all 1,024 ranks forms in" in done.stdout
    assert done.exit_code == 0
    swept = CliRunner().invoke(app, ["plan", "gpt2", "--ranks", "1024,2048", "--json"])
    first, second = (each["forming_s"] for each in json.loads(swept.stdout)["sweep"])
    assert 0 < first < second
