"""A world of worker processes under torch.distributed, linked through the proxy.

Workers are started once and run many worlds; a worker that a plan kills is replaced.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from sealring.core.settings import with_settings
from tests.attacks.unprivileged import why_not, write_interpreter
from tests.chaos.history import History, Outcome
from tests.chaos.local import BEYOND_THE_TIMEOUT_S, HANG_S
from tests.chaos.neighbour import Neighbour
from tests.chaos.plan import Call, Channel, Fault, FaultKind, Plan
from tests.chaos.proxy import Proxy, Way
from tests.chaos.streams import STRIKES, Stream, Strike
from tests.chaos.worker import Order, serve
from tests.core.engine.local_world import Change, Middle, untouched

SECRET: Final = "76d9a4bfa13b6770b2ddafa8c2411183f1f45b68383c474c1619822aef869cfb"
_SETUP_S: Final = 150.0
_START_S: Final = 300.0
LARGEST_WORLD: Final = 4


class _Hand:
    """One worker process."""

    def __init__(self, interpreter: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, there = context.Pipe()
        self.process: Any = context.Process(target=serve, args=(there,), name="chaos", daemon=True)
        multiprocessing.set_executable(interpreter)
        try:
            self.process.start()
        finally:
            multiprocessing.set_executable(sys.executable)
        there.close()
        self.up = False

    def is_up(self, patience_s: float = 0.0) -> bool:
        if not self.up and self.pipe.poll(patience_s):
            self.pipe.recv()
            self.up = True
        return self.up

    def wait_until_up(self) -> None:
        if not self.is_up(_START_S):
            raise TimeoutError("a worker process did not start")

    def end(self) -> None:
        with suppress(OSError):
            os.kill(self.process.pid, signal.SIGCONT)
        self.process.kill()
        self.process.join()
        self.pipe.close()


class Hands:
    """The worker processes; new ones are started before they are needed.

    They run as a user without privileges, because root's rights would prove nothing.
    """

    def __init__(self, count: int = LARGEST_WORLD + 1) -> None:
        self._folder = TemporaryDirectory()
        self._interpreter = sys.executable
        if os.getuid() == 0 and why_not() is None:
            Path(self._folder.name).chmod(0o755)
            self._interpreter = str(write_interpreter(Path(self._folder.name) / "python"))
        self._free = [_Hand(self._interpreter) for _ in range(count)]

    def wait_until_up(self) -> None:
        for hand in self._free:
            hand.wait_until_up()

    def take(self, count: int) -> list[_Hand]:
        self._free.sort(key=lambda hand: not hand.is_up())
        taken, self._free = self._free[:count], self._free[count:]
        for hand in taken:
            hand.wait_until_up()
        return taken

    def give_back(self, hand: _Hand, *, fit: bool) -> None:
        if not fit:
            hand.end()
            hand = _Hand(self._interpreter)
        self._free.append(hand)

    def close(self) -> None:
        for hand in self._free:
            hand.end()
        self._folder.cleanup()


def run_processes(plan: Plan, hands: Hands) -> History:
    history = History()
    with ExitStack() as stack:
        world = _World(plan, history, hands.take(plan.world), stack)
        try:
            world.run()
        finally:
            history.ended = time.monotonic()
            for hand in world.hands:
                hands.give_back(hand, fit=hand in world.over)
    return history


class _World:
    def __init__(self, plan: Plan, history: History, hands: list[_Hand], stack: ExitStack) -> None:
        from torch._C._distributed_c10d import TCPStore

        self.plan, self.history, self.hands = plan, history, hands
        self.over: set[_Hand] = set()
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._strikes: dict[tuple[int, Channel, Way], Strike] = {
            (fault.group, fault.channel, (fault.sender, fault.receiver)): STRIKES[fault.kind](
                fault, history
            )
            for fault in plan.faults
            if fault.kind in STRIKES
        }
        pairs = {tuple(sorted(way)) for _, _, way in self._strikes} or {(0, 1)}
        self._proxies = {
            (high, low): Proxy(self._store, high, low, self._stream_for, history.trouble)
            for low, high in pairs
        }
        for proxy in self._proxies.values():
            stack.callback(proxy.close)
        self._neighbour: Neighbour | None = None
        for fault in plan.faults:
            if fault.kind is FaultKind.NEIGHBOUR and why_not() is None:
                pids = [hand.process.pid for hand in hands]
                self._neighbour = Neighbour(fault, pids, history)
                stack.callback(self._neighbour.close)
        self._waiting = set(range(plan.world))
        self._open: dict[tuple[int, Call], Outcome] = {}
        self._armed: list[tuple[int, Fault, float]] = []
        self._stopped_at: dict[int, float] = {}
        self._over = threading.Event()

    def _stream_for(
        self, group: int, channel: Channel, way: Way, middle: Callable[[], Middle]
    ) -> Change:
        strike = self._strikes.get((group, channel, way))
        if strike is None:
            return untouched
        stream = Stream(strike)
        stream.inject = lambda data: middle().inject(data)
        return stream

    def run(self) -> None:
        plan = self.plan
        env = {
            "SEALRING_SECRET": SECRET,
            "SEALRING_JOB": "chaos",
            "SEALRING_ADDRESS": "127.0.0.1",
            "SEALRING_TRANSPORT": plan.transport,
            **with_settings(
                {},
                record_bytes=plan.record_bytes,
                rekey_bytes=plan.rekey_bytes,
                **({"algorithm": plan.algorithm.name.lower()} if plan.algorithm else {}),
            ),
        }
        for rank, hand in enumerate(self.hands):
            ports = {low: p.port for (high, low), p in self._proxies.items() if high == rank}
            own = {**env, **with_settings(env, host=f"host-{plan.hosts[rank]}")}
            hand.pipe.send(Order(plan, rank, self._store.port, ports, own))
        running = (len(plan.faults) + 1) * plan.timeout_s + HANG_S
        waker = threading.Thread(target=self._keep_waking, daemon=True, name="waker")
        waker.start()
        try:
            self._lead(running)
        finally:
            self._over.set()
            waker.join()

    def _lead(self, running: float) -> None:
        for step, limit in (
            ("ready", _SETUP_S), ("traffic over", running), ("probed", running),
            ("probed", running), ("over", HANG_S),
        ):  # fmt: skip
            if not self._all_reach(step, limit):
                return
            if step == "over":
                return
            for strike in self._strikes.values():
                strike.over = step != "ready"
            if self._neighbour is not None:
                self._neighbour.go_on(traffic=step == "ready")
            self._go_on()

    def _all_reach(self, step: str, limit: float) -> bool:
        """Waits until every living worker says `step`; returns False if a worker does not."""
        waiting = {rank for rank in range(self.plan.world) if rank not in self.history.dead}
        end = time.monotonic() + limit
        while waiting:
            pipes = {self.hands[rank].pipe: rank for rank in waiting}
            for pipe in wait(list(pipes), timeout=0.05):
                rank = pipes[pipe]  # type: ignore[index]
                try:
                    message = self.hands[rank].pipe.recv()
                except (EOFError, OSError):
                    self._died(rank)
                    waiting.discard(rank)
                    continue
                if message[0] == step or (message[0] == "left" and step == "traffic over"):
                    waiting.discard(rank)
                if not self._heard(rank, message):
                    return False
            if waiting and time.monotonic() > end:
                self.history.trouble.append(f"ranks {sorted(waiting)} never came to {step!r}")
                return False
        if step == "over":
            self.over = {h for r, h in enumerate(self.hands) if r not in self.history.dead}
        return True

    def _go_on(self) -> None:
        for rank, hand in enumerate(self.hands):
            if rank not in self.history.dead:
                with suppress(OSError):  # the worker is dying; the next round notices it
                    hand.pipe.send("go on")

    def _heard(self, rank: int, message: tuple[Any, ...]) -> bool:
        history = self.history
        match message:
            case ("began", call, inputs, at, altered):
                outcome = Outcome(rank, call, inputs, at, altered=altered)
                self._open[rank, call] = history.add(outcome)
            case ("ended", call, at, output, error):
                outcome = self._open.pop((rank, call))
                outcome.ended, outcome.output, outcome.error = at, output, error
            case ("armed", fault, at):
                self._armed.append((rank, fault, at))
            case ("hit", fault, at, what, must_end):
                history.hit(fault, what, must_end=must_end, at=at)
            case ("left",):
                history.left.add(rank)
            case ("trouble", text):
                history.trouble.append(text)
                return False
        return True

    def _died(self, rank: int) -> None:
        process = self.hands[rank].process
        process.join(10)
        self.history.dead[rank] = f"exit status {process.exitcode}"
        planned = [(f, at) for r, f, at in self._armed if r == rank and f.kind is FaultKind.KILL]
        if planned and process.exitcode == -signal.SIGKILL:
            fault, at = planned[0]
            self.history.hit(fault, "killed", must_end=True, at=at)
        else:
            self.history.trouble.append(f"rank {rank} ended with exit status {process.exitcode}")

    def _keep_waking(self) -> None:
        """Wakes stopped ranks; has its own thread, since a rank may stop while it writes."""
        while not self._over.wait(0.05):
            self._wake_the_stopped()

    def _wake_the_stopped(self) -> None:
        now = time.monotonic()
        for rank, fault, at in list(self._armed):
            if fault.kind not in (FaultKind.STOP, FaultKind.PAUSE) or rank in self.history.dead:
                continue
            pid = self.hands[rank].process.pid
            if rank not in self._stopped_at:
                if _is_stopped(pid):
                    self._stopped_at[rank] = now
                    self.history.hit(fault, "stopped (SIGSTOP)", must_end=False, at=at)
                continue
            long = fault.kind is FaultKind.STOP
            rest = self.plan.timeout_s + BEYOND_THE_TIMEOUT_S if long else 0.6 * fault.amount
            if now >= self._stopped_at[rank] + rest:
                with suppress(OSError):  # the process has ended meanwhile
                    os.kill(pid, signal.SIGCONT)


def _is_stopped(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False
