"""Checks that checkpoints, datasets and files are named alike by their makers and their users."""

from __future__ import annotations

from collections.abc import Iterator

from sealring.record.audit.findings import MAX_AGAINST, Fault, Finding, Votes, blame, clash_of
from sealring.record.audit.records import Made, RankInterval, Records
from sealring.record.statements.forms import CheckpointRef, Named

_DISK = ("the disk",)
"""Named as a further party: the disk can hold another file in the place of the wanted one."""


def check_artefacts(records: Records) -> list[Finding]:
    return [
        *_written_alike(records),
        *_same_content(records),
        *_in_its_steps(records),
        *_no_dataset(records),
        *_read_as_written(records),
        *_read_at_its_step(records),
        *_starts(records),
        *_datasets(records),
        *_twice_made(records),
    ]


def _out(records: Records) -> Iterator[tuple[RankInterval, CheckpointRef]]:
    return ((turn, one) for turn in records.turns for one in turn.interval.checkpoints_out)


def _in(records: Records) -> Iterator[tuple[RankInterval, CheckpointRef]]:
    return ((turn, one) for turn in records.turns for one in turn.interval.checkpoints_in)


def _written_alike(records: Records) -> Iterator[Finding]:
    """All ranks that wrote a checkpoint of the same name and step name the same manifest."""
    votes: Votes[RankInterval, str] = Votes()
    for turn, one in _out(records):
        votes.add((one.name, one.step), turn, one.sha256)
    for (name, _), clash in votes.clashes():
        yield clash.finding(
            Fault.CHECKPOINT,
            f"{clash.one.where} wrote {name} with the manifest {clash.says[:12]}, and "
            f"{clash.other.party} names {clash.differs[:12]}",
        )


def _same_content(records: Records) -> Iterator[Finding]:
    """All ranks that wrote or read a manifest name the same content, if they name any."""
    votes: Votes[RankInterval, str] = Votes()
    for turn in records.turns:
        for one in (*turn.interval.checkpoints_out, *turn.interval.checkpoints_in):
            if one.content is not None:
                first, content = votes.add(one.sha256, turn, one.content)
                if content != one.content:
                    text = f"{turn.where} names two contents of {one.name}"
                    yield blame(Fault.CHECKPOINT, text, turn, against=[first])
    for sha256, clash in votes.clashes():
        yield clash.finding(
            Fault.CHECKPOINT,
            f"{clash.one.where} names the content {clash.says[:12]} of the manifest "
            f"{sha256[:12]}, and {clash.other.party} {clash.differs[:12]}",
        )


def _in_its_steps(records: Records) -> Iterator[Finding]:
    """A checkpoint is written in the interval of its step, and is read later.

    One step after the interval is allowed: a script may save in a step that fails.
    """
    written: dict[str, tuple[int, RankInterval]] = {}
    for turn, one in _out(records):
        if not turn.interval.first_step <= one.step <= turn.interval.end_step + 1:
            text = f"{turn.where} wrote {one.name}, which is of step {one.step}"
            yield blame(Fault.CHECKPOINT, text, turn)
        known = written.get(one.sha256)
        if known is None or one.step < known[0]:
            written[one.sha256] = (one.step, turn)
    for chain in records.chains.values():
        reached = 0
        for turn in chain:
            reached = max(reached, turn.interval.end_step)
            for one in turn.interval.checkpoints_in:
                step, writer = written.get(one.sha256, (0, turn))
                if reached + 1 < step:
                    text = (
                        f"{turn.where} read {one.name}, which {writer.where} says that it wrote at "
                        f"step {step}, later"
                    )
                    yield blame(Fault.CHECKPOINT, text, turn, against=[writer], also=[writer.party])


def _no_dataset(records: Records) -> Iterator[Finding]:
    """No checkpoint that ranks wrote is read as a dataset.

    Otherwise a rank could pass off any data as something that the run made itself.
    """
    written: dict[str, dict[str, RankInterval]] = {}
    for turn, one in _out(records):
        written.setdefault(one.sha256, {}).setdefault(turn.party, turn)
    readers: dict[str, dict[str, RankInterval]] = {}
    for turn in records.turns:
        for data in turn.interval.data:
            if data.sha256 in written:
                readers.setdefault(data.sha256, {}).setdefault(turn.party, turn)
    for sha256, read in readers.items():
        wrote = written[sha256]
        text = f"{sha256[:12]} was read as a dataset, and written as a checkpoint"
        clash = clash_of((turn, turn.party in wrote) for turn in {**read, **wrote}.values())
        if clash is not None:
            yield clash.finding(Fault.CHECKPOINT, text)
        else:  # the same ranks say both
            turns = {turn.digest: turn for turn in (*read.values(), *wrote.values())}
            yield blame(Fault.CHECKPOINT, text, *turns.values())


def _used(records: Records) -> Iterator[tuple[RankInterval | Made, str, CheckpointRef | Named]]:
    """Each use of an artefact: the statement, the words for it, and the reference."""
    for turn, one in _in(records):
        yield turn, f"{turn.where} read", one
    for made in records.made:
        for source in made.content.inputs:
            yield made, f"{made.where} used", source


