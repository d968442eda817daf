"""Launchers on several machines meet, or are told what was started wrongly."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters

from sealring.core.store import meeting
from sealring.core.store.meeting import Launcher, Meeting, parse_launcher
from sealring.core.store.rendezvous import create_handler
from sealring.errors import (
    ConfigurationError,
    DuplicateRank,
    MalformedSetup,
    PeerUnreachable,
    SealringError,
    named,
)
from tests.ports import free_port


def launcher(port: int, machine: int, machines: int = 2, **changed: Any) -> Meeting:
    options: dict[str, Any] = {
        "job": "gpt",
        "fingerprint": "00112233",
        "sealed": lambda store, _: store,
        "timeout": 20.0,
    }
    host = changed.pop("host", "127.0.0.1")
    return Meeting(host, port, machine, machines, **{**options, **changed})


def outcomes(*meetings: Meeting) -> list[RendezvousInfo | SealringError]:
    def outcome(one: Meeting) -> RendezvousInfo | SealringError:
        try:
            return one.next_rendezvous()
        except SealringError as error:
            return error

    with ThreadPoolExecutor(len(meetings)) as pool:
        return list(pool.map(outcome, meetings))


def test_machines_have_the_numbers_that_they_were_given() -> None:
    port = free_port()
    meetings = [launcher(port, machine, 3) for machine in (2, 0, 1)]
    for _ in range(2):  # a second time, as when workers are restarted
        met = outcomes(*meetings)
        for one, machine in zip(met, (2, 0, 1), strict=True):
            assert isinstance(one, RendezvousInfo)
            assert (one.rank, one.world_size) == (machine, 3)
            assert one.bootstrap_store_info is not None
            assert one.bootstrap_store_info.master_port == port
        assert isinstance(met[0], RendezvousInfo)
        assert isinstance(met[1], RendezvousInfo)
        met[0].store.set("greeting", "hello")
        assert met[1].store.get("greeting") == b"hello"


@pytest.mark.parametrize(
    ("changed", "error", "told"),
    [
        (
            {"fingerprint": "44556677"},
            "handshake.unknown_authority",
            "another job secret: its fingerprint is",
        ),
        ({"fingerprint": ""}, "handshake.unknown_authority", "missing"),
        ({"job": "bert"}, "handshake.wrong_job", "'bert'"),
        ({"machines": 3}, "handshake.wrong_world_size", "--nnodes 3"),
    ],
)
def test_a_contradiction_is_named_on_both_machines(
    changed: dict[str, Any], error: str, told: str
) -> None:
    port = free_port()
    for one in outcomes(launcher(port, 0), launcher(port, 1, **changed)):
        assert named(one) == error
        assert told in str(one)


def test_one_number_twice_is_named_everywhere() -> None:
    port = free_port()
    found = outcomes(*(launcher(port, machine, 3) for machine in (0, 1, 1)))
    assert [type(one) for one in found] == [DuplicateRank] * 3
    assert "two launchers were started with --node-rank 1" in str(found[0])


def test_a_machine_that_does_not_come() -> None:
    (one,) = outcomes(launcher(free_port(), 0, timeout=2.0))
    assert type(one) is PeerUnreachable
    assert "the other machines did not come within 2 s" in str(one)
    assert f"came: 0 ({socket.gethostname()}); not yet: 1" in str(one)


def test_who_waits_says_for_whom_until_they_come(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    with (
        caplog.at_level(logging.WARNING, "sealring"),
        ThreadPoolExecutor(1) as pool,
    ):
        first = pool.submit(outcomes, launcher(port, 0, timeout=100.0))
        while "sealring: waiting for the other machines: came: 0" not in caplog.text:
            assert not first.done()
            time.sleep(0.05)
        for one in outcomes(launcher(port, 1)) + first.result():
            assert type(one) is RendezvousInfo


def test_a_first_machine_that_does_not_come(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    with caplog.at_level(logging.WARNING, "sealring"):
        (one,) = outcomes(launcher(port, 1, timeout=2.0))
    assert type(one) is PeerUnreachable
    told = f"machine 0 at 127.0.0.1:{port}"
    assert f"{told} did not come within 2 s (Connection refused)" in str(one)
    assert f"waiting for {told}: Connection refused" in caplog.text


@pytest.fixture
def mute_port() -> Iterator[int]:
    """A port where something listens but never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_listener_that_does_not_answer(mute_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_ANSWER_SECONDS", 0.3)
    (one,) = outcomes(launcher(mute_port, 1, timeout=1.0))
    assert type(one) is PeerUnreachable
    assert f"something listens at 127.0.0.1:{mute_port}, and does not answer" in str(one)


def test_a_port_that_is_taken(mute_port: int) -> None:
    (one,) = outcomes(launcher(mute_port, 0))
    assert type(one) is ConfigurationError
    assert f"the first machine cannot listen on 127.0.0.1:{mute_port}" in str(one)


def test_an_endpoint_that_the_first_machine_does_not_reach() -> None:
    port = free_port()
    (one,) = outcomes(launcher(port, 0, host="no-such-machine.invalid", timeout=2.0))
    assert type(one) is PeerUnreachable
    told = f"an answer of this machine's own store at no-such-machine.invalid:{port}"
    assert f"{told} did not come within 2 s" in str(one)
    assert "--node-rank on every machine" in str(one)


@pytest.mark.parametrize("endpoint", ["host0:99999", "host0:port", "http://host0:29400", "host0:0"])
def test_an_endpoint_that_cannot_be_read(endpoint: str) -> None:
    params = RendezvousParameters("sealring", endpoint, "gpt", 2, 2, rank="0")
    with pytest.raises(ConfigurationError, match=r"--rdzv-endpoint is .*; pass HOST:PORT"):
        create_handler(params)


def test_a_first_machine_that_is_lost() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    one = launcher(server.port, 1, timeout=30.0)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(outcomes(one)))
    thread.start()
    server.get("sealring/launchers/0/1")  # the launcher has come
    del server
    thread.join()
    assert type(found[0]) is PeerUnreachable
    assert "was lost while the machines met" in str(found[0])


