"""One PTX instruction as a function on a frame: its result, and whether it depends on a secret."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from tests.constant_time.ptx_state import (
    LOCAL,
    M32,
    M64,
    PARAM,
    PART,
    SHARED,
    WIDTH,
    Frame,
    Function,
    Leak,
    Memory,
)

Step = Callable[[Frame], Any]


def _signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def _permuted(a: int, b: int, selector: int) -> int:
    both = (a & M32) | (b & M32) << 32
    picked = [(both >> 8 * (selector >> 4 * i & 7)) & 255 for i in range(4)]
    assert not selector & 0x8888, "sign replication is not used"
    return sum(byte << 8 * i for i, byte in enumerate(picked))


_ARITHMETIC: Final[dict[str, Callable[..., int]]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul.lo": lambda a, b: a * b,
    "mad.lo": lambda a, b, c: a * b + c,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda a: ~a,
    "neg": lambda a: -a,
    "mov": lambda a: a,
    "cvt": lambda a: a,
    "prmt": _permuted,
    "shf.l.wrap": lambda low, high, n: ((high << 32 | low) << (n & 31)) >> 32,
    "shf.r.wrap": lambda low, high, n: (high << 32 | low) >> (n & 31),
    "abs": abs,
    "max": max,
    "min": min,
    "div": lambda a, b: a // b,
    "rem": lambda a, b: a % b,
}
_COMPARISONS: Final[dict[str, Callable[[int, int], bool]]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
_BARRIERS: Final = {
    "bar.sync": "block",
    "bar.warp.sync": "warp",
    "barrier.cluster.wait.acquire.aligned": "cluster",
}


def step_of(function: Function, statement: str, functions: dict[str, Function]) -> Step:
    guard = re.match(r"@(!?)(%\w+)\s+", statement)
    body = statement[guard.end() :] if guard else statement
    opcode, _, rest = body.partition(" ")

    def leak(frame: Frame, what: str) -> None:
        frame.thread.machine.leaks.add(Leak(what, function.name, statement))

    step = _plain_step(function, opcode, rest.strip(), functions, leak)
    if guard is None:
        return step
    predicate, wanted = function.slot(guard[2]), not guard[1]

    def guarded(frame: Frame) -> Any:
        if frame.secrets[predicate]:
            leak(frame, "branch")
        return step(frame) if bool(frame.values[predicate]) == wanted else None

    return guarded


def _plain_step(
    function: Function, opcode: str, rest: str, functions: dict[str, Function], leak: Any
) -> Step:
    if opcode in ("bra", "bra.uni"):
        return _jump(function, rest)
    if opcode == "ret":
        return lambda frame: frame.thread.leave()
    if opcode.startswith("call"):
        return _call(rest, functions)
    if opcode in _BARRIERS:
        kind = _BARRIERS[opcode]
        return lambda frame: (kind, frame)
    if opcode.startswith(("barrier.cluster.arrive", "fence", "membar")):
        return lambda frame: None
    if opcode.startswith("ld"):
        return _load(function, opcode, rest, leak)
    if opcode.startswith("st"):
        return _store(function, opcode, rest, leak)
    operands = [part.strip() for part in re.split(r",(?![^{]*\})", rest)]
    if opcode.startswith("shfl.sync.down"):
        to, taken, distance = operands[0].split("|")[0], operands[1], operands[2]
        slots = function.slot(to), function.slot(taken), function.slot(distance)

        def shuffle(frame: Frame) -> Any:
            if frame.secrets[slots[2]]:
                leak(frame, "shuffle")
            return "shuffle", frame, slots[0], slots[1], frame.values[slots[2]]

        return shuffle
    return _computed(function, opcode, operands, leak)


def _jump(function: Function, label: str) -> Step:
    def jump(frame: Frame) -> None:
        frame.pc = function.labels[label]

    return jump


def _call(rest: str, functions: dict[str, Function]) -> Step:
    found = re.match(r"(?:\(\s*([\w$]+)\s*\)\s*,\s*)?([\w$]+)\s*(?:,\s*\(([^)]*)\))?", rest)
    assert found is not None, rest
    result, callee = found[1], functions[found[2]]
    given = [name.strip() for name in (found[3] or "").split(",") if name.strip()]

    def call(frame: Frame) -> None:
        passing = frame.thread.passing
        parameters = {
            own: passing.setdefault(name, Memory(64))
            for own, name in zip(callee.parameters, given, strict=True)
        }
        if result is not None:
            passing[result] = parameters[callee.results[0]] = Memory(64)
        frame.thread.passing = {}
        frame.thread.enter(callee, parameters)
        # The results are looked up in the caller's frame after the call.
        frame.parameters.update({result: passing[result]} if result is not None else {})

    return call


def _address(function: Function, text: str) -> tuple[int, int]:
    """Slot and offset of `[%rd1+16]` or `[name+16]`."""
    found = re.match(r"\[([%\w$.]+)(?:\s*\+\s*(-?\d+))?\]", text)
    assert found is not None, text
    return function.slot(found[1]), int(found[2] or 0)


def _split(opcode: str) -> tuple[str, int, int]:
    """The space, the number of elements and the bytes of each."""
    kind = re.search(r"\.[bus](8|16|32|64)$", opcode)
    assert kind is not None, opcode
    vector = re.search(r"\.v([24])", opcode)
    space = re.search(r"\.(global|shared::cluster|shared|local|param)\b", opcode)
    return space[1] if space else "", int(vector[1]) if vector else 1, WIDTH[kind[1]]


def _resolver(function: Function, space: str, where: str) -> Callable[[Frame], tuple[Memory, int]]:
    name = re.match(r"\[([\w$.]+)", where)
    slot, offset = _address(function, where)

    def by_address(frame: Frame) -> tuple[Memory, int]:
        at = (frame.values[slot] + offset) & M64
        thread = frame.thread
        if space == "shared":
            return thread.machine.shared[thread.part], at
        if space == "shared::cluster":
            return thread.machine.shared[at // PART - 1], at % PART
        if space == "local":
            return thread.local, at
        if space == "param":
            return thread.memory(at | PARAM)
        return thread.memory(at)

    if space == "param" and name is not None and not name[1].startswith("%"):
        known = name[1]

        def by_name(frame: Frame) -> tuple[Memory, int]:
            found = frame.parameters.get(known) or frame.thread.passing.setdefault(
                known, Memory(64)
            )
            return found, offset

        return by_name
    return by_address


def _load(function: Function, opcode: str, rest: str, leak: Any) -> Step:
    space, count, width = _split(opcode)
    to, where = re.match(r"(\{[^}]*\}|[%\w]+)\s*,\s*(\[.*\])$", rest).groups()  # type: ignore[union-attr]
    slots = [function.slot(name.strip()) for name in to.strip("{}").split(",")]
    resolve, address = _resolver(function, space, where), _address(function, where)[0]

    def load(frame: Frame) -> None:
        if frame.secrets[address]:
            leak(frame, "address")
        memory, at = resolve(frame)
        for i, slot in enumerate(slots):
            frame.values[slot], frame.secrets[slot] = memory.load(at + i * width, width)

    assert len(slots) == count
    return load


def _store(function: Function, opcode: str, rest: str, leak: Any) -> Step:
    space, count, width = _split(opcode)
    where, given = re.match(r"(\[[^\]]*\])\s*,\s*(.*)$", rest).groups()  # type: ignore[union-attr]
    slots = [function.slot(name.strip()) for name in given.strip("{}").split(",")]
    resolve, address = _resolver(function, space, where), _address(function, where)[0]

    def store(frame: Frame) -> None:
        if frame.secrets[address]:
            leak(frame, "address")
        memory, at = resolve(frame)
        for i, slot in enumerate(slots):
            memory.store(at + i * width, width, frame.values[slot], frame.secrets[slot])

    assert len(slots) == count
    return store


def _computed(function: Function, opcode: str, operands: list[str], leak: Any) -> Step:
    if opcode == "sealring.public":
        to, source = (function.slot(name) for name in operands)

        def publish(frame: Frame) -> None:
            frame.values[to], frame.secrets[to] = frame.values[source], 0

        return publish
    if opcode == "mov.b64" and operands[1].startswith("{"):
        low, high = (function.slot(name.strip()) for name in operands[1].strip("{}").split(","))
        to = function.slot(operands[0])

        def joined(frame: Frame) -> None:
            values, secrets = frame.values, frame.secrets
            values[to] = (values[low] & M32) | (values[high] & M32) << 32
            secrets[to] = secrets[low] | secrets[high]

        return joined
    to, *sources = (function.slot(name) for name in operands)
    compute = _function_of(opcode)
    divides = opcode.startswith(("div", "rem"))

    def run(frame: Frame) -> None:
        secrets, values = frame.secrets, frame.values
        secret = 0
        for source in sources:
            secret |= secrets[source]
        if divides and secret:
            leak(frame, "division")
        values[to] = compute(*[values[source] for source in sources])
        secrets[to] = secret

    return run


def _function_of(opcode: str) -> Callable[..., int]:
    name, _, kind = opcode.rpartition(".")
    if opcode.startswith("cvta"):
        window = {"shared": SHARED, "local": LOCAL, "param": PARAM}
        space = opcode.split(".")[-2]
        offset = window.get(space, 0)
        return (lambda a: a - offset if offset else a) if ".to." in opcode else lambda a: a + offset
    if opcode.startswith("mapa"):
        return lambda at, part: at + (part + 1) * PART
    if kind == "pred":
        logic = _ARITHMETIC[name]
        return lambda *given: logic(*given) & 1
    signed, bits = kind[0] == "s", int(kind[1:])
    mask = (1 << bits) - 1
    if name.startswith("setp."):
        comparison = _COMPARISONS[name.split(".")[1]]
        read = _signed if signed else lambda value, width: value & (1 << width) - 1
        return lambda a, b: int(comparison(read(a, bits), read(b, bits)))
    if name == "selp":
        return lambda a, b, predicate: (a if predicate else b) & mask
    if name == "bfi":
        return lambda a, b, at, size: (
            (b & mask & ~(((1 << size) - 1) << at)) | (a & ((1 << size) - 1)) << at
        )
    if name in ("shl", "shr"):
        if name == "shl":
            return lambda a, n: (a << (n & M32)) & mask if (n & M32) < bits else 0
        if signed:
            return lambda a, n: (_signed(a, bits) >> min(n & M32, bits - 1)) & mask
        return lambda a, n: (a & mask) >> (n & M32) if (n & M32) < bits else 0
    if name.startswith("mul.wide"):
        if signed:
            return lambda a, b: (_signed(a, bits) * _signed(b, bits)) & ((1 << 2 * bits) - 1)
        return lambda a, b: (a & mask) * (b & mask)
    if name.startswith("cvt."):
        to_bits = int(re.findall(r"\d+", opcode)[0])
        to_mask = (1 << to_bits) - 1
        return (lambda a: _signed(a, bits) & to_mask) if signed else lambda a: a & mask & to_mask
    plain = _ARITHMETIC[name]
    if name in ("abs", "max", "min", "div", "rem"):
        if signed:
            return lambda *given: plain(*(_signed(each, bits) for each in given)) & mask
        return lambda *given: plain(*(each & mask for each in given)) & mask
    if name.startswith("shf"):
        return lambda *given: plain(*(each & mask for each in given)) & mask
    return lambda *given: plain(*given) & mask
