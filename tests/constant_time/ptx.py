"""Runs compiled GPU code (PTX) on the CPU and follows secrets through it.

Every register and every byte of memory has a value and a mark: whether it depends on a secret. A
branch, a predicate, an address, a shuffle's distance or a division that depends on a secret is a
`Leak`. As under valgrind this says all about the paths that ran, and the kernels' paths depend on
lengths and alignments only, which the caller varies.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from tests.constant_time.ptx_state import (
    LOCAL,
    LOCAL_BYTES,
    PARAM,
    SHARED,
    Frame,
    Function,
    Leak,
    Memory,
)
from tests.constant_time.ptx_steps import step_of

_PUBLIC: Final = re.compile(r"mov\.b32 (\S+), (\S+); // sealring: public")


@dataclass
class Thread:
    machine: Machine
    index: int
    part: int
    local: Memory = field(default_factory=lambda: Memory(LOCAL_BYTES))
    local_top: int = 0
    frames: list[Frame] = field(default_factory=list)
    passing: dict[str, Memory] = field(default_factory=dict)
    """Parameters of the call under way, by their names in the caller."""

    def enter(self, function: Function, parameters: dict[str, Memory]) -> None:
        values = function.constants[:]
        special = {
            "%tid.x": self.index,
            "%ctaid.x": self.part,
            "%cluster_ctarank": self.part,
            "%cluster_nctarank": self.machine.parts,
            "%ntid.x": self.machine.threads,
        }
        for name, slot in function.slots.items():
            if name in special:
                values[slot] = special[name]
            elif name.startswith("__local_depot"):
                values[slot] = self.local_top
        self.local_top += (function.local_bytes + 15) // 16 * 16
        frame = Frame(self, function, values, [0] * len(values), parameters)
        self.frames.append(frame)

    def run(self) -> Iterator[tuple[Any, ...]]:
        """Until something is awaited that other threads do: yields what."""
        while self.frames:
            frame = self.frames[-1]
            step = frame.function.code[frame.pc]
            frame.pc += 1
            awaited = step(frame)
            if awaited is not None:
                yield awaited

    def leave(self) -> None:
        frame = self.frames.pop()
        self.local_top -= (frame.function.local_bytes + 15) // 16 * 16

    def memory(self, at: int) -> tuple[Memory, int]:
        """Of a generic address."""
        if at & PARAM:
            return self.frames[0].parameters[self.frames[0].function.parameters[0]], at - PARAM
        if at & LOCAL:
            return self.local, at - LOCAL
        if at & SHARED:
            return self.machine.shared[self.part], at - SHARED
        return self.machine.memory, at


class Machine:
    """One cluster of `parts` thread blocks."""

    def __init__(self, text: str, parts: int = 1, threads: int = 128) -> None:
        self.functions = _parse(text)
        self.parts, self.threads = parts, threads
        self.memory = Memory(4 << 20)
        self.shared = [Memory(16 << 10) for _ in range(parts)]
        self.leaks: set[Leak] = set()
        self.executed = 0

    def launch(self, kernel: str, argument: bytes) -> set[Leak]:
        function = self.functions[kernel]
        threads = []
        for part in range(self.parts):
            for index in range(self.threads):
                thread = Thread(self, index, part)
                parameter = Memory(len(argument))
                parameter.bytes[:] = argument
                thread.enter(function, {function.parameters[0]: parameter})
                threads.append(thread)
        self._schedule(threads)
        return self.leaks

    def _schedule(self, threads: list[Thread]) -> None:
        running = {(t.part, t.index): t.run() for t in threads}
        waiting: dict[tuple[int, int], tuple[Any, ...]] = {}
        while running or waiting:
            for who, steps in list(running.items()):
                try:
                    waiting[who] = next(steps)
                    waiting[who] += (steps,)
                except StopIteration:
                    pass
                del running[who]
            if not waiting:
                return
            released = self._release(waiting)
            assert released, "threads wait for each other for ever"
            for who in released:
                running[who] = waiting.pop(who)[-1]

    def _release(self, waiting: dict[tuple[int, int], tuple[Any, ...]]) -> list[tuple[int, int]]:
        """Those whose wait ends: a whole warp at a shuffle, a block or a cluster at a barrier."""
        released = []
        for part in range(self.parts):
            for warp in range(self.threads // 32):
                lanes = [(part, warp * 32 + lane) for lane in range(32)]
                if all(who in waiting and waiting[who][0] in ("shuffle", "warp") for who in lanes):
                    shuffled = [waiting[who] for who in lanes]
                    for lane, one in enumerate(shuffled):
                        if one[0] == "shuffle":
                            _, frame, to, _, distance, _ = one
                            _, source, _, taken, _, _ = shuffled[min(lane + distance, 31)]
                            if lane + distance > 31:
                                source, taken = frame, one[3]
                            frame.values[to] = source.values[taken]
                            frame.secrets[to] = source.secrets[taken]
                    released += lanes
        if released:
            return released
        kinds = {one[0] for one in waiting.values()}
        if kinds == {"cluster"}:
            return list(waiting)
        for part in range(self.parts):
            of_part = [who for who in waiting if who[0] == part]
            if of_part and all(waiting[who][0] == "block" for who in of_part):
                released += of_part
        return released


def _parse(text: str) -> dict[str, Function]:
    text = _PUBLIC.sub(r"sealring.public \1, \2;", text)
    text = re.sub(r"//[^\n]*", "", text)
    functions = {}
    pattern = r"\.(?:entry|func)\s*(?:\(([^)]*)\)\s*)?([\w$]+)\s*\(([^)]*)\)([^{;]*)\{"
    for found in re.finditer(pattern, text):
        results, name, parameters = found[1] or "", found[2], found[3]
        function = Function(name, _names(parameters), _names(results))
        functions[name] = function
        _read_body(function, text[found.end() : _end_of(text, found.end())])
    for function in functions.values():
        for statement in function.statements:
            function.code.append(step_of(function, statement, functions))
    return functions


def _names(parameters: str) -> list[str]:
    return re.findall(r"([\w$]+)(?:\[\d+\])?\s*(?:,|$)", parameters.strip())


def _end_of(text: str, at: int) -> int:
    depth = 1
    while depth:
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        at += 1
    return at - 1


def _read_body(function: Function, body: str) -> None:
    for raw in body.split(";"):
        statement = " ".join(raw.split())
        while True:
            if statement.startswith(("{", "}")):
                statement = statement[1:].strip()
            elif label := re.match(r"(\$?[\w$]+):\s*", statement):
                function.labels[label[1]] = len(function.statements)
                statement = statement[label.end() :]
            else:
                break
        if depot := re.match(r"\.local .*\[(\d+)\]", statement):
            function.local_bytes = int(depot[1])
        if statement and not statement.startswith("."):
            function.statements.append(statement)
