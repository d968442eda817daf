"""Checks each rank's chain: no statement is missing or doubled, and each names the one before.

All ranks must also agree on the size of the world, the script, and the first and last step. And
each rank must have a key of its own, or one worker would count as several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise

from sealring.record.audit.findings import (
    MAX_AGAINST,
    Fault,
    Finding,
    absent_ranks,
    blame,
    clash_of,
    listed,
)
from sealring.record.audit.records import RankInterval, Records


def check_chains(records: Records) -> list[Finding]:
    chains = records.chains
    found = [finding for chain in chains.values() for finding in _chain(chain)]
    found += _alike(chains, "world", lambda turn: turn.interval.world)
    found += _alike(chains, "script", lambda turn: turn.interval.code.script.sha256)
    found += _same_steps(chains)
    found += _missing_ranks(records)
    found += _missing_ends(chains)
    found += _started_again(chains)
    found += _shared_keys(records)
    return found


def _chain(chain: Sequence[RankInterval]) -> Iterator[Finding]:
    by_sequence: dict[int, list[RankInterval]] = {}
    for turn in chain:
        by_sequence.setdefault(turn.interval.sequence, []).append(turn)
    for sequence, (first, *others) in by_sequence.items():
        if others:
            text = (
                f"it signed {len(others) + 1} different statements as number {sequence} of its "
                "chain"
            )
            yield blame(Fault.TWO_STATEMENTS, text, first, against=others)
    if chain[0].interval.sequence != 0:
        yield _gap(chain[0], 0, chain[0].interval.sequence)
    elif chain[0].interval.first_step and not chain[0].interval.checkpoints_in:
        text = (
            f"{chain[0].where} is the first one, and names no checkpoint that it began from: no "
            "record says what the steps before were"
        )
        yield blame(Fault.GAP, text, chain[0])
    for before, after in pairwise(sorted(by_sequence)):
        last, following = by_sequence[before], by_sequence[after]
        if after != before + 1:
            yield _gap(following[0], before + 1, after, last[0])
            continue
        digests = {one.digest: one for one in last}
        known = last[:MAX_AGAINST]
        for turn in following:
            yield from _continued(digests, known, turn)


def _continued(
    last: dict[str, RankInterval], known: list[RankInterval], turn: RankInterval
) -> Iterator[Finding]:
    """Checks that `turn` continues one of `last`, the statements before it by their digests.

    There is one such statement, unless the rank signed several.
    """
    before = last.get(turn.interval.previous or "")
    if before is None:
        text = (
            f"{turn.where} continues a statement {str(turn.interval.previous)[:12]}, and the one "
            "before it here is another: one of them was exchanged"
        )
        yield blame(Fault.BROKEN_CHAIN, text, turn, against=known)
        return
    if before.interval.final:
        text = f"{turn.where} follows a final statement"
        yield blame(Fault.BROKEN_CHAIN, text, turn, against=known)
    ended, begins = before.interval.end_step, turn.interval.first_step
    if begins > ended or (begins < ended and not turn.went_back):
        text = f"{turn.where} begins at step {begins}, and the statement before it ends at {ended}"
        yield blame(Fault.GAP, text, turn, against=known)


def _gap(after: RankInterval, first: int, end: int, *before: RankInterval) -> Finding:
    which = f"statement {first} is" if end == first + 1 else f"statements {first} to {end - 1} are"
    text = f"of {after.party}, {which} missing: skipped, or removed from the folder and the log"
    return blame(Fault.GAP, text, after, against=before)


def _alike(
    chains: dict[int, list[RankInterval]], what: str, said: Callable[[RankInterval], object]
) -> Iterator[Finding]:
    """A rank's statements must all say the same, and so must all ranks."""
    for chain in chains.values():
        for before, after in pairwise(chain):
            if said(before) != said(after):
                text = f"{after.where} names another {what} than its statement before"
                yield blame(Fault.DISAGREEMENT, text, after, against=[before])
    clash = clash_of((chain[0], said(chain[0])) for chain in chains.values())
    if clash is not None:
        others = listed(clash.sides.against)
        text = f"{clash.one.where} names another {what} than {others}"
        yield clash.finding(Fault.DISAGREEMENT, text)


