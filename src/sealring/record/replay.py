"""Spot checks: executes parts of a recorded run again, drawn at random, and compares the results.

A part begins at a checkpoint, or at the first step, and ends at the next checkpoint. The recorded
script is started with $_SEALRING_REPLAY, which says what to repeat. It does what it always does,
through `records.steps` and `records.replay.checkpoint` (docs/audits.md). The script is not
trusted: it is stopped after a time limit, and only the end of its output is kept.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import json
import math
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Final, Literal

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from sealring.core.identity.credentials import load_credentials
from sealring.errors import MalformedRun, SealringError, named
from sealring.formats.log.checkpoints import SignedCheckpoint
from sealring.formats.strict import read_as
from sealring.record.statements.forms import CheckpointRef, DataRange, Interval, Named
from sealring.record.statements.run_folder import RunFolder, open_run
from sealring.record.statements.signing import verify_statement

# ---- executing a script


_KEPT: Final = 2000
_BLOCK: Final = 1 << 16
_GRACE_SECONDS: Final = 60.0
"""The time that a launcher has to end its workers. It kills them after half of this."""


def execute(command: Sequence[str], environ: Mapping[str, str], timeout: float) -> tuple[bool, str]:
    """Runs a command. Returns whether it failed, and the end of its output."""
    # A `with` block would wait for the stream's end, and a child may never close the stream.
    process = subprocess.Popen(
        command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, bufsize=0,
    )  # fmt: skip
    assert process.stdout is not None
    tail = _Tail(process.stdout)
    try:
        failed = process.wait(timeout) != 0
    except subprocess.TimeoutExpired:
        return True, f"it took longer than {timeout:g} s"
    finally:
        _end(process)
    return failed, tail.text()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process: first by a signal that it can pass on to its children, then by SIGKILL."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class _Tail:
    """Reads all of a stream and keeps its end."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._kept = b""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self._stream:
            while block := self._stream.read(_BLOCK):
                self._kept = (self._kept + block)[-_KEPT:]

    def text(self) -> str:
        """The end of the output. Call it after the process has ended; a child may go on writing."""
        self._thread.join(1.0)
        return self._kept.decode("utf-8", "replace")


# ---- parts of a run, and their repetition


VARIABLE: Final = "_SEALRING_REPLAY"
_PURPOSE: Final = b"sealring-1 replay\0"
_AUTHORITIES: Final = "authorities.pem"


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """What a script must repeat: the value of $_SEALRING_REPLAY, as JSON."""

    folder: str
    """The folder for the records of the repetition."""
    authorities: str
    """A PEM file of the authorities whose workers' checkpoints are loaded."""
    job: str
    """The job of those workers."""
    checkpoint: str | None
    """NAME@VERSION to start from. None: from the beginning."""
    first_step: int
    end_step: int

    def encode(self) -> str:
        return json.dumps(asdict(self))


def requested(environ: Mapping[str, str]) -> ReplayRequest | None:
    text = environ.get(VARIABLE)
    return read_as(ReplayRequest, text, VARIABLE, "replay") if text else None


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a run between two checkpoints, as the run's records name them."""

    world: int
    script: Named
    start: CheckpointRef | None
    """None if the part starts where the run starts."""
    end: CheckpointRef

    @property
    def first_step(self) -> int:
        return 0 if self.start is None else self.start.step

    def overlaps(self, interval: Interval) -> bool:
        return interval.first_step < self.end.step and interval.end_step > self.first_step


Verdict = Literal["equal", "within", "different", "failed"]


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest difference between the numbers of two checkpoints."""

    size: float
    """Relative to the largest number of the same tensor. Infinite if it cannot be measured."""
    where: str
    """The name of the tensor or entry."""


@dataclass(frozen=True, slots=True)
class Repeated:
    """The checkpoint that a repetition saved, and whose workers signed it."""

    checkpoint: CheckpointRef
    authorities: Sequence[x509.Certificate]
    job: str


@dataclass(frozen=True, slots=True)
class Outcome:
    stretch: Stretch
    verdict: Verdict
    """`within`: the bits differ, but no number by more than the tolerance."""
    content: str | None
    """The digest of the content that the repetition saved. None if it saved none."""
    difference: Difference | None
    """The difference, if it was computed."""
    said: str
    """Why a repetition failed, or the end of its output."""


Compare = Callable[[CheckpointRef, Repeated], Difference]
"""Compares a recorded checkpoint with the one that a repetition saved."""

Recorded = Mapping[int, Sequence[Interval]]
"""Each rank's whole chain, as the run states it."""


