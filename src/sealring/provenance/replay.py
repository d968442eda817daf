"""Spot checks: parts of a recorded run, drawn at random, are executed again and compared.

A part begins at a checkpoint, or at the first step, and ends at the next checkpoint. The recorded
script is started with $SEALRING_REPLAY, which says what to repeat; it does what it always does,
with `records.steps` and `records.replay.checkpoint` (docs/provenance.md).
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from sealring.errors import ConfigurationError, MalformedRun
from sealring.identity.credentials import load_credentials
from sealring.provenance.checkpoints import SignedCheckpoint
from sealring.provenance.digests import Named
from sealring.provenance.intervals import CheckpointRef, Interval
from sealring.provenance.runs import RunFolder, open_run
from sealring.provenance.statements import verify_statement
from sealring.strict import strictly

VARIABLE: Final = "SEALRING_REPLAY"
_PURPOSE: Final = b"sealring-1 replay\0"


@dataclass(frozen=True, slots=True)
class Request:
    """What a script is asked to repeat: the value of $SEALRING_REPLAY, as JSON."""

    folder: str
    """Where the records of the repetition go."""
    authorities: str
    """A PEM file: whose workers' checkpoints are loaded."""
    job: str
    """Of which job they are."""
    checkpoint: str | None
    """NAME@VERSION to start from; None: from the beginning."""
    first_step: int
    end_step: int

    def encode(self) -> str:
        return json.dumps(asdict(self))


def requested(environ: Mapping[str, str]) -> Request | None:
    text = environ.get(VARIABLE)
    if not text:
        return None
    try:
        found: Request = strictly(Request, json.loads(text), VARIABLE, "replay")
    except ValueError:
        raise ConfigurationError(f"{VARIABLE} is not JSON") from None
    return found


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a run between two checkpoints, as its records name them."""

    world: int
    script: Named
    start: CheckpointRef | None
    """None: the run begins here."""
    end: CheckpointRef

    @property
    def first_step(self) -> int:
        return 0 if self.start is None else self.start.step


Verdict = Literal["equal", "within", "different", "failed"]


@dataclass(frozen=True, slots=True)
class Outcome:
    stretch: Stretch
    verdict: Verdict
    """`within`: other bits, and no number differs by more than the tolerance."""
    content: str | None
    """The digest of the content that the repetition came to; None if it came to none."""
    difference: float | None
    """The largest between two numbers, where it was computed."""
    said: str
    """The end of what a repetition that failed has printed."""


Compare = Callable[[CheckpointRef, CheckpointRef], float]
"""The largest difference between the numbers of two checkpoints."""


def stretches(intervals: Iterable[Interval]) -> list[Stretch]:
    """All parts that can be repeated. `intervals` are those of the rank that saved, in order."""
    found: list[Stretch] = []
    start: CheckpointRef | None = None
    began = False
    for interval in intervals:
        if not began:
            start = interval.checkpoints_in[-1] if interval.checkpoints_in else None
            began = True
        for end in interval.checkpoints_out:
            known = end.content is not None and (start is None or start.content is not None)
            if known and end.step > (0 if start is None else start.step):
                found.append(Stretch(interval.world, interval.code.script, start, end))
            start = end
    return found


def seed_of(checkpoint: SignedCheckpoint) -> bytes:
    """From the cosignatures on a run's last checkpoint: the run could not know them.

    Without witnesses it is drawn here; then only this auditor knows that it was not chosen.
    """
    names = {witness.name for witness in checkpoint.cosigned}
    lines = sorted(line.encode() for line in checkpoint.note.lines if line.name in names)
    if not lines:
        return secrets.token_bytes(32)
    signed = checkpoint.checkpoint.encode() + "".join(lines)
    return hashlib.sha256(_PURPOSE + signed.encode()).digest()


def draw(found: Sequence[Stretch], count: int, seed: bytes) -> list[Stretch]:
    """`count` of them, in the order of the run; the same ones for the same seed."""

    def lot(index: int) -> bytes:
        return hashlib.sha256(_PURPOSE + seed + index.to_bytes(8, "big")).digest()

    drawn = sorted(sorted(range(len(found)), key=lot)[:count])
    return [found[index] for index in drawn]


def replay(
    stretch: Stretch,
    run: RunFolder,
    authorities: Sequence[x509.Certificate],
    work: Path,
    *,
    arguments: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    timeout: float = 600.0,
    compare: Compare | None = None,
    tolerance: float = 0.0,
) -> Outcome:
    """Executes a part again, on this machine, with as many workers; they write to `work`.

    `arguments` are the script's: give it a copy of the vault, to which it saves its checkpoints.
    """
    script = run.evidence(stretch.script.sha256)
    if script is None:
        raise MalformedRun(f"{run.path} has no copy of {stretch.script.name}, which it recorded")
    work.mkdir(parents=True)
    path = work / Path(stretch.script.name).name
    path.write_bytes(script)
    pem = work / "authorities.pem"
    pem.write_bytes(b"".join(one.public_bytes(Encoding.PEM) for one in authorities))
    secret = secrets.token_hex(32)
    request = Request(
        str(work / "run"),
        str(pem),
        run.head.job,
        None if stretch.start is None else stretch.start.name,
        stretch.first_step,
        stretch.end.step,
    )
    inherited = os.environ if environ is None else environ
    kept = {name: value for name, value in inherited.items() if not _is_of_identity(name)}
    command = [
        sys.executable, "-m", "sealring.cli", "run", "-n", str(stretch.world),
        str(path), *arguments,
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command,
            env={**kept, "SEALRING_SECRET": secret, VARIABLE: request.encode()},
            capture_output=True,
            timeout=timeout,
            check=False,
        )
        said = (done.stdout + done.stderr).decode("utf-8", "replace")[-2000:]
        failed = done.returncode != 0
    except subprocess.TimeoutExpired:
        failed, said = True, f"it took longer than {timeout:g} s"
    again = None if failed else _last_checkpoint(work / "run", stretch, secret)
    if again is None:
        return Outcome(stretch, "failed", None, None, said)
    if again.content == stretch.end.content:
        return Outcome(stretch, "equal", again.content, 0.0, "")
    difference = None if compare is None else compare(stretch.end, again)
    near = difference is not None and difference <= tolerance
    return Outcome(stretch, "within" if near else "different", again.content, difference, "")


def _is_of_identity(name: str) -> bool:
    """The repetition has an identity of its own, and is no part of another job."""
    return name.startswith(("SEALRING_", "PET_", "TORCHELASTIC_")) or name in ("RANK", "WORLD_SIZE")


def _last_checkpoint(folder: Path, stretch: Stretch, secret: str) -> CheckpointRef | None:
    """What the repetition saved at the end, by its own records."""
    own = load_credentials(0, stretch.world, {"SEALRING_SECRET": secret}).authorities
    found: CheckpointRef | None = None
    for _, envelope in open_run(folder).statements():
        content = verify_statement(envelope, own).content
        if isinstance(content, Interval):
            for saved in content.checkpoints_out:
                found = saved if saved.step == stretch.end.step else found
    return found
