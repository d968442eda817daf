"""Threads that set-up borrows, and the one that serves all listeners of a process."""

from __future__ import annotations

import gc
import os
import queue
import signal
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from sealring.errors import SealringError
from sealring.links import listening_thread as module
from sealring.links import threads
from sealring.links.listener import Listener
from sealring.links.listening_thread import ListeningThread, listening_thread
from sealring.links.threads import IDLE_NAME, borrow


@pytest.fixture(autouse=True)
def no_idle_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_idle", [])


def seen() -> tuple[str, int]:
    return threading.current_thread().name, threading.get_ident()


def test_a_thread_is_borrowed_again_and_has_the_borrowers_name() -> None:
    found: list[tuple[str, int]] = []
    for name in ("one", "two"):
        borrow(name, lambda: found.append(seen())).join()
    (first, thread), (second, again) = found
    assert (first, second) == ("one", "two")
    assert thread == again
    assert [each.name for each in threads._idle] == [IDLE_NAME]


def test_two_that_borrow_at_once_have_a_thread_each() -> None:
    both = threading.Barrier(2)
    jobs = [borrow("meeting", lambda: void(both.wait(20))) for _ in range(2)]
    for job in jobs:
        job.join()
    assert len(threads._idle) == 2


def void(_: object) -> None:
    pass


