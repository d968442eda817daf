"""Further pipes between members that are linked: who gets one, and who does not."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from sealring.core.links import lanes, setting_up
from sealring.core.links.lanes import FirstEnd, Lanes, Pipe
from sealring.errors import MalformedSetup, Unsupported

TCP = FirstEnd("tcp", socket.AF_INET, ("127.0.0.1", 1), ("127.0.0.1", 1))
SHM = FirstEnd("shm", socket.AF_INET, (), ())


@contextlib.contextmanager
def two(end: FirstEnd, count: int = 3) -> Iterator[tuple[Lanes, Lanes]]:
    pair = Lanes(0, {1: end}, count), Lanes(1, {0: end}, count)
    try:
        yield pair
    finally:
        for each in pair:
            each.close()


def close(pipes: list[Pipe]) -> None:
    for pipe in pipes:
        pipe.socket.close()


@pytest.mark.parametrize("end", [TCP, SHM], ids=["tcp", "shm"])
def test_both_ends_have_the_same_pipes(end: FirstEnd) -> None:
    with two(end) as (zero, one):
        letters = [zero.offer(), one.offer()]
        zero.leave_pipes(letters)
        one.leave_pipes(letters)
        found = zero.take_pipes(), one.take_pipes()
        assert [[(pipe.lane, pipe.peer) for pipe in each] for each in found] == [
            [(1, 1), (2, 1)],
            [(1, 0), (2, 0)],
        ]
        for near, far in zip(*found, strict=True):
            assert (near.memory is None) == (far.memory is None) == (end is TCP)
            near.socket.send(b"%d" % near.lane)
            far.socket.settimeout(5)
            assert far.socket.recv(9) == b"%d" % far.lane
        for each in found:
            close(each)


def test_strangers_are_dropped_and_members_found() -> None:
    with two(TCP) as (zero, one):
        letters = [zero.offer(), one.offer()]
        (listener,) = zero.listeners.values()
        token = zero.token
        wrong = [
            lanes.GREETING.pack(bytes(32), 1, 1),  # without the token
            lanes.GREETING.pack(token, 1, 7),  # a lane that is none
            lanes.GREETING.pack(token, 5, 1),  # a rank that is none
            b"GET / HTTP/1.1\r\n\r\n",  # too short, and then it ends
        ]
        strangers = []
        for greeting in wrong:
            stranger = socket.create_connection(listener.getsockname(), 5)
            stranger.sendall(greeting)
            stranger.shutdown(socket.SHUT_WR)
            strangers.append(stranger)
        zero.leave_pipes(letters)
        one.leave_pipes(letters)
        pipes = zero.take_pipes()
        assert [pipe.lane for pipe in pipes] == [1, 2]
        for stranger in strangers:
            with stranger, contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
        close(pipes)
        close(one.take_pipes())


@pytest.mark.parametrize("end", [TCP, SHM], ids=["tcp", "shm"])
def test_a_pipe_that_does_not_come_is_unsupported(
    monkeypatch: pytest.MonkeyPatch, end: FirstEnd
) -> None:
    monkeypatch.setattr(lanes, "_SECONDS", 0.2)
    with two(end) as (zero, one):
        letters = [zero.offer(), one.offer()]
        zero.leave_pipes(letters)
        with pytest.raises(Unsupported, match="did not come"):
            zero.take_pipes()
        assert one


def kernel_refuses_descriptors() -> bool:
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
        return bool(probe.getsockopt(socket.SOL_SOCKET, setting_up.SO_PASSRIGHTS))
    return False


@pytest.mark.skipif(not kernel_refuses_descriptors(), reason="needs Linux 6.16 or later")
@pytest.mark.parametrize("liar", [0, 1])
def test_no_descriptor_travels_over_a_bell(liar: int) -> None:
    """The rank that hears the bell would have to close it."""
    with two(SHM) as (zero, one):
        letters = [zero.offer(), one.offer()]
        zero.leave_pipes(letters)
        one.leave_pipes(letters)
        found = zero.take_pipes(), one.take_pipes()
        with pytest.raises(PermissionError):
            socket.send_fds(found[liar][0].socket, [b"1"], [0])
        for each in found:
            close(each)


def test_a_bell_that_has_been_rung_before_it_comes_is_unsupported() -> None:
    """It may have come with descriptors, before the receiver could refuse them."""
    with two(SHM) as (zero, one):
        letters = [zero.offer(), one.offer()]
        zero.leave_pipes(letters)
        one.leave_pipes(letters)
        one.made[2, 0].send(b"1")
        with pytest.raises(Unsupported, match="the socket of another rank did not come"):
            zero.take_pipes()


def test_a_peer_that_listens_elsewhere_is_unsupported() -> None:
    elsewhere = FirstEnd("tcp", socket.AF_INET, ("127.0.0.1", 1), ("127.0.0.2", 1))
    with two(TCP) as (zero, _):
        one = Lanes(1, {0: elsewhere}, 2)
        letters = [zero.offer(), one.offer()]
        with pytest.raises(Unsupported, match=r"does not listen at 127\.0\.0\.2"):
            one.leave_pipes(letters)
        one.close()


def test_a_link_that_is_cut_has_no_further_pipes() -> None:
    with socket.socket() as never_connected:
        end = lanes.first_end(never_connected, None)
    with two(end) as (zero, _), pytest.raises(Unsupported, match="rank 1 was cut"):
        zero.offer()


@pytest.mark.parametrize(
    "letter",
    [b"", b"{}", b"[1]", b'{"type":"lanes"}', b'{"type":"lanes","ports":{"127.0.0.1":0}}', b"\xff"],
)
def test_what_is_no_offer(letter: bytes) -> None:
    with two(TCP) as (_, one):
        one.offer()
        with pytest.raises(MalformedSetup):
            one.leave_pipes([letter.ljust(lanes.LETTER_BYTES), b""])


def test_strangers_that_say_nothing_hold_up_no_member(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "_STRANGERS", 3)
    with two(TCP) as (zero, one), contextlib.ExitStack() as strangers:
        letters = [zero.offer(), one.offer()]
        (listener,) = zero.listeners.values()
        silent = [
            strangers.enter_context(socket.create_connection(listener.getsockname(), 5))
            for _ in range(8)
        ]
        silent[0].sendall(b"a part of a greeting")
        zero.leave_pipes(letters)
        one.leave_pipes(letters)
        pipes = zero.take_pipes()
        assert [pipe.lane for pipe in pipes] == [1, 2]
        for stranger in silent:
            stranger.settimeout(5)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
        close(pipes)
        close(one.take_pipes())


def test_strangers_without_end_do_not_keep_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "_SECONDS", 0.5)
    with two(TCP) as (zero, one):
        zero.offer()
        one.offer()
        (listener,) = zero.listeners.values()
        place, over = listener.getsockname(), threading.Event()

        def connect() -> None:
            while not over.is_set():
                with contextlib.suppress(OSError), socket.create_connection(place, 5) as stranger:
                    stranger.sendall(bytes(lanes.GREETING.size))

        thread = threading.Thread(target=connect)
        thread.start()
        try:
            with pytest.raises(Unsupported, match="did not come"):
                zero.take_pipes()
        finally:
            over.set()
            thread.join()
