"""Random worlds on one GPU, with calls, captures that must be refused, and faults.

`python -m tests.gpu.chaos --seconds 480 --seed 7` runs it.

Every world has two to four ranks on the first GPU, a random wire and a random way of waiting. It
has at most one fault: a rank dies, aborts, calls something else or falls silent. The rules are
those of docs/chaos.md. Without a fault every result is right and every capture is refused. With a
fault every other rank gets a GroupError in bounded time, and there is no wrong value without an
error.

Workers are reused for many worlds, until a fault ends them, because starting CUDA takes seconds.
"""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing
import os
import random
import secrets
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

from sealring.core.settings import with_settings

MOST_RANKS: Final = 4
WIRES: Final = ("peer", "host", "links", "nccl")
WAITS: Final = ("stream", "host")
KINDS: Final = (
    "all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "ring", "burst",
    "park", "capture",
)  # fmt: skip
MODES: Final = ("global", "thread_local", "relaxed")
FAULTS: Final = ("kill", "abort", "other_call", "silence")
TIMEOUT_S: Final = 10
PATIENCE_S: Final = 60
"""A world that takes longer than this hangs."""


@dataclass(frozen=True, slots=True)
class Call:
    kind: str
    elements: int
    root: int
    mode: str = ""


@dataclass(frozen=True, slots=True)
class World:
    number: int
    ranks: int
    wire: str
    wait: str
    calls: tuple[Call, ...]
    fault: tuple[str, int, int] | None
    """The fault, its rank, and the call before which it strikes."""

    def __str__(self) -> str:
        what = "no fault" if self.fault is None else "{} of rank {} at call {}".format(*self.fault)
        return f"world {self.number}: {self.ranks} ranks, {self.wire}, {self.wait}, {what}"


@dataclass(slots=True)
class Outcome:
    error: str = ""
    """The class of the GroupError with which the rank ended."""
    trouble: str = ""
    """Any other error of the rank."""
    wrong: list[str] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)


def drawn(seed: int, number: int) -> World:
    chance = random.Random(f"{seed} {number}")
    ranks = chance.randint(2, MOST_RANKS)
    calls = tuple(
        Call(
            chance.choice(KINDS),
            chance.choice((1, 1000, 65_536, 300_000, 2_000_000)) * ranks,
            chance.randrange(ranks),
            chance.choice(MODES),
        )
        for _ in range(chance.randint(8, 20))
    )
    fault = None
    if chance.random() < 0.5:
        fault = (chance.choice(FAULTS), chance.randrange(ranks), chance.randrange(len(calls)))
    return World(number, ranks, chance.choice(WIRES), chance.choice(WAITS), calls, fault)


# ---- in a worker --------------------------------------------------------------------------------