class SilentStore:
    """A store that takes a launcher's writes but never answers a question."""

    port = 1

    def __init__(self) -> None:
        self.ended = threading.Event()

    def compare_set(self, _: str, __: str, desired: str) -> bytes:
        return desired.encode()

    def check(self, _: list[str]) -> bool:
        if not self.ended.wait(60):
            raise OSError("the test should have ended")
        return False


def test_a_first_machine_that_answers_no_more() -> None:
    """torch's client would wait for the store without end."""
    one, store = launcher(1, 1, timeout=0.5), SilentStore()
    one.tcp = store  # type: ignore[assignment]
    try:
        (found,) = outcomes(one)
        assert type(found) is PeerUnreachable
        assert "was lost while the machines met: it does not answer" in str(found)
        assert not store.ended.is_set()
    finally:
        store.ended.set()


OWN = Launcher(0, 2, "host", "gpt", "00112233", "1234")


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{", b"[]", b"null", b"{}", b'{"machine": 0}', b"[" * 3000, b"\xff", b" " * 5000,
        b'{"machine": "0", "machines": 2, "host": "h", "job": "j", "fingerprint": "", '
        b'"instance": ""}',
        b'{"machine": 0, "machines": 2, "host": "\\u001b[2J", "job": "j", "fingerprint": "", '
        b'"instance": ""}',
    ],
)  # fmt: skip
def test_what_a_stranger_wrote_is_refused(text: bytes) -> None:
    with pytest.raises(MalformedSetup, match="cannot be read"):
        parse_launcher(text)


def test_a_stranger_who_writes_into_the_store_ends_the_meeting_by_name() -> None:
    def with_server(write: Callable[[TCPStore], None]) -> SealringError | RendezvousInfo:
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        write(server)
        return outcomes(launcher(server.port, 1))[0]

    garbage = with_server(lambda store: store.set("sealring/launchers/0/0", "garbage"))
    assert type(garbage) is MalformedSetup
    problem = with_server(lambda store: store.set("sealring/launchers/0/problem", "garbage"))
    assert type(problem) is MalformedSetup


def test_launchers_that_agree_contradict_nothing() -> None:
    assert OWN.contradiction(replace(OWN, machine=1, host="other", instance="5678")) is None
    assert OWN.contradiction(OWN) is None
