"""How long groups take to form: a group of processes with torch, and groups of many light workers.

`python -m sealring.lab handshake` starts a script for each rank. `python -m sealring.lab scale`
runs many light workers in a process, with four processes for each core; with fewer processes,
workers would wait for the interpreter. A light worker is all of sealring without torch. Each has
its own identity, sessions and groups. Workers of one process have consecutive ranks, as on one
machine. For each number of ranks it measures in this order:

    world        the group of all ranks forms
    all_reduce   its first all-reduce, which creates links
    mesh         the rows and the columns of a square mesh form as separate groups
"""

from __future__ import annotations

import gc
import itertools
import math
import os
import resource
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

import numpy as np

from sealring import _native, limits
from sealring.core.engine.collective import Collective, DType, ReduceKind
from sealring.core.engine.engine import CollectiveEngine
from sealring.core.engine.mailbox import Mailbox
from sealring.core.handshake import SessionTable, Terms, group_context
from sealring.core.identity import Credentials
from sealring.core.links import Agreed, Store, agreed_epoch, build_mesh, explain_resource_limits
from sealring.core.schedule import Algorithm, Operation, Selection, chunks, cuts_into_chunks
from sealring.errors import WorkerFailed
from sealring.lab.bench.harness import BenchRow, Cases, Progress, forming_floor
from sealring.lab.bench.workers import Report, environment_of, meeting_place, run_workers
from sealring.lab.results import ScaleCase

_LOOPBACK: Final = {"SEALRING_ADDRESS": "127.0.0.1"}


@dataclass(slots=True)
class LightGroup:
    engine: CollectiveEngine
    mailbox: Mailbox
    world: int
    links_at_first: int
    agreed: Agreed
    _numbers: Any = field(default_factory=lambda: itertools.count(1))

    def all_reduce(
        self, values: np.ndarray[Any, Any], algorithm: Algorithm, timeout_s: float = 60.0
    ) -> None:
        start, total = values.ctypes.data, values.nbytes
        slots = [(start, total)]
        if cuts_into_chunks(Operation.ALL_REDUCE, algorithm):
            cuts = chunks(values.size, self.world, values.itemsize)
            slots = [(start + offset, length) for offset, length in cuts]
        self._run(
            Collective(
                Operation.ALL_REDUCE,
                algorithm,
                slots,
                dtype=DType.FLOAT32,
                reduction=ReduceKind.SUM,
                total=values.nbytes,
            ),
            timeout_s,
        )

    def _run(self, collective: Collective, timeout_s: float) -> None:
        self.engine.run(next(self._numbers), collective, timeout_s)

    def close(self) -> None:
        self.mailbox.close()
        self.engine.close()


class LightWorker:
    def __init__(self, credentials: Credentials, world: int, store: Store, host: str) -> None:
        self.credentials = credentials
        self.sessions = SessionTable()
        self._world = world
        self._store = store
        self._host = host

    @property
    def rank(self) -> int:
        return self.credentials.rank

    @explain_resource_limits()
    def form(
        self,
        name: str,
        members: Sequence[int],
        *,
        timeout_s: float = 120.0,
        transport: Any = "tcp",
        record_bytes: int = limits.RECORD_BYTES,
        rekey_bytes: int = limits.REKEY_BYTES,
    ) -> LightGroup:
        """Forms a group as core/group/create.py does, but without torch, GPUs and a recorder."""
        ordered = tuple(members)
        place_of = {each: place for place, each in enumerate(ordered)}
        rank = place_of[self.rank]
        deadline = time.monotonic() + timeout_s
        store = _Prefixed(self._store, name)
        with agreed_epoch(store, ordered, self.rank, deadline) as epoch:
            terms = Terms(
                job=self.credentials.job,
                group=name,
                epoch=epoch,
                world=self._world,
                members=ordered,
                rank=self.rank,
                settings={"record_bytes": record_bytes},
                host=self._host,
            )
            mesh = build_mesh(
                store,
                self.credentials,
                terms,
                timeout=timeout_s,
                transport=transport,
                environ=_LOOPBACK,
                sessions=self.sessions,
            )
        agreed, exchange = mesh.agreed, mesh.exchange
        linked = {link.peer for link in mesh.links} | {self.rank}
        unlinked = agreed.group_keys([each for each in ordered if each not in linked])
        hosts = {place_of[each]: member.host for each, member in agreed.members.items()}
        shared: dict[str, Any] = {
            "context": group_context(terms),
            "members": ordered,
            "record_bytes": record_bytes,
            "rekey_bytes": rekey_bytes,
            "first_failure": _native.FirstFailure(),
            "hosts": hosts,
            "exchange": exchange,
        }
        with mesh.handed_over():
            engine = CollectiveEngine(
                rank,
                len(ordered),
                group_key=agreed.group_key(self.rank),
                links=[(place_of[link.peer], link) for link in mesh.links],
                unlinked={place_of[each]: key for each, key in unlinked.items()},
                **shared,
            )
            agreed.wipe()
            mailbox = Mailbox(rank, len(ordered), links=[], **shared)
        return LightGroup(engine, mailbox, len(ordered), len(mesh.links), agreed)