def serve(rank: int, pipe: Any, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    from tests.gpu.shared_gpu import enter

    os.environ["SEALRING_GPU_WIRE"] = "nccl"  # what NCCL needs must be set before CUDA starts
    enter(rank)
    pipe.send("up")
    while (order := pipe.recv()) is not None:
        world, port = order
        faulthandler.dump_traceback_later(PATIENCE_S - 10)  # shows what a hanging rank does
        pipe.send(_run(world, rank, port))
        faulthandler.cancel_dump_traceback_later()


def _run(world: World, rank: int, port: int) -> Outcome:
    import torch
    import torch.distributed as dist

    from sealring.errors import GroupError

    outcome = Outcome()
    os.environ.update(SEALRING_GPU_WIRE=world.wire, **with_settings({}, cuda_wait=world.wait))
    dist.distributed_c10d._world.group_count = 0
    store = dist.PrefixStore(f"world {world.number}", dist.TCPStore("127.0.0.1", port))
    try:
        dist.init_process_group(
            "sealring", store=store, rank=rank, world_size=world.ranks,
            timeout=timedelta(seconds=TIMEOUT_S),
        )  # fmt: skip
        member = _Member(world, rank, outcome)
        for number, call in enumerate(world.calls):
            if world.fault is not None and world.fault[1:] == (rank, number):
                member.strike(world.fault[0])
            getattr(member, call.kind)(number, call)
            torch.cuda.synchronize()
            outcome.done[call.kind] += 1
        dist.barrier()
        torch.cuda.synchronize()
        dist.destroy_process_group()
    except GroupError as error:
        outcome.error = type(error).__name__
    except BaseException as raised:
        outcome.trouble = f"{type(raised).__name__}: {raised}"
    if dist.is_initialized():
        with suppress(Exception):
            dist.destroy_process_group()
    return outcome


class _Member:
    def __init__(self, world: World, rank: int, outcome: Outcome) -> None:
        from sealring.train.offload import Parking

        self._world, self._rank, self._outcome = world, rank, outcome
        self._parking = Parking("cuda")

    def strike(self, fault: str) -> None:
        import torch
        import torch.distributed as dist

        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "abort":
            group: Any = dist.group.WORLD
            group.abort()
        elif fault == "other_call":
            dist.all_reduce(torch.ones(12_345, device="cuda"))
        else:
            time.sleep(2.5 * TIMEOUT_S)

    def _filled(self, number: int, elements: int) -> Any:
        import torch

        return torch.full((elements,), float(_value(number, self._rank)), device="cuda")

    def _check(self, what: str, tensor: Any, expected: float) -> None:
        low, high = tensor.min().item(), tensor.max().item()
        if not low == high == expected:
            self._outcome.wrong.append(f"{what}: {low} to {high}, not {expected}")

    def _sum(self, number: int) -> float:
        return float(sum(_value(number, rank) for rank in range(self._world.ranks)))

    def all_reduce(self, number: int, call: Call) -> None:
        import torch.distributed as dist

        data = self._filled(number, call.elements)
        dist.all_reduce(data)
        self._check("all_reduce", data, self._sum(number))

    def burst(self, number: int, call: Call) -> None:
        import torch.distributed as dist

        several = [self._filled(number + more, call.elements) for more in range(3)]
        works = [dist.all_reduce(data, async_op=True) for data in several]
        for more, (work, data) in enumerate(zip(works, several, strict=True)):
            assert work is not None
            work.wait()
            self._check("burst", data, self._sum(number + more))

    def broadcast(self, number: int, call: Call) -> None:
        import torch.distributed as dist

        data = self._filled(number, call.elements)
        dist.broadcast(data, call.root)
        self._check("broadcast", data, _value(number, call.root))

    def all_gather(self, number: int, call: Call) -> None:
        import torch
        import torch.distributed as dist

        gathered = torch.zeros(call.elements, device="cuda")
        dist.all_gather_into_tensor(
            gathered, self._filled(number, call.elements // self._world.ranks)
        )
        for rank, part in enumerate(gathered.chunk(self._world.ranks)):
            self._check("all_gather", part, _value(number, rank))

    def reduce_scatter(self, number: int, call: Call) -> None:
        import torch
        import torch.distributed as dist

        part = torch.zeros(call.elements // self._world.ranks, device="cuda")
        dist.reduce_scatter_tensor(part, self._filled(number, call.elements))
        self._check("reduce_scatter", part, self._sum(number))

    def all_to_all(self, number: int, call: Call) -> None:
        import torch
        import torch.distributed as dist

        out = torch.zeros(call.elements, device="cuda")
        dist.all_to_all_single(out, self._filled(number, call.elements))
        for rank, part in enumerate(out.chunk(self._world.ranks)):
            self._check("all_to_all", part, _value(number, rank))

    def ring(self, number: int, call: Call) -> None:
        import torch
        import torch.distributed as dist

        before, after = (self._rank - 1) % self._world.ranks, (self._rank + 1) % self._world.ranks
        got = torch.zeros(call.elements, device="cuda")
        both = [
            dist.P2POp(dist.isend, self._filled(number, call.elements), after),
            dist.P2POp(dist.irecv, got, before),
        ]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        self._check("ring", got, _value(number, before))

    def park(self, number: int, call: Call) -> None:
        data = self._filled(number, call.elements)
        parked = self._parking.park(data)
        data.zero_()
        self._check("park", self._parking.fetch(parked), _value(number, self._rank))

    def capture(self, number: int, call: Call) -> None:
        """Every rank tries the same captures, and each must be refused."""
        import torch
        import torch.distributed as dist

        from tests.gpu.test_captures import REFUSAL, refusal_of

        data = self._filled(number, call.elements)
        torch.cuda.synchronize()
        after = (self._rank + 1) % self._world.ranks
        for what in (
            lambda: dist.all_reduce(data),
            lambda: dist.isend(data, after),
            lambda: self._parking.park(data),
        ):
            try:
                found = refusal_of(what, call.mode)
            except torch.AcceleratorError as broken:
                # A group that fails meanwhile calls CUDA, which ends a capture in mode "global".
                if self._world.fault is None or "capture" not in str(broken):
                    raise
                continue
            if REFUSAL not in found:
                self._outcome.wrong.append(f"capture: {found}")
        self._check("capture", data, _value(number, self._rank))


def _value(number: int, rank: int) -> float:
    return float((number % 7 + 1) * (rank + 1))


# ---- the parent ---------------------------------------------------------------------------------


class Workers:
    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._environment = {
            "CUDA_MODULE_LOADING": "EAGER",
            "SEALRING_SECRET": secrets.token_hex(32),
            "SEALRING_JOB": "chaos",
        }
        self._each: list[tuple[Any, Any]] = []
        for rank in range(MOST_RANKS):
            self._each.append(self._started(rank))

    def _started(self, rank: int) -> tuple[Any, Any]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=serve, args=(rank, theirs, self._environment), daemon=True
        )
        process.start()
        theirs.close()
        return process, ours

    def run(self, world: World, port: int) -> dict[int, Outcome]:
        """Returns the ranks' reports; ranks that died or hang report nothing and are replaced."""
        for rank in range(world.ranks):
            process, pipe = self._each[rank]
            if not process.is_alive():
                process, pipe = self._each[rank] = self._started(rank)
            if not getattr(process, "up", False):
                pipe.recv()
                process.up = True
        for rank in range(world.ranks):
            self._each[rank][1].send((world, port))
        until = time.monotonic() + PATIENCE_S
        found: dict[int, Outcome] = {}
        for rank in range(world.ranks):
            process, pipe = self._each[rank]
            try:
                if pipe.poll(max(0.0, until - time.monotonic())):
                    found[rank] = pipe.recv()
                    continue
            except (EOFError, OSError):
                pass
            process.kill()
            process.join()
        return found

    def end(self) -> None:
        for process, pipe in self._each:
            if process.is_alive():
                pipe.send(None)
                process.join(10)


def violations(world: World, found: dict[int, Outcome]) -> list[str]:
    out = []
    for rank in range(world.ranks):
        struck = world.fault is not None and world.fault[1] == rank
        outcome = found.get(rank)
        if outcome is None:
            if not (struck and world.fault is not None and world.fault[0] == "kill"):
                out.append(f"rank {rank} died or hangs")
            continue
        if outcome.trouble:
            out.append(f"rank {rank}: {outcome.trouble}")
        if outcome.wrong and not outcome.error:
            out.append(f"rank {rank}: {outcome.wrong[:3]}")
        captured = [each for each in outcome.wrong if each.startswith("capture: it was")]
        if captured:
            out.append(f"rank {rank}: {captured}")
        if (world.fault is None) == bool(outcome.error):
            out.append(f"rank {rank} ended with {outcome.error or 'no error'}")
    return out


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--first", type=int, default=0, help="the first world's number")
    parser.add_argument("--worlds", type=int, help="so many, whatever the time")
    given = parser.parse_args()
    seed = secrets.randbelow(1 << 31) if given.seed is None else given.seed
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    workers, began = Workers(), time.monotonic()
    done: Counter[str] = Counter()
    count = faults = bad = 0
    while time.monotonic() - began < given.seconds and count != given.worlds:
        world = drawn(seed, given.first + count)
        found = workers.run(world, store.port)
        for outcome in found.values():
            done.update(outcome.done)
        for each in violations(world, found):
            bad += 1
            print(f"VIOLATION (seed {seed}) {world}: {each}", flush=True)
        faults += world.fault is not None
        count += 1
    workers.end()
    print(
        f"seed {seed}: {count} worlds, {sum(done.values())} calls on ranks, of which "
        f"{3 * done['capture']} tried captures; {faults} faults, {bad} violations"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
