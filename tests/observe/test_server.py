"""What readers can and cannot do to a worker's socket."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sealring.observe import server as server_module
from sealring.observe.directory import PrivateDirectory
from sealring.observe.server import MOST_OPEN, CachedAnswer, StatusServer, is_stale, sweep

Start = Callable[..., StatusServer]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[StatusServer] = []

    def make(answer: bytes = b"{}\n") -> StatusServer:
        folder = PrivateDirectory(tmp_path / "live", create=True)
        started.append(StatusServer(folder, {"status": lambda: answer}))
        return started[-1]

    yield make
    for one in started:
        with contextlib.suppress(OSError):
            one.close()


def connect(server: StatusServer) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(str(server.path))  # waits while other readers wait
    sock.settimeout(10)
    return sock


def asked(server: StatusServer, question: bytes = b"status\n") -> bytes:
    with connect(server) as sock:
        sock.sendall(question)
        parts = []
        while part := sock.recv(1 << 16):
            parts.append(part)
        return b"".join(parts)


def test_one_question_has_one_answer(start: Start) -> None:
    assert asked(start(b'{"a":1}\n')) == b'{"a":1}\n'


@pytest.mark.parametrize("question", [b"\n", b"secrets\n", b"status \n", b"x" * 33])
def test_no_other_question_has_an_answer(start: Start, question: bytes) -> None:
    with contextlib.suppress(ConnectionResetError):
        assert asked(start(), question) == b""


def test_an_answer_longer_than_a_sockets_buffer_arrives_whole(start: Start) -> None:
    answer = b"x" * (3 << 20) + b"\n"
    assert asked(start(answer)) == answer


@pytest.mark.threat("K10")
def test_a_reader_that_does_not_read_is_dropped_and_others_are_served(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "SECONDS", 0.3)
    answer = b"x" * (3 << 20) + b"\n"
    server = start(answer)
    with connect(server) as stalled:
        stalled.sendall(b"status\n")
        assert asked(server) == answer
        time.sleep(0.5)
        received = 0
        with contextlib.suppress(ConnectionResetError):
            while part := stalled.recv(1 << 16):
                received += len(part)
        assert received < len(answer)


def test_readers_that_ask_nothing_give_way_to_one_that_does(start: Start) -> None:
    server = start()
    silent = [connect(server) for _ in range(MOST_OPEN + 4)]
    assert asked(server) == b"{}\n"
    for sock in silent:
        sock.close()


def test_an_answer_is_not_computed_for_every_reader() -> None:
    made = 0

    def make() -> bytes:
        nonlocal made
        made += 1
        time.sleep(0.02)  # the answer is kept for fifty times as long
        return b"%d\n" % made

    answer = CachedAnswer(make)
    assert {answer() for _ in range(1000)} == {b"1\n"}


def test_the_socket_is_removed_at_the_end(start: Start, tmp_path: Path) -> None:
    server = start()
    assert server.path.is_socket()
    server.close()
    assert os.listdir(tmp_path / "live") == []


def test_a_worker_that_starts_removes_the_socket_of_one_that_was_killed(
    start: Start, tmp_path: Path
) -> None:
    server = start()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "live" / "7-00000000.sock"))
        dead.listen()
    folder = PrivateDirectory(tmp_path / "live")
    assert is_stale(folder, "7-00000000.sock")
    assert not is_stale(folder, server.name)
    folder.close()
    newer = start()
    assert sorted(os.listdir(tmp_path / "live")) == sorted([server.name, newer.name])


def test_the_launcher_removes_what_killed_workers_left(start: Start, tmp_path: Path) -> None:
    server = start()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "live" / "7-00000000.sock"))
        dead.listen()
    sweep({"SEALRING_LIVE": str(tmp_path / "live")})
    assert os.listdir(tmp_path / "live") == [server.name]
    sweep({"SEALRING_LIVE": str(tmp_path / "none")})  # a folder that does not exist
    sweep({"SEALRING_LIVE": "0"})


def test_a_path_longer_than_a_sockets_address_is_used(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 200)
    server = StatusServer(PrivateDirectory(long, create=True), {"status": lambda: b"{}\n"})
    try:
        folder = PrivateDirectory(long)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(folder.address(server.name))
            sock.sendall(b"status\n")
            assert sock.recv(10) == b"{}\n"
        folder.close()
    finally:
        server.close()
    assert os.listdir(long) == []