class _Prefixed:
    """A store that adds a group's name to each key, as torch's stores of groups do."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name

    def set(self, key: str, value: str, /) -> object:
        return self._store.set(f"{self._name}/{key}", value)

    def get(self, key: str, /) -> bytes:
        return self._store.get(f"{self._name}/{key}")

    def check(self, keys: list[str], /) -> bool:
        return self._store.check([f"{self._name}/{key}" for key in keys])

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        return self._store.multi_get([f"{self._name}/{key}" for key in keys])

    def multi_set(self, keys: list[str], values: list[str], /) -> object:
        return self._store.multi_set([f"{self._name}/{key}" for key in keys], values)


# ---- one process with torch for each rank


_RANK: Final = """
import sys, time
import torch, torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

store, rank, world = next(iter(rendezvous("env://")))
store.add("ready", 1)
while store.add("ready", 0) < world:
    time.sleep(0.005)
start, cpu = time.perf_counter(), time.process_time()
dist.init_process_group(sys.argv[1], store=store, rank=rank, world_size=world)
formed, cpu = time.perf_counter() - start, time.process_time() - cpu
dist.all_reduce(torch.ones(1024))
print(formed, time.perf_counter() - start, cpu)
dist.barrier()
dist.destroy_process_group()
"""
"""A script like a user's: when the group is made, its process has imported only torch."""


def measure_handshake(ranks: int, transport: str, turns: int = 3) -> list[BenchRow]:
    """The medians of several turns, in which Gloo and sealring alternate."""
    found: dict[str, list[tuple[float, ...]]] = {"gloo": [], "sealring": []}
    for _ in range(turns):
        for backend, measured in found.items():
            measured.append(_formed(backend, ranks, transport))
    rows = []
    for backend, measured in found.items():
        formed, reduced, cpu = (round(median(each), 3) for each in zip(*measured, strict=True))
        rows += [
            BenchRow("forming", f"{backend}: until the slowest of all has the group", formed, "s"),
            BenchRow("forming", "... and its first all-reduce", reduced, "s"),
            BenchRow("forming", "CPU of a rank until then, with what it imports", cpu, "s"),
        ]
    return rows


def _formed(backend: str, ranks: int, transport: str) -> tuple[float, float, float]:
    """Seconds until the slowest rank has the group, and its first all-reduce; CPU of a rank."""
    secret = secrets.token_hex(32)
    with meeting_place() as place, ExitStack() as stack:
        environment = {**place, "SEALRING_TRANSPORT": transport}
        started = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", _RANK, backend],
                    env=environment_of(rank, ranks, secret, environment),
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for rank in range(ranks)
        ]
        for each in started:
            stack.callback(each.kill)
        said = [each.communicate()[0].split() for each in started]
    if any(len(each) != 3 for each in said):
        raise WorkerFailed("a worker ended before its group had formed: its output says why")
    formed, reduced, cpu = zip(*(map(float, each) for each in said), strict=True)
    return max(formed), max(reduced), median(cpu)


# ---- light workers


_ELEMENTS: Final = 1024
"""Elements of the all-reduce: 4 KiB."""
_PROCESSES_PER_CORE: Final = 4
_SWITCH_SECONDS: Final = 0.05
"""How often a thread that waits for the interpreter wakes up. A rank with its own process has a few
such threads; here hundreds wait. Python's default is 5 ms. One run each at 256 ranks took 205.6 ms
of CPU per rank with the default and 176.8 ms with this value."""


@dataclass(frozen=True, slots=True)
class _Part:
    """One process's measurements of one part."""

    what: str
    start: float
    end: float
    cpu: float
    handshakes: int
    resumptions: int
    sockets: int
    rss: int


def growth(cases: Sequence[ScaleCase]) -> dict[str, dict[str, float]]:
    """The exponent e of each value that grows as ranks^e, fitted over numbers of ranks from 8
    on."""
    found: dict[str, dict[str, float]] = {}
    for what in dict.fromkeys(case.what for case in cases):
        points = [case for case in cases if case.what == what and case.ranks >= 8]
        if len(points) < 2:
            continue
        found[what] = {
            name: round(_slope([(case.ranks, value(case)) for case in points]), 2)
            for name, value in _GROWING.items()
            if all(value(case) > 0 for case in points)
        }
    return found


_GROWING: Final[dict[str, Callable[[ScaleCase], float]]] = {
    "handshakes": lambda case: case.handshakes,
    "sockets": lambda case: case.sockets,
    "seconds": lambda case: case.seconds,
    "cpu_seconds_per_rank": lambda case: case.cpu_seconds_per_rank,
    "rss_bytes": lambda case: case.rss_bytes,
}


