"""Checks that the programs of all ranks of one collective fit together.

Tests check every program that can be built. An error in a program would cause a hang or a wrong
sum in the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from sealring.core.schedule.execution import RECEIVING, SENDING, Execution, Link, schedule_error
from sealring.core.schedule.program import Action, Program, Step

_READS_SLOT = frozenset(
    {
        Action.SEND,
        Action.PUBLISH,
        Action.RECEIVE_REDUCE,
        Action.REDUCE,
        Action.AVERAGE,
        Action.PREMULTIPLY,
    }
)
_READS_SOURCE = frozenset({Action.COPY, Action.REDUCE})
_WRITES_SLOT = frozenset(Action) - SENDING

_Arrival = tuple[Link, int, int]
"""A record on a link, with its origin (-1 for a record of the pair) and its message number."""


def check_programs(
    programs: Sequence[Program], *, read_only: Callable[[int], Collection[int]] = lambda rank: ()
) -> None:
    """Raises configuration.schedule_error unless the ranks' programs form a correct collective:

    - programs[r] is rank r's, and all have the same operation, algorithm and world;
    - steps name slots, peers and earlier steps that exist, and write no slot in `read_only(rank)`;
    - two steps that touch one slot, one of them writing, are ordered by ``after``;
    - scratch is written before it is read;
    - a FORWARD passes on a published record that this rank has received before;
    - a (sealer, message) pair is sealed once, and a published record reaches every other rank
      exactly once (a rank that it did not reach would see a gap in the sealer's counts);
    - what one rank publishes reaches another rank over one link, and so in order;
    - over one link a rank passes on at most world - 2 records (the engine's memory limit assumes
      this);
    - every record that is sent is received by exactly one step, and the other way round;
    - all steps can run, over links that keep records in order.
    """
    _check_membership(programs)
    for program in programs:
        for index, step in enumerate(program.steps):
            _check_step(program, index, step)
            _check_forward(program, index, step)
            if step.action in _WRITES_SLOT and step.slot in read_only(program.rank):
                _fail(program, index, f"writes slot {step.slot}, which is read-only")
        _check_slot_order(program)
        _check_sealed_once(program)
        _check_published_come_over_one_link(program)
        _check_forwards_per_link(program)
    _check_sends_meet_receives(programs)
    for _ in Execution(programs).turns():
        pass


def _fail(program: Program, index: int, what: str) -> None:
    action = program.steps[index].action.name
    raise schedule_error(f"rank {program.rank}, step {index} ({action}) {what}")


def _check_membership(programs: Sequence[Program]) -> None:
    for place, program in enumerate(programs):
        if program.rank != place or program.world != len(programs):
            raise schedule_error(
                f"program {place} of {len(programs)} is for rank {program.rank} of {program.world}"
            )
        first = programs[0]
        if (program.operation, program.algorithm) != (first.operation, first.algorithm):
            raise schedule_error(
                f"rank {place} runs {program.operation.name} {program.algorithm.name}, "
                f"rank 0 {first.operation.name} {first.algorithm.name}"
            )
        for number, like in enumerate(program.scratch, start=program.slots):
            if not 0 <= like < program.slots:
                raise schedule_error(
                    f"rank {place}: scratch slot {number} is to be as long as slot {like}, "
                    f"which the caller does not provide"
                )


def _check_step(program: Program, index: int, step: Step) -> None:
    slots = program.slots + len(program.scratch)
    if not 0 <= step.slot < slots:
        _fail(program, index, f"uses slot {step.slot} of {slots}")
    if step.action in _READS_SOURCE and not 0 <= step.source < slots:
        _fail(program, index, f"uses slot {step.source} of {slots}")
    for earlier in step.after:
        if not 0 <= earlier < index:
            _fail(program, index, f"waits for step {earlier}, which is not an earlier one")
    for peer in step.peers:
        if not 0 <= peer < program.world or peer == program.rank:
            _fail(program, index, f"names rank {peer} as its peer")
    if len(set(step.peers)) != len(step.peers):
        _fail(program, index, "names a peer twice")
    if step.action in RECEIVING or step.action is Action.SEND:
        if len(step.peers) != 1:
            _fail(program, index, f"needs exactly one peer, has {len(step.peers)}")
    elif step.action in SENDING:
        if not step.peers:
            _fail(program, index, "has no peer")
    elif step.peers:
        _fail(program, index, "is local but has a peer")


def _check_forward(program: Program, index: int, step: Step) -> None:
    if step.action is not Action.FORWARD:
        return
    if step.source not in step.after:
        _fail(program, index, f"does not wait for step {step.source}, whose record it passes on")
    received = program.steps[step.source]
    if received.action not in RECEIVING:
        _fail(program, index, f"passes on step {step.source}, which receives nothing")
    if received.origin < 0:
        _fail(program, index, "passes on a record of the pair, which no other rank can open")
    if (step.origin, step.message) != (received.origin, received.message):
        _fail(
            program,
            index,
            f"calls its record message {step.message} of rank {step.origin}, but step "
            f"{step.source} receives message {received.message} of rank {received.origin}",
        )


def _check_slot_order(program: Program) -> None:
    """Checks that every two conflicting steps are ordered. Ancestors are bit sets, for speed."""
    ancestors: list[int] = []
    readers: dict[int, list[int]] = {}
    writers: dict[int, list[int]] = {}
    for index, step in enumerate(program.steps):
        before = 0
        for earlier in step.after:
            before |= ancestors[earlier] | 1 << earlier
        ancestors.append(before)
        reads = set(_slots_read(step))
        writes = {step.slot} if step.action in _WRITES_SLOT else set()
        for slot in reads | writes:
            conflicting = writers.get(slot, []) + (readers.get(slot, []) if slot in writes else [])
            for earlier in conflicting:
                if not before >> earlier & 1:
                    _fail(program, index, f"races with step {earlier} for slot {slot}")
            if slot in reads and slot >= program.slots and slot not in writers:
                _fail(program, index, f"reads scratch slot {slot} before anything is there")
        for slot in reads:
            readers.setdefault(slot, []).append(index)
        for slot in writes:
            writers.setdefault(slot, []).append(index)


def _slots_read(step: Step) -> Iterator[int]:
    if step.action in _READS_SLOT:
        yield step.slot
    if step.action in _READS_SOURCE:
        yield step.source


def _check_sealed_once(program: Program) -> None:
    sealed: dict[int, int] = {}
    for index, step in enumerate(program.steps):
        if step.action not in (Action.SEND, Action.PUBLISH):
            continue
        if (earlier := sealed.setdefault(step.message, index)) != index:
            _fail(program, index, f"seals message {step.message} again after step {earlier}")


def _check_published_come_over_one_link(program: Program) -> None:
    link_of: dict[int, int] = {}
    for index, step in enumerate(program.steps):
        if step.action in RECEIVING and step.origin >= 0:
            link = step.peers[0]
            if (other := link_of.setdefault(step.origin, link)) != link:
                _fail(
                    program,
                    index,
                    f"takes a record of rank {step.origin} from rank {link}, and others of its "
                    f"records from rank {other}: they could overtake each other",
                )


def _check_forwards_per_link(program: Program) -> None:
    passed_on: dict[int, int] = {}
    for index, step in enumerate(program.steps):
        for peer in step.peers if step.action is Action.FORWARD else ():
            passed_on[peer] = passed_on.get(peer, 0) + 1
            if passed_on[peer] > program.world - 2:
                _fail(program, index, f"passes on too many records to rank {peer}")


def _check_sends_meet_receives(programs: Sequence[Program]) -> None:
    sent: dict[_Arrival, tuple[Program, int]] = {}
    reached: dict[tuple[int, int, int], int] = {}
    for program in programs:
        for index, step in enumerate(program.steps):
            if step.action not in SENDING:
                continue
            for peer in step.peers:
                origin = _origin_of_sent(program, step)
                if origin >= 0:
                    _check_reaches_once(program, index, peer, origin, reached)
                sent[Link(program.rank, peer), origin, step.message] = (program, index)

    received: dict[_Arrival, int] = {}
    for program in programs:
        for index, step in enumerate(program.steps):
            if step.action not in RECEIVING:
                continue
            arrival = (Link(step.peers[0], program.rank), step.origin, step.message)
            if (earlier := received.setdefault(arrival, index)) != index:
                _fail(program, index, f"takes the record that step {earlier} has taken")
            if arrival not in sent:
                _fail(program, index, f"waits for {_named(arrival)}, which is never sent")
    for arrival, (program, index) in sent.items():
        if arrival not in received:
            receiver = arrival[0].receiver
            _fail(program, index, f"sends {_named(arrival)}, which rank {receiver} never receives")
    for program in programs:
        for index, step in enumerate(program.steps):
            if step.action is Action.PUBLISH:
                _check_reaches_everyone(program, index, reached)


def _origin_of_sent(program: Program, step: Step) -> int:
    match step.action:
        case Action.SEND:
            return -1
        case Action.PUBLISH:
            return program.rank
    return step.origin


def _check_reaches_once(
    program: Program,
    index: int,
    peer: int,
    origin: int,
    reached: dict[tuple[int, int, int], int],
) -> None:
    message = program.steps[index].message
    if peer == origin:
        _fail(program, index, f"brings message {message} back to rank {peer}, who published it")
    if (peer, origin, message) in reached:
        _fail(
            program,
            index,
            f"brings message {message} of rank {origin} to rank {peer}, "
            f"who has it from rank {reached[peer, origin, message]}",
        )
    reached[peer, origin, message] = program.rank


def _check_reaches_everyone(
    program: Program, index: int, reached: dict[tuple[int, int, int], int]
) -> None:
    message = program.steps[index].message
    for rank in range(program.world):
        if rank != program.rank and (rank, program.rank, message) not in reached:
            _fail(program, index, f"publishes message {message}, which never reaches rank {rank}")


def _named(arrival: _Arrival) -> str:
    link, origin, message = arrival
    published = "" if origin < 0 else f" published by rank {origin}"
    return f"message {message}{published} from rank {link.sender}"
