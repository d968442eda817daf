"""Threads that set-up borrows, and the one thread that serves all listeners of a process."""

from __future__ import annotations

import gc
import os
import queue
import select
import signal
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from sealring.core.links import threads
from sealring.core.links import threads as module
from sealring.core.links.listener import Listener
from sealring.core.links.threads import (
    IDLE_NAME,
    ListeningThread,
    TlsThreads,
    borrow,
    listening_thread,
)
from sealring.errors import SealringError
from tests.core.links.worlds import world


@pytest.fixture(autouse=True)
def no_idle_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "idle", [])


def seen() -> tuple[str, int]:
    return threading.current_thread().name, threading.get_ident()


def test_a_thread_is_borrowed_again_and_has_the_borrowers_name() -> None:
    found: list[tuple[str, int]] = []
    for name in ("one", "two"):
        borrow(name, lambda: found.append(seen())).join()
    (first, thread), (second, again) = found
    assert (first, second) == ("one", "two")
    assert thread == again
    assert [each.name for each in threads.idle] == [IDLE_NAME]


def test_two_that_borrow_at_once_have_a_thread_each() -> None:
    both = threading.Barrier(2)
    jobs = [borrow("meeting", lambda: void(both.wait(20))) for _ in range(2)]
    for job in jobs:
        job.join()
    assert len(threads.idle) == 2


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
    for each in list(threads.idle):
        each.join(20)
        assert not each.is_alive()
    assert not threads.idle


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
    """Children of a parent that forms groups once crashed when they collected garbage."""
    go_on = threading.Event()
    job = borrow("working", lambda: void(at_work and go_on.wait(20)))
    if not at_work:
        job.join()
    frozen = gc.get_freeze_count()
    process = os.fork()
    if process == 0:
        signal.alarm(20)
        os._exit((gc.get_freeze_count() > frozen) is not at_work)
    go_on.set()
    job.join()
    assert os.waitpid(process, 0) == (process, 0)


def frozen_in_a_child() -> bool:
    """Tells whether a child that is forked now leaves its parent's objects out of collection."""
    before = gc.get_freeze_count()
    process = os.fork()
    if process == 0:
        signal.alarm(20)
        os._exit(gc.get_freeze_count() > before)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 1


def test_a_forked_child_frees_nothing_that_a_listeners_turn_was_using() -> None:
    """A listener's turn may be the only work under way, because session links borrow no thread."""
    thread, one = ListeningThread(), Ticking()
    begun, go_on = threading.Event(), threading.Event()

    def take_turn() -> None:
        begun.set()
        assert go_on.wait(20)

    one.take_turn = take_turn  # type: ignore[method-assign]
    assert not frozen_in_a_child()
    thread.add(one)
    assert begun.wait(20)
    frozen = frozen_in_a_child()
    go_on.set()
    thread.remove(one)
    one.close()
    assert frozen


def test_a_forked_child_frees_nothing_that_the_forming_of_a_group_was_using() -> None:
    """Rank 0 dials no one, so only its caller's thread is at work while rank 0 waits."""
    with world(2, timeout=20.0) as two:
        assert not frozen_in_a_child()
        two.start(0)
        two.store.address(0)
        assert frozen_in_a_child()
        two.start(1)
        two.join()
        assert len(two.links(0)) == 1
        assert not frozen_in_a_child()


def test_a_forked_child_frees_nothing_that_a_listener_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A group ends in one thread while another thread forks; the conversations are completed."""
    frozen: list[bool] = []
    plain = TlsThreads.stop

    def stop(self: TlsThreads) -> None:
        frozen.append(frozen_in_a_child())
        plain(self)

    monkeypatch.setattr(TlsThreads, "stop", stop)
    one = listener(queue.SimpleQueue())
    one.start()
    one.stop()
    assert frozen == [True]
    assert not frozen_in_a_child()


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
            # That turn has ended when another listener has had its turn.
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
    serving = listening_thread().serving
    assert serving is not None
    assert list(serving.served.values()) == [other]
    other.stop()
    releasing.join()


def test_a_call_that_ends_its_thread_keeps_no_one_waiting() -> None:
    def leave() -> None:
        raise SystemExit

    borrow("leaving", leave).join()
    assert [each.name for each in threads.idle] == [IDLE_NAME]


class Ticking:
    """A listener that always has work and records which threads served it."""

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
    """The old thread is held up in its turn, and its last listener is removed meanwhile."""
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
    while thread.serving is not None:
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


class FailingEpoll:
    """An epoll that fails twice with MemoryError."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self.failures = 2

    def poll(self, seconds: float) -> list[tuple[int, int]]:
        if self.failures:
            self.failures -= 1
            raise MemoryError
        return self._epoll.poll(seconds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._epoll, name)