def _slope(points: Sequence[tuple[float, float]]) -> float:
    x, y = np.log([point[0] for point in points]), np.log([point[1] for point in points])
    return float(np.polyfit(x, y, 1)[0])


def measure_scale(ranks: int, progress: Progress | None = None) -> Iterator[Cases]:
    processes = min(ranks, _PROCESSES_PER_CORE * len(os.sched_getaffinity(0)))
    before = _bytes_sent()
    parts: dict[str, list[tuple[_Part, int]]] = {}
    for _, part in run_workers(processes, _host, ranks):
        parts.setdefault(part.what, []).append((part, _bytes_sent()))
    cases = []
    side = math.isqrt(ranks)
    groups = {"world": [ranks], "all_reduce": [], "mesh": [side, side]}
    for what, seen in parts.items():
        sent = max(count for _, count in seen)
        found = [part for part, _ in seen]
        ends = sum(part.handshakes for part in found)
        strangers = ranks - 1 if what == "world" else 0
        cases.append(
            ScaleCase(
                ranks=ranks,
                what=what,
                handshakes=ends // 2,
                resumptions=sum(part.resumptions for part in found) // 2,
                sockets=sum(part.sockets for part in found),
                bytes=sent - before,
                seconds=round(
                    max(part.end for part in found) - min(part.start for part in found), 3
                ),
                cpu_seconds_per_rank=round(sum(part.cpu for part in found) / ranks, 5),
                floor_seconds_per_rank=round(
                    forming_floor(groups[what], strangers, ends / ranks), 5
                ),
                rss_bytes=sum(part.rss for part in found),
            )
        )
        before = sent
    yield Cases("scale", cases)


def _host(index: int, report: Report, ranks: int) -> None:
    """One process, which runs its share of the workers."""
    from torch.distributed.rendezvous import rendezvous

    from sealring.core.identity import load_credentials

    sys.setswitchinterval(_SWITCH_SECONDS)
    _search_only_new_garbage()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    store, _, processes = next(iter(rendezvous("env://")))
    own = list(range(index * ranks // processes, (index + 1) * ranks // processes))
    workers = {
        rank: LightWorker(load_credentials(rank, ranks), ranks, store, f"host-{index}")
        for rank in own
    }
    pool = ThreadPoolExecutor(len(own))
    groups: list[LightGroup] = []

    def counts() -> tuple[int, int]:
        tables = [worker.sessions for worker in workers.values()]
        return sum(each.handshakes for each in tables), sum(each.resumptions for each in tables)

    def together(number: int) -> None:
        store.add(f"part-{number}", 1)
        while store.add(f"part-{number}", 0) < processes:
            time.sleep(0.002)

    def part(what: str, number: int, call: Callable[[int], Any]) -> list[Any]:
        before = counts()
        together(number)
        start, cpu = time.monotonic(), time.process_time()
        results = list(pool.map(call, own))
        end, cpu = time.monotonic(), time.process_time() - cpu
        together(number + 100)
        shaken, resumed = (late - early for early, late in zip(before, counts(), strict=True))
        report(_Part(what, start, end, cpu, shaken, resumed, _sockets(), _rss()))
        return results

    world = part("world", 0, lambda rank: workers[rank].form("world", range(ranks)))
    by_rank = dict(zip(own, world, strict=True))
    groups += world
    algorithm = Selection(world[0].engine.topology)(Operation.ALL_REDUCE, 4 * _ELEMENTS)

    def all_reduce(rank: int) -> float:
        values = np.full(_ELEMENTS, 1.0, dtype=np.float32)
        by_rank[rank].all_reduce(values, algorithm)
        return float(values[0])

    assert set(part("all_reduce", 1, all_reduce)) == {float(ranks)}
    side = math.isqrt(ranks)
    if side * side == ranks:

        def rows_and_columns(rank: int) -> list[LightGroup]:
            row, column = divmod(rank, side)
            return [
                workers[rank].form(f"row-{row}", range(row * side, (row + 1) * side)),
                workers[rank].form(f"column-{column}", range(column, ranks, side)),
            ]

        groups += [group for made in part("mesh", 2, rows_and_columns) for group in made]
    together(3)
    list(pool.map(LightGroup.close, groups))
    pool.shutdown()


def _search_only_new_garbage() -> None:
    """Keeps the garbage collector from searching old objects.

    A rank with its own process does not search them while it forms a group. Here, with many
    workers in a process, it would search them again and again, which took 14 % of the CPU.
    """
    gc.freeze()
    gc.set_threshold(gc.get_threshold()[0], 1 << 30)


def _sockets() -> int:
    count = 0
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
        except OSError:  # the descriptor of the listing itself
            continue
    return count


def _rss() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _bytes_sent() -> int:
    """The bytes sent by all sockets of this network namespace (IpExt: OutOctets)."""
    with open("/proc/net/netstat") as file:
        lines = [line.split() for line in file if line.startswith("IpExt:")]
    return int(dict(zip(*lines, strict=True))["OutOctets"])
