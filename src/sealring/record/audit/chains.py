"""Each rank's chain of statements: nothing missing, nothing twice, each one naming the one before.

Also what all ranks must say alike: the size of the world, the script that ran, and from which step
to which. And each rank has a key of its own: else one worker counts as several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise

from sealring.record.audit.findings import MAX_AGAINST, Fault, Finding, absent_ranks, listed, split
from sealring.record.audit.records import Records, Turn


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


def _chain(chain: Sequence[Turn]) -> Iterator[Finding]:
    by_sequence: dict[int, list[Turn]] = {}
    for turn in chain:
        by_sequence.setdefault(turn.interval.sequence, []).append(turn)
    for turns in by_sequence.values():
        if len(turns) > 1:
            first, *others = turns
            yield Finding(
                Fault.TWO_STATEMENTS, (first.party,),
                f"it signed {len(turns)} different statements as number "
                f"{first.interval.sequence} of its chain",
                (first.digest,), tuple(one.digest for one in others),
            )  # fmt: skip
    if chain[0].interval.sequence != 0:
        yield _gap(chain[0], 0, chain[0].interval.sequence, None)
    elif chain[0].interval.first_step and not chain[0].interval.checkpoints_in:
        yield Finding(
            Fault.GAP, (chain[0].party,),
            f"{chain[0].where} is the first one, and names no checkpoint that it began from: no "
            "record says what the steps before were",
            (chain[0].digest,),
        )  # fmt: skip
    for before, after in pairwise(sorted(by_sequence)):
        last, following = by_sequence[before], by_sequence[after]
        if after != before + 1:
            yield _gap(following[0], before + 1, after, last[0])
            continue
        digests = {one.digest: one for one in last}
        known = tuple(digests)[:MAX_AGAINST]
        for turn in following:
            yield from _continued(digests, known, turn)


def _continued(last: dict[str, Turn], known: tuple[str, ...], turn: Turn) -> Iterator[Finding]:
    """`last` has the statements before it, by digest: one, but for a rank that signed several."""
    before = last.get(turn.interval.previous or "")
    if before is None:
        yield Finding(
            Fault.BROKEN_CHAIN, (turn.party,),
            f"{turn.where} continues a statement {str(turn.interval.previous)[:12]}, and the one "
            "before it here is another: one of them was exchanged",
            (turn.digest,), known,
        )  # fmt: skip
        return
    if before.interval.final:
        yield Finding(
            Fault.BROKEN_CHAIN, (turn.party,), f"{turn.where} follows a final statement",
            (turn.digest,), known,
        )  # fmt: skip
    ended, begins = before.interval.end_step, turn.interval.first_step
    if begins > ended or (begins < ended and not turn.went_back):
        yield Finding(
            Fault.GAP, (turn.party,),
            f"{turn.where} begins at step {begins}, and the statement before it ends at {ended}",
            (turn.digest,), known,
        )  # fmt: skip


def _gap(after: Turn, first: int, end: int, before: Turn | None) -> Finding:
    which = f"statement {first} is" if end == first + 1 else f"statements {first} to {end - 1} are"
    return Finding(
        Fault.GAP, (after.party,),
        f"of {after.party}, {which} missing: skipped, or removed from the folder and the log",
        (after.digest,), () if before is None else (before.digest,),
    )  # fmt: skip


def _alike(
    chains: dict[int, list[Turn]], what: str, said: Callable[[Turn], object]
) -> Iterator[Finding]:
    """What a rank says in all its statements alike, and all ranks alike."""
    for chain in chains.values():
        for before, after in pairwise(chain):
            if said(before) != said(after):
                yield Finding(
                    Fault.DISAGREEMENT, (after.party,),
                    f"{after.where} names another {what} than its statement before",
                    (after.digest,), (before.digest,),
                )  # fmt: skip
    firsts = {chain[0].party: chain[0] for chain in chains.values()}
    sides = split({party: said(turn) for party, turn in firsts.items()})
    if sides is not None:
        yield sides.finding(
            Fault.DISAGREEMENT,
            f"{firsts[sides.blamed[0]].where} names another {what} than {listed(sides.against)}",
            {party: turn.digest for party, turn in firsts.items()},
        )


def _same_steps(chains: dict[int, list[Turn]]) -> Iterator[Finding]:
    """All ranks of a run do the same steps: they begin at the same one, and end at the same one."""
    firsts = {chain[0].party: chain[0] for chain in chains.values()}
    sides = split({party: turn.interval.first_step for party, turn in firsts.items()})
    if sides is not None:
        one, other = firsts[sides.blamed[0]], firsts[sides.against[0]]
        yield sides.finding(
            Fault.GAP,
            f"{one.where} is the first one of its chain, and {other.where} of another: ranks of a "
            "run begin at the same step",
            {party: turn.digest for party, turn in firsts.items()},
        )
    lasts = {chain[-1].party: chain[-1] for chain in chains.values() if chain[-1].interval.final}
    sides = split({party: turn.interval.end_step for party, turn in lasts.items()})
    if sides is not None:
        one, other = lasts[sides.blamed[0]], lasts[sides.against[0]]
        yield sides.finding(
            Fault.DISAGREEMENT,
            f"{one.where} is final, and so is {other.where}: ranks of a run end at the same step",
            {party: turn.digest for party, turn in lasts.items()},
        )


def _missing_ranks(records: Records) -> Iterator[Finding]:
    chains, world = records.chains, records.world
    against = tuple(chain[0].digest for chain in islice(chains.values(), MAX_AGAINST))
    for absent in absent_ranks(chains, world)[:64]:
        yield Finding(
            Fault.GAP, (absent,),
            f"of {absent} there is no statement at all, and the run has a world of {world}",
            (), against,
        )  # fmt: skip


def _missing_ends(chains: dict[int, list[Turn]]) -> Iterator[Finding]:
    """A chain without an end beside one that has it. If none has, the whole run was cut off."""
    finals = (turn for chain in chains.values() for turn in chain if turn.interval.final)
    ended = tuple(turn.digest for turn in islice(finals, MAX_AGAINST))
    for chain in chains.values():
        last = chain[-1]
        if ended and not any(turn.interval.final for turn in chain):
            yield Finding(
                Fault.GAP, (last.party,),
                f"the chain of {last.party} ends after {last.where} without a final statement, and "
                "other ranks' chains go on to theirs",
                (last.digest,), ended,
            )  # fmt: skip


def _started_again(chains: dict[int, list[Turn]]) -> Iterator[Finding]:
    """All ranks have new processes at a step, and none of them read a checkpoint.

    What the steps before came to is lost then, and the chain would join two runs into one. A rank
    alone may get the state from another one.
    """
    starts: dict[int, dict[int, tuple[Turn, Turn]]] = {}
    for rank, chain in chains.items():
        for before, turn in pairwise(chain):
            step = turn.interval.first_step
            read = turn.interval.checkpoints_in
            if step and not read and _is_another_process(before, turn):
                starts.setdefault(step, {})[rank] = (before, turn)
    for step, turns in starts.items():
        if turns.keys() == chains.keys():
            yield Finding(
                Fault.GAP, tuple(turn.party for _, turn in turns.values()),
                f"all ranks were started again at step {step}, and name no checkpoint that they "
                "went on from: no record says that the steps before are in the model",
                tuple(turn.digest for _, turn in turns.values()),
                tuple(before.digest for before, _ in turns.values()),
            )  # fmt: skip


def _is_another_process(before: Turn, after: Turn) -> bool:
    """A process names each group that was open again: as open, closed or failed."""
    named = {(group.name, group.epoch) for group in after.interval.groups}
    return any(
        group.state == "open" and (group.name, group.epoch) not in named
        for group in before.interval.groups
    )


def _shared_keys(records: Records) -> Iterator[Finding]:
    holders: dict[str, dict[int, Turn]] = {}
    for turn in records.turns:
        key = records.keys[turn.worker.certificate]
        holders.setdefault(key, {}).setdefault(turn.rank, turn)
    for key, turns in holders.items():
        if len(turns) > 1:
            parties = tuple(turn.party for _, turn in sorted(turns.items()))
            yield Finding(
                Fault.SHARED_KEY, (*parties, "their authority"),
                f"{listed(parties)} sign with one key, {key[:12]}: one worker speaks for all of "
                "them",
                tuple(turn.digest for _, turn in sorted(turns.items())),
            )  # fmt: skip
