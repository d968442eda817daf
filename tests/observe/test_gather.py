"""The status of a process is bounded, and its counters never go down."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sealring.core.engine.cuda.wires import Wire
from sealring.core.engine.flight import FlightRecorder
from sealring.core.engine.link_ends import LinkSocket
from sealring.observe import gather, process
from sealring.observe.gather import MOST_GROUPS, MOST_PEERS, OTHERS
from sealring.observe.metrics import EndedGroups
from sealring.observe.process import keep
from sealring.observe.status import WorkerStatus, decode, encode
from tests.observe.scenes import group_made
from tests.observe.test_flight import ALL_REDUCE, CountingEngine, recorder, run


@pytest.fixture(autouse=True)
def none_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_recorders", [])
    monkeypatch.setattr(process, "_ended", EndedGroups())
    monkeypatch.setattr(gather, "_named", {})


def group(name: str) -> FlightRecorder:
    flight = recorder(CountingEngine())
    flight.group = name
    keep(flight)
    return flight


def through_json(status: WorkerStatus) -> WorkerStatus:
    return decode(WorkerStatus, "status", encode("status", status), "a worker")


def test_a_status_survives_its_way_through_the_socket() -> None:
    flight = group("0")
    run(flight, 3)
    flight.started(4, 4, ALL_REDUCE)
    flight.ended(RuntimeError("lost \x1b[31m"))
    status = gather.worker_status(group_made())
    assert through_json(status) == status
    (shown,) = status.groups
    assert (shown.name, shown.state, shown.size) == ("0", "failed", len(flight.members))
    assert shown.last_error is not None
    assert shown.last_error.text == "RuntimeError: lost \x1b[31m"
    assert status.last_error == shown.last_error


def test_two_thousand_groups_give_an_answer_of_bounded_size() -> None:
    many = [recorder(CountingEngine()) for _ in range(2_000)]
    for number, flight in enumerate(many):
        flight.group = f"group {number}" + "x" * 400
        process.keep(flight)
    status = gather.worker_status(group_made())
    assert status.groups_open == 2_000
    assert len(status.groups) == MOST_GROUPS
    assert status.groups[0].name.startswith("group 0x")
    assert status.groups[1].name.startswith("group 1999x")
    names = {each.group for each in status.counts}
    assert OTHERS in names
    assert len(names) == MOST_GROUPS + 1
    assert len(encode("status", status)) < 200_000


def test_a_counter_does_not_fall_when_a_group_ends() -> None:
    others = 0.0
    for number in range(MOST_GROUPS + 400):
        flight = group(f"group {number}")
        run(flight, 1)
        flight.close()
        if number % 40 == 0 or number > MOST_GROUPS + 390:
            counts = gather.worker_status(group_made()).counts
            now = {each.group: each.value for each in counts if each.metric == "collectives"}
            assert sum(now.values()) == number + 1
            assert now.get(OTHERS, 0) >= others
            others = now.get(OTHERS, 0)


def test_of_a_large_group_the_peers_that_are_waited_for_are_shown() -> None:
    class Slow(CountingEngine):
        def account(self) -> Any:
            return {**super().account(), "waited_s": [float(rank) for rank in range(1000)]}

    links = [LinkSocket(rank, f"host-{rank}", "tcp", 5000 + rank) for rank in range(1000)]
    flight = recorder(Slow(links, Wire.NCCL))
    flight.members = tuple(range(1000))
    keep(flight)
    status = through_json(gather.worker_status(group_made()))
    (shown,) = status.groups
    assert [peer.rank for peer in shown.peers] == list(range(999, 999 - MOST_PEERS, -1))
    assert shown.gpu_wire == "nccl"
    assert [each.label for each in status.counts if each.metric == "wait_seconds"] == ["all"]
    sockets = gather.socket_status(group_made())
    assert {each.inode for each in sockets.links} == set(range(5000, 6000))


def test_nothing_but_plain_values_is_in_an_answer() -> None:
    group("0")
    document = json.loads(encode("status", gather.worker_status(group_made())))
    assert set(document) == {
        "sealring", "format", "job", "rank", "size", "host", "pid", "version", "time_s",
        "monotonic_ns", "identity", "certificate_ends_s", "sealed_only", "groups_open", "groups",
        "counts",
    }  # fmt: skip
