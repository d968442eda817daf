"""Checkpoints, datasets and files: their makers and their users name each of them alike."""

from __future__ import annotations

from collections.abc import Iterator

from sealring.record.audit.findings import MAX_AGAINST, Fault, Finding, split
from sealring.record.audit.records import Made, Records, Turn
from sealring.record.statements.forms import CheckpointRef, Named


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


def _written_alike(records: Records) -> Iterator[Finding]:
    """All ranks that wrote a checkpoint of one name and step name the same manifest."""
    said: dict[tuple[str, int], dict[str, tuple[Turn, CheckpointRef]]] = {}
    for turn in records.turns:
        for one in turn.interval.checkpoints_out:
            said.setdefault((one.name, one.step), {}).setdefault(turn.party, (turn, one))
    for (name, _), named in said.items():
        sides = split({party: one.sha256 for party, (_, one) in named.items()})
        if sides is None:
            continue
        turn, one = named[sides.blamed[0]]
        yield sides.finding(
            Fault.CHECKPOINT,
            f"{turn.where} wrote {name} with the manifest {one.sha256[:12]}, and "
            f"{sides.against[0]} names {named[sides.against[0]][1].sha256[:12]}",
            {party: said_by.digest for party, (said_by, _) in named.items()},
        )


def _same_content(records: Records) -> Iterator[Finding]:
    """All who wrote or read one manifest name the same content, if they name one."""
    said: dict[str, dict[str, tuple[Turn, str]]] = {}
    for turn in records.turns:
        for one in (*turn.interval.checkpoints_out, *turn.interval.checkpoints_in):
            if one.content is not None:
                named = said.setdefault(one.sha256, {})
                first, content = named.setdefault(turn.party, (turn, one.content))
                if content != one.content:
                    text = f"{turn.where} names two contents of {one.name}"
                    yield Finding(
                        Fault.CHECKPOINT, (turn.party,), text, (turn.digest,), (first.digest,)
                    )
    for sha256, named in said.items():
        sides = split({party: content for party, (_, content) in named.items()})
        if sides is not None:
            (blamed, mine), (_, other) = named[sides.blamed[0]], named[sides.against[0]]
            yield sides.finding(
                Fault.CHECKPOINT,
                f"{blamed.where} names the content {mine[:12]} of the manifest {sha256[:12]}, and "
                f"{sides.against[0]} {other[:12]}",
                {party: turn.digest for party, (turn, _) in named.items()},
            )


def _in_its_steps(records: Records) -> Iterator[Finding]:
    """A checkpoint is written in the steps that it is of, and is read after them.

    One step more, at the end: a script may save in a step that fails.
    """
    written: dict[str, tuple[int, Turn]] = {}
    for turn in records.turns:
        for one in turn.interval.checkpoints_out:
            if not turn.interval.first_step <= one.step <= turn.interval.end_step + 1:
                text = f"{turn.where} wrote {one.name}, which is of step {one.step}"
                yield Finding(Fault.CHECKPOINT, (turn.party,), text, (turn.digest,))
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
                    yield Finding(
                        Fault.CHECKPOINT, tuple(dict.fromkeys((turn.party, writer.party))),
                        f"{turn.where} read {one.name}, which {writer.where} says that it wrote "
                        f"at step {step}, later",
                        (turn.digest,), (writer.digest,),
                    )  # fmt: skip


def _no_dataset(records: Records) -> Iterator[Finding]:
    """What ranks read as a dataset is none of the checkpoints that ranks wrote.

    Else a rank could pass off any data as something that the run made itself.
    """
    written: dict[str, dict[str, Turn]] = {}
    for turn in records.turns:
        for one in turn.interval.checkpoints_out:
            written.setdefault(one.sha256, {}).setdefault(turn.party, turn)
    readers: dict[str, dict[str, Turn]] = {}
    for turn in records.turns:
        for data in turn.interval.data:
            if data.sha256 in written:
                readers.setdefault(data.sha256, {}).setdefault(turn.party, turn)
    for sha256, read in readers.items():
        turns = {**read, **written[sha256]}
        sides = split({party: party in written[sha256] for party in turns})
        text = f"{sha256[:12]} was read as a dataset, and written as a checkpoint"
        if sides is None:  # the same ranks say both
            digests = [one.digest for one in (*read.values(), *written[sha256].values())]
            yield Finding(Fault.CHECKPOINT, tuple(turns), text, tuple(dict.fromkeys(digests)))
        else:
            digest = {party: turn.digest for party, turn in turns.items()}
            yield sides.finding(Fault.CHECKPOINT, text, digest)