@pytest.mark.threat("J21")
def test_a_failure_outside_of_a_turn_does_not_end_the_thread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_FAILED_SECONDS", 0.001)
    monkeypatch.setattr(module, "select", SimpleNamespace(epoll=FailingEpoll, EPOLLIN=1))
    thread, one = ListeningThread(), Ticking()
    thread.add(one)
    assert one.often.wait(20)
    thread.remove(one)
    assert caplog.text.count("the thread that serves all listeners failed") == 2
    one.close()


@pytest.mark.parametrize("place", ["_has_listeners", "_turn_is_over", "_log_failure"])
@pytest.mark.threat("J21")
def test_no_memory_at_any_point_outside_of_a_turn_does_not_end_the_thread(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Stopping a listener must not wait for a turn whose end could not be recorded."""
    owner: Any = module if place == "_log_failure" else ListeningThread
    plain, failures = getattr(owner, place), iter([True] * 3)

    def lacks(*given: Any, **named: Any) -> Any:
        if next(failures, False):
            raise MemoryError
        return plain(*given, **named)

    monkeypatch.setattr(module, "_FAILED_SECONDS", 0.001)
    if place == "_log_failure":  # something must have failed first
        monkeypatch.setattr(module, "select", SimpleNamespace(epoll=FailingEpoll, EPOLLIN=1))
    monkeypatch.setattr(owner, place, lacks)
    thread, one = ListeningThread(), Ticking()
    thread.add(one)
    assert one.often.wait(20)
    removal = threading.Thread(target=thread.remove, args=(one,), daemon=True)
    removal.start()
    removal.join(20)
    assert not removal.is_alive()
    one.close()


def test_a_listener_that_cannot_be_added_is_not_served() -> None:
    """The closed listener gets OSError; the other listeners are still served."""
    thread, one, closed = ListeningThread(), Ticking(), Ticking()
    thread.add(one)
    closed.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        thread.add(closed)
    assert thread.serving is not None
    assert list(thread.serving.served.values()) == [one]
    assert one.often.wait(20)
    thread.remove(one)
    one.close()


def test_an_interrupt_while_the_thread_starts_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread already runs by then; it must end, because it has no descriptors to poll."""
    start, begun = threading.Thread.start, []

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        begun.append(thread)
        raise KeyboardInterrupt

    before = len(os.listdir("/proc/self/fd"))
    listening, one = ListeningThread(), Ticking()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            listening.add(one)
    begun[0].join(20)
    assert not begun[0].is_alive()
    assert not caplog.records
    listening.add(one)  # another thread serves it
    assert one.often.wait(20)
    listening.remove(one)
    one.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.threat("J21")
def test_a_turn_that_failed_loses_nothing_that_had_come() -> None:
    """epoll reports bytes only once, and the failed turn had taken that report."""
    refused: queue.SimpleQueue[SealringError] = queue.SimpleQueue()
    begun: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
    one = listener(refused)
    heard, failures = one.heard, [MemoryError]

    def fail_once(connection: Any) -> None:
        if failures:
            raise failures.pop()
        heard(connection)

    def begin(sock: socket.socket) -> Any:
        begun.put(sock)
        raise AssertionError("it has begun")

    one.heard = fail_once  # type: ignore[method-assign, assignment]
    one.begin = begin
    one.start()
    with socket.create_connection(one.addresses[0]) as stranger:
        stranger.sendall(b"x")
        assert begun.get(timeout=20).getpeername() == stranger.getsockname()
    one.stop()
    assert not failures


@pytest.mark.threat("J21")
def test_a_thread_of_tls_that_has_no_memory_keeps_no_one_waiting() -> None:
    """No thread waits for this one, not even for the error of the connection that it served."""

    def no_memory() -> None:
        raise MemoryError

    tls = TlsThreads(no_memory)
    for _ in range(5):  # more than there may be threads at once
        served = SimpleNamespace(incoming=SimpleNamespace(advance=lambda: False))
        assert tls.serve(served) is None  # type: ignore[arg-type]
    tls.stop()
    assert tls.working == 0


def test_a_forked_child_keeps_no_descriptor_of_the_thread() -> None:
    first = Ticking()
    before = set(os.listdir("/proc/self/fd"))
    module.listening_thread().add(first)
    own = set(os.listdir("/proc/self/fd")) - before
    assert len(own) == 2
    process = os.fork()
    if process == 0:
        signal.alarm(20)
        os._exit(len(own & set(os.listdir("/proc/self/fd"))))
    assert os.waitpid(process, 0) == (process, 0)
    module.listening_thread().remove(first)
    first.close()
