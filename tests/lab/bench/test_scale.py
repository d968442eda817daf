"""The cost of forming groups as they grow, measured with light workers in separate processes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sealring.lab.bench import harness
from sealring.lab.bench.forming import growth, measure_handshake, measure_scale
from sealring.lab.bench.harness import forming_floor
from sealring.lab.results import ScaleCase


def test_a_group_of_nine_and_its_mesh() -> None:
    (measured,) = measure_scale(9)
    world, all_reduce, mesh = measured.cases
    assert [world.what, all_reduce.what, mesh.what] == ["world", "all_reduce", "mesh"]
    assert world.handshakes == 8, "a tree"
    assert world.resumptions == 0
    # Each row and each column of three links all its pairs, under a session if there is one.
    assert mesh.handshakes + mesh.resumptions == 6 * 3
    assert mesh.resumptions >= 3
    assert mesh.sockets > all_reduce.sockets >= world.sockets >= 2 * 8
    assert min(world.seconds, world.cpu_seconds_per_rank, world.rss_bytes) > 0
    assert world.floor_seconds_per_rank > mesh.floor_seconds_per_rank > 0, "known certificates"


def test_a_group_forms_in_turns_with_gloos() -> None:
    rows = measure_handshake(2, "shm", turns=1)
    gloo, sealed = rows[:3], rows[3:]
    assert [each.what.split(":")[0] for each in (gloo[0], sealed[0])] == ["gloo", "sealring"]
    for formed, reduced, cpu in (gloo, sealed):
        assert 0 < formed.value <= reduced.value
        assert cpu.value > 0


def test_the_floor_counts_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "signature_seconds", lambda: (1.0, 100.0))
    assert forming_floor([16], strangers=15, handshakes=0) == 1 + 30 * 100
    assert forming_floor([16, 16], strangers=0, handshakes=0) == 2 + 30 * 100
    assert forming_floor([], strangers=0, handshakes=0.5) == 0.5 + 100


def test_growth_is_an_exponent() -> None:
    one = ScaleCase(8, "world", 8, 0, 16, 100, 1.0, 0.1, 0.05, 1000)
    cases = [
        one,
        replace(one, ranks=16, handshakes=16, seconds=4.0),
        replace(one, ranks=32, handshakes=32, seconds=16.0),
    ]
    found = growth(cases)["world"]
    assert found["handshakes"] == 1.0
    assert found["seconds"] == 2.0
    assert found["sockets"] == 0.0
    assert growth(cases[:1]) == {}