def test_a_call_that_fails_is_logged_and_its_thread_serves_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    borrow("failing", lambda: void(1 // 0)).join()
    assert "ZeroDivisionError" in caplog.text
    found: list[tuple[str, int]] = []
    borrow("next", lambda: found.append(seen())).join()
    assert found[0][0] == "next"


def test_a_thread_that_waits_refers_to_no_borrower() -> None:
    import weakref

    class Group:
        def work(self) -> None:
            pass

    group = Group()
    borrow("group", group.work).join()
    gone = weakref.ref(group)
    del group
    assert gone() is None


def test_a_thread_that_no_one_borrows_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_IDLE_SECONDS", 0.05)
    borrow("short", lambda: None).join()
    for each in list(threads._idle):
        each.join(20)
        assert not each.is_alive()
    assert not threads._idle


def test_a_forked_child_borrows_a_thread_of_its_own() -> None:
    borrow("parents", lambda: None).join()
    process = os.fork()
    if process == 0:
        signal.alarm(20)
        borrow("childs", lambda: None).join()
        os._exit(0)
    assert os.waitpid(process, 0) == (process, 0)


@pytest.mark.parametrize("at_work", [False, True])
def test_a_forked_child_frees_nothing_that_a_borrowed_thread_was_using(at_work: bool) -> None:
    """Children of a parent that forms groups crashed when they collected garbage."""
    go_on = threading.Event()
    job = borrow("working", lambda: void(at_work and go_on.wait(20)))
    if not at_work:
        job.join()
    process = os.fork()
    if process == 0:
        signal.alarm(20)
        os._exit((gc.get_freeze_count() > 0) is not at_work)
    go_on.set()
    job.join()
    assert os.waitpid(process, 0) == (process, 0)


def listener(refused: queue.SimpleQueue[SealringError]) -> Listener:
    def begin(_: socket.socket) -> Any:
        raise AssertionError("a defect of this listener alone")

    return Listener(["127.0.0.1"], begin, lambda _: None, refused.put)  # type: ignore[arg-type, return-value]


def listening() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "sealring-listen"]


def test_one_thread_serves_all_listeners_and_ends_with_the_last() -> None:
    refused: queue.SimpleQueue[SealringError] = queue.SimpleQueue()
    first, second = listener(refused), listener(refused)
    first.start()
    second.start()
    (thread,) = listening()
    first.stop()
    assert listening() == [thread]
    second.stop()
    assert not listening()
    third = listener(refused)
    third.start()
    assert len(listening()) == 1
    third.stop()


def test_a_listener_that_fails_does_not_end_the_others(caplog: pytest.LogCaptureFixture) -> None:
    refused: queue.SimpleQueue[SealringError] = queue.SimpleQueue()
    broken, sound = listener(refused), listener(refused)
    for each in (broken, sound):
        each.start()
    try:
        with socket.create_connection(broken.addresses[0]) as stranger:
            stranger.sendall(b"x")
            # Its turn has ended when another one has had its own.
            served = threading.Event()
            sound.take_turn = lambda: void(served.set())  # type: ignore[method-assign]
            sound.look_again()
            assert served.wait(20)
    finally:
        broken.stop()
        sound.stop()


def test_a_listener_that_is_stopped_has_no_turn_any_more() -> None:
    refused: queue.SimpleQueue[SealringError] = queue.SimpleQueue()
    other, one = listener(refused), listener(refused)
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def take_turn() -> None:
        begun.set()
        assert go_on.wait(20)
        ended.set()

    one.take_turn = take_turn  # type: ignore[method-assign]
    for each in (other, one):
        each.start()
    one.look_again()
    assert begun.wait(20)
    releasing = threading.Timer(0.2, go_on.set)
    releasing.start()
    one.stop()
    assert ended.is_set(), "stop() waits for the turn that the listener has"
    serving = listening_thread()._serving
    assert serving is not None
    assert list(serving.served.values()) == [other]
    other.stop()
    releasing.join()


def test_a_call_that_ends_its_thread_keeps_no_one_waiting() -> None:
    def leave() -> None:
        raise SystemExit

    borrow("leaving", leave).join()
    assert [each.name for each in threads._idle] == [IDLE_NAME]


class Ticking:
    """Has always something to do, and keeps which threads did it."""

    def __init__(self) -> None:
        self.seen: set[int] = set()
        self.turns = 0
        self.often = threading.Event()
        self._wake = os.eventfd(1)

    def fileno(self) -> int:
        return self._wake

    def take_turn(self) -> float | None:
        self.seen.add(threading.get_ident())
        self.turns += 1
        if self.turns >= 100:
            self.often.set()
        return 0.0

    def close(self) -> None:
        os.close(self._wake)


def test_a_thread_that_is_to_end_serves_no_listener_of_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is held up after something has come for its last listener, which is removed meanwhile."""
    thread, first, second = ListeningThread(), Ticking(), Ticking()
    held, go_on = threading.Event(), threading.Event()
    old: list[int] = []

    def monotonic() -> float:
        if not old:
            old.append(threading.get_ident())
            held.set()
            assert go_on.wait(20)
        return time.monotonic()

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=monotonic))
    thread.add(first)
    assert held.wait(20)
    removing = threading.Thread(target=thread.remove, args=(first,))
    removing.start()
    while thread._serving is not None:
        time.sleep(0.001)
    thread.add(second)
    assert second.often.wait(20)
    go_on.set()
    removing.join()
    thread.remove(second)
    assert len(second.seen) == 1
    assert not second.seen & set(old)
    first.close()
    second.close()


def test_a_listener_that_always_fails_takes_no_more_than_its_turn(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_FAILED_SECONDS", 3600.0)
    thread, broken, sound = ListeningThread(), Ticking(), Ticking()
    plain = broken.take_turn

    def fail() -> float | None:
        plain()
        raise AssertionError("a defect of this listener alone")

    broken.take_turn = fail  # type: ignore[method-assign]
    thread.add(broken)
    thread.add(sound)
    assert sound.often.wait(20)
    thread.remove(broken)
    thread.remove(sound)
    assert broken.turns == 1
    assert caplog.text.count("a listener failed") == 1
    broken.close()
    sound.close()


def test_a_listener_that_has_failed_has_its_turn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FAILED_SECONDS", 0.001)
    thread, one = ListeningThread(), Ticking()
    plain = one.take_turn

    def fail_at_first() -> float | None:
        plain()
        assert one.turns > 3
        return None

    one.take_turn = fail_at_first  # type: ignore[method-assign]
    thread.add(one)
    assert one.often.wait(20)
    thread.remove(one)
    one.close()


def test_a_forked_child_keeps_no_descriptor_of_the_thread() -> None:
    first = Ticking()
    before = set(os.listdir("/proc/self/fd"))
    module._shared.add(first)
    own = set(os.listdir("/proc/self/fd")) - before
    assert len(own) == 2
    process = os.fork()
    if process == 0:
        signal.alarm(20)
        os._exit(len(own & set(os.listdir("/proc/self/fd"))))
    assert os.waitpid(process, 0) == (process, 0)
    module._shared.remove(first)
    first.close()
