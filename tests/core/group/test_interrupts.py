"""Ctrl-C in a backward pass reaches the collective, and other signals are not touched."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from sealring.core.group import backward
from sealring.core.group.backward import heeding_interrupts, interrupt_on_signal
from sealring.core.group.work import SealedWork


class Waiting:
    """A collective that ends when it is interrupted."""

    def __init__(self) -> None:
        self.interrupted = threading.Event()

    def interrupt(self) -> None:
        self.interrupted.set()


@pytest.fixture
def waiting() -> Iterator[Waiting]:
    one = Waiting()
    interrupt_on_signal(one)
    yield one
    assert signal.set_wakeup_fd(-1) == -1, "nothing of ours stays"


def interrupt_oneself() -> None:
    with heeding_interrupts():
        os.kill(os.getpid(), signal.SIGINT)


def test_sigint_interrupts_the_collective(waiting: Waiting) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupt_oneself()
    assert waiting.interrupted.wait(20)


def test_other_signals_do_not(waiting: Waiting) -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with heeding_interrupts():
            os.kill(os.getpid(), signal.SIGUSR1)
        assert not waiting.interrupted.wait(0.2)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_scripts_own_handler_of_sigint_decides_alone(waiting: Waiting) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        interrupt_oneself()
        assert not waiting.interrupted.wait(0.2)
        assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_event_loop_keeps_its_signals(waiting: Waiting) -> None:
    async def train() -> None:
        came = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, came.set)
        with heeding_interrupts():
            os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.wait_for(came.wait(), 20)

    asyncio.run(train())
    assert not waiting.interrupted.is_set()


def test_a_backward_pass_within_a_backward_pass(waiting: Waiting) -> None:
    with heeding_interrupts(), pytest.raises(KeyboardInterrupt):
        interrupt_oneself()
    assert waiting.interrupted.wait(20)


def test_a_backward_pass_goes_on_where_no_thread_can_be_started(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(backward, "_pipe", None)
    passed, before = [], len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with heeding_interrupts():
            passed.append("backward")
    assert passed == ["backward"]
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(KeyboardInterrupt):  # the next one finds a thread
        interrupt_oneself()
    assert waiting.interrupted.wait(20)


def test_an_interrupt_just_when_the_work_is_done_does_not_lock_it() -> None:
    work = SealedWork([], give_up=lambda: None)
    work.finish()
    work.pending.acquire()  # wait() has got it, and there the interrupt comes
    work.end_at_once()
    assert work.wait()
    assert work.wait()