def stretches(intervals: Iterable[Interval]) -> list[Stretch]:
    """All parts that can be repeated. `intervals` are those of a rank that saved, in order.

    The run cannot choose these parts. A checkpoint without the name of its content ends no part:
    the part goes on to the next one. After going back, a run's next part begins at the checkpoint
    that it read.
    """
    return _Parts(intervals).found


def unrepeatable(intervals: Iterable[Interval]) -> list[CheckpointRef]:
    """The rank's checkpoints that no part leads to."""
    return _Parts(intervals).left


class _Parts:
    """A rank's chain, cut at its checkpoints into parts. `left` are those that no part leads to."""

    def __init__(self, intervals: Iterable[Interval]) -> None:
        self.found: list[Stretch] = []
        self.left: list[CheckpointRef] = []
        self._last: CheckpointRef | None = None
        """The checkpoint that the run goes on from. None: it begins here."""
        self._before: CheckpointRef | None = None
        """The checkpoint at which the part that led to `_last` began."""
        self._led = False
        contents: dict[str, str] = {}
        order, waiting = itertools.count(), list[tuple[int, int, CheckpointRef]]()
        for number, interval in enumerate(intervals):
            begun = [
                replace(one, content=one.content or contents.get(one.sha256))
                for one in interval.checkpoints_in
                if number == 0 or one.step == interval.first_step
            ]
            if begun:
                self.left += [one for *_, one in sorted(waiting)]
                waiting, self._last, self._led = [], begun[-1], False
            for end in (one for one in interval.checkpoints_out if one.step):
                if end.content is None:
                    heapq.heappush(waiting, (end.step, next(order), end))
                    continue
                contents[end.sha256] = end.content
                self._add(interval, end)
                while waiting and waiting[0][0] <= end.step:
                    heapq.heappop(waiting)
        self.left += [one for *_, one in sorted(waiting)]

    def _add(self, interval: Interval, end: CheckpointRef) -> None:
        last = self._last
        if last is None or end.step > last.step:
            self._before, self._led = last, True
        elif last.content == end.content:
            return  # the same checkpoint, saved again
        elif end.step < last.step or not self._led:
            self.left.append(end)
            return
        self._last = end
        if self._before is not None and self._before.content is None:
            self.left.append(end)
        else:
            self.found.append(Stretch(interval.world, interval.code.script, self._before, end))


def seed_of(checkpoint: SignedCheckpoint, drawn: bytes) -> bytes:
    """A seed from the cosignatures on a run's last checkpoint and the auditor's random number.

    The run could know neither. Cosignatures alone are not enough: the log's owner can ask its
    witnesses again and again, until the chosen parts suit it.
    """
    known = {(witness.name, witness.key_id) for witness in checkpoint.cosigned}
    lines = sorted(one.encode() for one in checkpoint.note.lines if (one.name, one.key_id) in known)
    signed = checkpoint.checkpoint.encode() + "".join(lines)
    return hashlib.sha256(_PURPOSE + drawn + signed.encode()).digest()


def draw(found: Sequence[Stretch], count: int, seed: bytes) -> list[Stretch]:
    """Draws `count` parts, in the order of the run. The same seed draws the same parts."""

    def lot(index: int) -> bytes:
        return hashlib.sha256(_PURPOSE + seed + index.to_bytes(8, "big")).digest()

    drawn = sorted(sorted(range(len(found)), key=lot)[:count])
    return [found[index] for index in drawn]


def replay(
    stretch: Stretch,
    run: RunFolder,
    recorded: Recorded,
    authorities: Sequence[x509.Certificate],
    work: Path,
    *,
    arguments: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    timeout: float = 600.0,
    compare: Compare | None = None,
    tolerance: float = 0.0,
) -> Outcome:
    """Executes a part again, on this machine, with as many workers. They write to `work`.

    `arguments` are the script's. Give it a copy of the vault, because it saves its checkpoints
    there.
    """

    def failed(said: str, content: str | None = None) -> Outcome:
        return Outcome(stretch, "failed", content, None, said)

    try:
        secret = secrets.token_hex(32)
        command = [*_prepared(stretch, run, authorities, work), *arguments]
        asked = _request(stretch, run, work)
        inherited = os.environ if environ is None else environ
        kept = {name: value for name, value in inherited.items() if not _is_of_identity(name)}
        environment = {**kept, "SEALRING_SECRET": secret, VARIABLE: asked.encode()}
        broken, said = execute(command, environment, timeout)
        if broken:
            return failed(said)
        again = _own_records(work / "run", stretch, secret)
        if again is None:
            return failed(said or "it saved no checkpoint at the last step")
        repeated, intervals = again
        content = repeated.checkpoint.content
        if problem := _of_something_else(stretch, recorded, intervals):
            return failed(problem, content)
        # Also if the bits are equal: this checks that the recorded manifest has this content.
        difference = None if compare is None else compare(stretch.end, repeated)
    except SealringError as problem:
        return failed(f"{named(problem)}: {problem}")
    if content == stretch.end.content:
        return Outcome(stretch, "equal", content, None, "")
    near = difference is not None and difference.size <= tolerance and math.isfinite(tolerance)
    return Outcome(stretch, "within" if near else "different", content, difference, "")