def _read_as_written(records: Records) -> Iterator[Finding]:
    """A checkpoint that is read under a name is the one that this run wrote under that name."""
    written: dict[str, list[tuple[RankInterval, CheckpointRef]]] = {}
    known: set[tuple[str, str]] = set()
    for turn, one in _out(records):
        known.add((one.name, one.sha256))
        written.setdefault(one.name, []).append((turn, one))
    for user, who, ref in _used(records):
        writers = written.get(ref.name)
        if writers and (ref.name, ref.sha256) not in known:
            yield blame(
                Fault.CHECKPOINT,
                f"{who} {ref.name} with the manifest {ref.sha256[:12]}, and "
                f"{writers[0][0].party} wrote it with {writers[0][1].sha256[:12]}",
                user, against=(writer for writer, _ in writers), also=_DISK,
            )  # fmt: skip


def _read_at_its_step(records: Records) -> Iterator[Finding]:
    """A rank that goes on from a checkpoint of this run begins at the checkpoint's step."""
    steps: dict[str, set[int]] = {}
    writers = _writers(records)
    for _, one in _out(records):
        steps.setdefault(one.sha256, set()).add(one.step)
    for turn, one in _in(records):
        known = steps.get(one.sha256)
        if known and one.step == turn.interval.first_step and one.step not in known:
            yield blame(
                Fault.CHECKPOINT,
                f"{turn.where} goes on from {one.name}, which was written at step {min(known)}: "
                "an older or newer checkpoint was put in its place",
                turn, against=writers[one.sha256], also=_DISK,
            )  # fmt: skip


def _starts(records: Records) -> Iterator[Finding]:
    """A run begins at the step of the checkpoint that it read first, the same for all ranks."""
    votes: Votes[RankInterval, str] = Votes()
    writers = _writers(records)
    names: dict[str, str] = {}
    for turn in records.turns:
        for one in turn.interval.checkpoints_in[:1] if turn.interval.sequence == 0 else ():
            votes.add("start", turn, one.sha256)
            names.setdefault(one.sha256, one.name)
            if one.step != turn.interval.first_step:
                yield blame(
                    Fault.CHECKPOINT,
                    f"{turn.where} read {one.name}, which is of step {one.step}: an older or newer "
                    "checkpoint was put in its place, or steps were left out",
                    turn, against=writers.get(one.sha256, ()), also=_DISK,
                )  # fmt: skip
    for _, clash in votes.clashes():
        yield clash.finding(
            Fault.CHECKPOINT,
            f"{clash.one.where} read {names[clash.says]} ({clash.says[:12]}), and "
            f"{clash.other.party} {names[clash.differs]} ({clash.differs[:12]})",
        )


def _writers(records: Records) -> dict[str, list[RankInterval]]:
    """For each manifest, the statements of its writers, at most as many as a finding names."""
    found: dict[str, dict[str, RankInterval]] = {}
    for turn, made in _out(records):
        turns = found.setdefault(made.sha256, {})
        if len(turns) < MAX_AGAINST:
            turns[turn.digest] = turn
    return {sha256: list(turns.values()) for sha256, turns in found.items()}


def _datasets(records: Records) -> Iterator[Finding]:
    """Check that what was read under the name of a stage's output is that output."""
    made: dict[str, list[Made]] = {}
    known: set[tuple[str, str]] = set()
    for one in records.made:
        for output in one.content.outputs:
            made.setdefault(output.name, []).append(one)
            known.add((output.name, output.sha256))
    told: set[tuple[str, str]] = set()
    used: list[tuple[RankInterval | Made, str, str]] = [
        (turn, data.name, data.sha256) for turn in records.turns for data in turn.interval.data
    ]
    used += [
        (one, named.name, named.sha256) for one in records.made for named in one.content.inputs
    ]
    for user, name, sha256 in used:
        makers = made.get(name)
        if makers and (name, sha256) not in known and (user.party, name) not in told:
            told.add((user.party, name))
            yield blame(
                Fault.TRANSFORMATION,
                f"{user.where} used {name} with the digest {sha256[:12]}, and {makers[0].where} "
                "made something else under that name",
                user, against=makers, also=_DISK,
            )  # fmt: skip


def _twice_made(records: Records) -> Iterator[Finding]:
    """Two statements about how a thing was made must name the same inputs and code."""
    makers: dict[str, Made] = {}
    for one in records.made:
        for output in one.content.outputs:
            first = makers.setdefault(output.sha256, one)
            if _how(first) != _how(one):
                yield blame(
                    Fault.TRANSFORMATION,
                    f"{one.where} and {first.where} both say that they made {output.name}, from "
                    "different inputs or by different code",
                    one, against=[first], also=[first.party],
                )  # fmt: skip


def _how(made: Made) -> tuple[list[Named], list[Named]]:
    return made.content.inputs, made.content.code