def _read_as_written(records: Records) -> Iterator[Finding]:
    """What is read under the name of a checkpoint of this run is what was written under it."""
    written: dict[str, list[tuple[Turn, CheckpointRef]]] = {}
    known: set[tuple[str, str]] = set()
    for turn in records.turns:
        for one in turn.interval.checkpoints_out:
            known.add((one.name, one.sha256))
            written.setdefault(one.name, []).append((turn, one))
    used: list[tuple[str, str, str, CheckpointRef | Named]] = [
        (turn.party, f"{turn.where} read", turn.digest, one)
        for turn in records.turns
        for one in turn.interval.checkpoints_in
    ]
    used += [
        (made.signer, f"{made.content.name} used", made.digest, one)
        for made in records.made
        for one in made.content.inputs
    ]
    for party, who, digest, ref in used:
        writers = written.get(ref.name)
        if writers and (ref.name, ref.sha256) not in known:
            yield Finding(
                Fault.CHECKPOINT, (party, "the disk"),
                f"{who} {ref.name} with the manifest {ref.sha256[:12]}, and "
                f"{writers[0][0].party} wrote it with {writers[0][1].sha256[:12]}",
                (digest,), tuple(writer.digest for writer, _ in writers[:MAX_AGAINST]),
            )  # fmt: skip


def _read_at_its_step(records: Records) -> Iterator[Finding]:
    """A rank that goes on from a checkpoint of this run does so at the step that it was of."""
    steps: dict[str, set[int]] = {}
    writers = _writers(records)
    for turn in records.turns:
        for one in turn.interval.checkpoints_out:
            steps.setdefault(one.sha256, set()).add(one.step)
    for turn in records.turns:
        for one in turn.interval.checkpoints_in:
            known = steps.get(one.sha256)
            if known and one.step == turn.interval.first_step and one.step not in known:
                yield Finding(
                    Fault.CHECKPOINT, (turn.party, "the disk"),
                    f"{turn.where} goes on from {one.name}, which was written at step "
                    f"{min(known)}: an older or newer checkpoint was put in its place",
                    (turn.digest,), writers.get(one.sha256, ()),
                )  # fmt: skip


def _starts(records: Records) -> Iterator[Finding]:
    """A run goes on from the checkpoint that it read first, and all ranks read the same one."""
    reads: dict[int, dict[str, tuple[Turn, CheckpointRef]]] = {}
    writers = _writers(records)
    for turn in records.turns:
        for one in turn.interval.checkpoints_in[:1] if turn.interval.sequence == 0 else ():
            reads.setdefault(turn.interval.sequence, {}).setdefault(turn.party, (turn, one))
            if one.step != turn.interval.first_step:
                yield Finding(
                    Fault.CHECKPOINT, (turn.party, "the disk"),
                    f"{turn.where} read {one.name}, which is of step {one.step}: an older or newer "
                    "checkpoint was put in its place, or steps were left out",
                    (turn.digest,), writers.get(one.sha256, ()),
                )  # fmt: skip
    for named in reads.values():
        sides = split({party: one.sha256 for party, (_, one) in named.items()})
        if sides is not None:
            turn, one = named[sides.blamed[0]]
            other = named[sides.against[0]][1]
            yield sides.finding(
                Fault.CHECKPOINT,
                f"{turn.where} read {one.name} ({one.sha256[:12]}), and {sides.against[0]} "
                f"{other.name} ({other.sha256[:12]})",
                {party: read_by.digest for party, (read_by, _) in named.items()},
            )


def _writers(records: Records) -> dict[str, tuple[str, ...]]:
    """Of each manifest the statements that say who wrote it, not more than a finding names."""
    found: dict[str, dict[str, None]] = {}
    for turn in records.turns:
        for made in turn.interval.checkpoints_out:
            digests = found.setdefault(made.sha256, {})
            if len(digests) < MAX_AGAINST:
                digests[turn.digest] = None
    return {sha256: tuple(digests) for sha256, digests in found.items()}


def _datasets(records: Records) -> Iterator[Finding]:
    """What was read under the name of a stage's output is that output."""
    made: dict[str, list[Made]] = {}
    known: set[tuple[str, str]] = set()
    for one in records.made:
        for output in one.content.outputs:
            made.setdefault(output.name, []).append(one)
            known.add((output.name, output.sha256))
    told: set[tuple[str, str]] = set()
    used = [
        (turn.party, turn.where, turn.digest, data.name, data.sha256)
        for turn in records.turns
        for data in turn.interval.data
    ] + [
        (one.signer, one.content.name, one.digest, named.name, named.sha256)
        for one in records.made
        for named in one.content.inputs
    ]
    for party, where, digest, name, sha256 in used:
        makers = made.get(name)
        if makers and (name, sha256) not in known and (party, name) not in told:
            told.add((party, name))
            yield Finding(
                Fault.TRANSFORMATION, (party, "the disk"),
                f"{where} used {name} with the digest {sha256[:12]}, and "
                f"{makers[0].content.name} made something else under that name",
                (digest,), tuple(maker.digest for maker in makers[:MAX_AGAINST]),
            )  # fmt: skip


def _twice_made(records: Records) -> Iterator[Finding]:
    """Two accounts of how one thing was made, of different inputs or code."""
    makers: dict[str, Made] = {}
    for one in records.made:
        for output in one.content.outputs:
            first = makers.setdefault(output.sha256, one)
            same = (first.content.inputs, first.content.code) == (
                one.content.inputs,
                one.content.code,
            )
            if not same:
                yield Finding(
                    Fault.TRANSFORMATION, tuple(dict.fromkeys((one.signer, first.signer))),
                    f"{one.content.name} and {first.content.name} both say that they made "
                    f"{output.name}, from different inputs or by different code",
                    (one.digest,), (first.digest,),
                )  # fmt: skip