def _prepared(
    stretch: Stretch, run: RunFolder, authorities: Sequence[x509.Certificate], work: Path
) -> list[str]:
    """Copies the recorded script, and returns the command that starts it."""
    script = run.evidence(stretch.script.sha256)
    if script is None:
        raise MalformedRun(f"{run.path} has no copy of {stretch.script.name}, which it recorded")
    work.mkdir(parents=True)
    path = work / "script.py"  # its recorded name cannot be trusted
    path.write_bytes(script)
    pem = b"".join(one.public_bytes(Encoding.PEM) for one in authorities)
    (work / _AUTHORITIES).write_bytes(pem)
    return [sys.executable, "-m", "sealring.cli", "run", "-n", str(stretch.world), str(path)]


def _request(stretch: Stretch, run: RunFolder, work: Path) -> ReplayRequest:
    return ReplayRequest(
        str(work / "run"),
        str(work / _AUTHORITIES),
        run.head.job,
        None if stretch.start is None else stretch.start.name,
        stretch.first_step,
        stretch.end.step,
    )


def _is_of_identity(name: str) -> bool:
    """Settings that the repetition must not inherit: it has its own identity and job."""
    return name.startswith(("SEALRING_", "_SEALRING_", "PET_", "TORCHELASTIC_")) or name in (
        "RANK",
        "WORLD_SIZE",
    )


def _own_records(
    folder: Path, stretch: Stretch, secret: str
) -> tuple[Repeated, dict[int, list[Interval]]] | None:
    """The checkpoint that the repetition saved at the end, and its statements by rank."""
    own = load_credentials(0, stretch.world, {"SEALRING_SECRET": secret})
    found: CheckpointRef | None = None
    intervals: dict[int, list[Interval]] = {}
    for _, envelope in open_run(folder).statements():
        statement = verify_statement(envelope, own.authorities)
        if isinstance(statement.content, Interval) and statement.worker is not None:
            intervals.setdefault(statement.worker.rank, []).append(statement.content)
            for saved in statement.content.checkpoints_out:
                done = found is not None and found.content == stretch.end.content
                if saved.step == stretch.end.step and not done:
                    found = (
                        saved  # of several at this step, the one that was asked for, or the last
                    )
    return None if found is None else (Repeated(found, own.authorities, own.job), intervals)


def _of_something_else(
    stretch: Stretch, recorded: Recorded, repeated: Mapping[int, Sequence[Interval]]
) -> str:
    """Says what the repetition read that the records do not name. Empty if it read the same.

    The copy of the vault comes from strangers too: with another checkpoint or dataset in it, equal
    bits would show nothing.
    """
    begun = set() if stretch.start is None else {stretch.start.content}
    for rank in range(stretch.world):
        chain, done = recorded.get(rank, ()), repeated.get(rank, ())
        read = {one.content for interval in done for one in interval.checkpoints_in}
        if read != begun:
            name = "no checkpoint" if stretch.start is None else stretch.start.name
            return f"rank {rank} began from another content than the run, which began from {name}"
        known = _places(one for one in chain if stretch.overlaps(one))
        used = _places(done)
        named = {data.sha256 for interval in chain for data in interval.data}
        opened = {data.sha256 for interval in done for data in interval.data}
        alike = bool(known) == bool(used) and all(_covered(one, known) for one in used)
        if not alike or not opened <= named:
            return f"rank {rank} read other data than the run states for these steps"
    return ""


_Place = tuple[tuple[object, ...], int, int]


def _places(intervals: Iterable[Interval]) -> list[_Place]:
    return [_place(data) for one in intervals for data in one.data if data.first < data.end]


def _place(data: DataRange) -> _Place:
    """Return what is read and which share of it, in a form that does not depend on where the range
    begins. The range follows."""
    share = data.share
    part = None if share is None else (
        share.period, (data.first + share.offset) % share.period, share.length,
    )  # fmt: skip
    return (data.sha256, data.epoch, data.seed, part), data.first, data.end


def _covered(one: _Place, known: Sequence[_Place]) -> bool:
    what, at, end = one
    for other, first, last in sorted(known, key=lambda place: place[1]):
        if other == what and first <= at < last:
            at = last
    return at >= end