def _same_steps(chains: dict[int, list[RankInterval]]) -> Iterator[Finding]:
    """All ranks of a run begin at the same step, and end at the same step."""
    firsts, lasts = ([chain[at] for chain in chains.values()] for at in (0, -1))
    clash = clash_of((turn, turn.interval.first_step) for turn in firsts)
    if clash is not None:
        yield clash.finding(
            Fault.GAP,
            f"{clash.one.where} is the first one of its chain, and {clash.other.where} of another: "
            "ranks of a run begin at the same step",
        )
    clash = clash_of((turn, turn.interval.end_step) for turn in lasts if turn.interval.final)
    if clash is not None:
        yield clash.finding(
            Fault.DISAGREEMENT,
            f"{clash.one.where} is final, and so is {clash.other.where}: ranks of a run end at the "
            "same step",
        )


def _missing_ranks(records: Records) -> Iterator[Finding]:
    chains, world = records.chains, records.world
    against = tuple(chain[0].digest for chain in islice(chains.values(), MAX_AGAINST))
    for absent in absent_ranks(chains, world)[:64]:
        text = f"of {absent} there is no statement at all, and the run has a world of {world}"
        yield Finding(Fault.GAP, (absent,), text, (), against)


def _missing_ends(chains: dict[int, list[RankInterval]]) -> Iterator[Finding]:
    """Finds chains without an end beside chains with one. If none ends, the run was cut off."""
    finals = (turn for chain in chains.values() for turn in chain if turn.interval.final)
    ended = list(islice(finals, MAX_AGAINST))
    for chain in chains.values():
        last = chain[-1]
        if ended and not any(turn.interval.final for turn in chain):
            text = (
                f"the chain of {last.party} ends after {last.where} without a final statement, and "
                "other ranks' chains go on to theirs"
            )
            yield blame(Fault.GAP, text, last, against=ended)


def _started_again(chains: dict[int, list[RankInterval]]) -> Iterator[Finding]:
    """Finds steps at which all ranks have new processes, and none read a checkpoint.

    The result of the steps before is lost then, and the chain would join two runs into one. If only
    one rank starts again, it may get its state from another rank.
    """
    starts: dict[int, dict[int, tuple[RankInterval, RankInterval]]] = {}
    for rank, chain in chains.items():
        for before, turn in pairwise(chain):
            step = turn.interval.first_step
            read = turn.interval.checkpoints_in
            if step and not read and _is_another_process(before, turn):
                starts.setdefault(step, {})[rank] = (before, turn)
    for step, turns in starts.items():
        if turns.keys() == chains.keys():
            text = (
                f"all ranks were started again at step {step}, and name no checkpoint that they "
                "went on from: no record says that the steps before are in the model"
            )
            again = [turn for _, turn in turns.values()]
            yield blame(Fault.GAP, text, *again, against=(before for before, _ in turns.values()))


def _is_another_process(before: RankInterval, after: RankInterval) -> bool:
    """Whether a new process made `after`. The same one would name its open groups again."""
    named = {(group.name, group.epoch) for group in after.interval.groups}
    return any(
        group.state == "open" and (group.name, group.epoch) not in named
        for group in before.interval.groups
    )


def _shared_keys(records: Records) -> Iterator[Finding]:
    holders: dict[str, dict[int, RankInterval]] = {}
    for turn in records.turns:
        key = records.keys[turn.worker.certificate]
        holders.setdefault(key, {}).setdefault(turn.rank, turn)
    for key, by_rank in holders.items():
        if len(by_rank) > 1:
            turns = [turn for _, turn in sorted(by_rank.items())]
            text = (
                f"{listed([turn.party for turn in turns])} sign with one key, {key[:12]}: one "
                "worker speaks for all of them"
            )
            yield blame(Fault.SHARED_KEY, text, *turns, also=["their authority"])
