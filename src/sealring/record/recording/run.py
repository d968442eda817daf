"""`record_run`: a training script's record of itself, signed interval by interval.

    with sealring.record_run("run", every=10, configuration=settings) as records:
        for step in records.steps(1000):
            ...

A statement is made on the script's thread, which takes the groups' counts so far. Another thread
signs, writes and logs it. Datasets, checkpoints, frameworks' steps, and the tools that record an
ingest, a stage, an export or an evaluation report to the recording by themselves.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import platform
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Self

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding

from sealring.core.hooks import (
    GroupMade,
    Made,
    Share,
    credentials_of,
    flight_records,
    late_observers,
)
from sealring.core.identity.credentials import Credentials, read_authorities
from sealring.core.settings import CONTAINER
from sealring.errors import ConfigurationError
from sealring.record.recording.chain import RunLog, StatementChain
from sealring.record.recording.noted import Notes, note_group, opened, opened_so_far, traffic_so_far
from sealring.record.replay import ReplayRequest, requested
from sealring.record.statements.forms import (
    CheckpointRef,
    Code,
    DataRange,
    Interval,
    Named,
    Privacy,
    Transformation,
)
from sealring.record.statements.run_folder import RunFolder, create_run, open_run, write_statement
from sealring.record.statements.signing import sign_statement, statement_digest
from sealring.version import __version__

# ---- the running code, as far as the process itself can tell


def running_code(run: RunFolder, container: str | None) -> Code:
    """Describes the code. Keeps the script and the list of packages beside the statements."""
    path = _script()
    content = b"" if path is None else path.read_bytes()
    run.write_evidence(content)
    name = "(interactive)" if path is None else path.name
    return Code(
        script=Named(name, hashlib.sha256(content).hexdigest()),
        packages=run.write_evidence(package_list()),
        sealring=__version__,
        python=platform.python_version(),
        torch=_version("torch"),
        container=container or CONTAINER.read(os.environ) or None,
    )


def package_list() -> bytes:
    """NAME==VERSION of every installed package, sorted, one on each line."""
    found = {
        f"{one.metadata['Name'].lower()}=={one.version}"
        for one in metadata.distributions()
        if one.metadata["Name"]
    }
    return "".join(f"{line}\n" for line in sorted(found)).encode()


def _script() -> Path | None:
    """The script that was started. None in an interactive interpreter."""
    main = sys.modules.get("__main__")
    name = getattr(main, "__file__", None) or (sys.argv[0] if sys.argv else None)
    path = None if not name else Path(name)
    return path if path is not None and path.is_file() else None


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


# ---- the recording


FOLDER: Final = "_SEALRING_RECORD"
"""Set by `sealring run --record` for its workers: the folder of the run."""
EVERY: Final = 10
"""The steps of an interval, unless the script sets another number."""
_LAST_STATEMENTS_SECONDS: Final = 20.0
_LOG: Final = logging.getLogger("sealring")

Unsigned = Callable[[int, str | None], Interval]

_current: Recording | None = None
_ended: list[Path] = []
"""The folders in which this process has recorded a run to its end."""


def current() -> Recording | None:
    """The recording of this process. None if there is none."""
    return _current


def _set_current(recording: Recording | None) -> None:
    global _current
    _current = recording


# A forked child does not take part in its parent's recording.
os.register_at_fork(after_in_child=lambda: _set_current(None))


def record_run(
    folder: str | os.PathLike[str] | None = None,
    *,
    every: int = EVERY,
    configuration: Any = None,
    container: str | None = None,
    rank: int | None = None,
    world: int | None = None,
) -> Recording:
    """Begins to record this worker's part of a run, or returns the recording that has begun.

    All ranks name the same folder, on a disk that all of them see. By default it is the folder of
    `sealring run --record`. `configuration` is anything that JSON can hold. `container` is the
    digest of the image or the machine's measurement. Rank and world size default to torchrun's.
    """
    chosen = folder if folder is not None else os.environ.get(FOLDER)
    replay = requested(os.environ)
    if replay is not None:
        chosen = replay.folder
    if not chosen:
        raise ConfigurationError(
            "where should the records go? Pass a folder, or start with `sealring run --record RUN`"
        )
    path = Path(chosen).absolute()
    begun = current()
    if begun is None:
        rank = _from_torchrun("RANK", rank)
        world = _from_torchrun("WORLD_SIZE", world)
        begun = Recording(path, rank, world, container, replay)
        _set_current(begun)
    elif begun.path != path:
        raise ConfigurationError(
            f"this process is recorded in {begun.path} already, and not in {path}"
        )
    begun.configure(every, configuration)
    return begun


def _note(group: GroupMade) -> None:
    note_group(group.flight, recorded=current() is not None)


# In this order, so that a group that forms in between is noted by one of the two.
late_observers.append(_note)
for _recorders in flight_records.all():
    for _flight in _recorders():
        note_group(_flight, recorded=False)


def observe_groups(environ: Mapping[str, str]) -> Made:
    """Begins to record with the first group, if the job is recorded (`sealring run --record`)."""
    requested(environ)  # refuses a malformed request before ranks meet

    def made(group: GroupMade) -> None:
        if current() is None and not _ended:
            record_run(rank=group.flight.job_rank, world=group.size)

    return made


class Recording:
    """A worker's recording of its part of a run. `record_run` makes it."""

    def __init__(
        self, path: Path, rank: int, world: int, container: str | None, replay: ReplayRequest | None
    ) -> None:
        own = credentials_of(rank, world)
        self._rank, self._world = rank, world
        self._run = create_run(path, own.job)
        for authority in own.authorities:
            self._run.write_evidence(authority.public_bytes(Encoding.PEM))
        self._chain = StatementChain(self._run, lambda: credentials_of(rank, world))
        self._log = RunLog(self._run, own.authorities) if rank == 0 else None
        if self._log is not None:
            self._log.require_newest()
        self._code: Code = running_code(self._run, container)
        self._every = EVERY
        self._configuration = self._run.write_evidence(b"null")
        self.replay = replay
        """What an auditor asks this run to repeat. None in training itself."""
        self.notes = Notes(opened_so_far())
        self.next_step = self._first_step = (
            self._chain.next_step if replay is None else replay.first_step
        )
        self._under_way: int | None = None
        self._started = int(time.time())
        self._problem: BaseException | None = None
        self._closed = False
        self._waiting: queue.Queue[Unsigned | None] = queue.Queue()
        self._thread = threading.Thread(target=self._write, name="sealring-records", daemon=True)
        self._thread.start()
        # The last statement is not final if an exception ended the script. Python before 3.12 has
        # no sys.last_exc.
        self._at_exit = lambda: self.close(final=getattr(sys, "last_value", None) is None)
        atexit.register(self._at_exit)

    # ---- for the script

    @property
    def path(self) -> Path:
        return self._run.path

    def configure(self, every: int, configuration: Any = None) -> None:
        """Sets the interval's length and the configuration, from the next interval on."""
        if every < 1:
            raise ConfigurationError(f"every={every}: an interval has at least one step")
        self._every = every
        if configuration is None:
            return
        try:
            text = json.dumps(configuration, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as problem:
            raise ConfigurationError(f"the configuration cannot be written: {problem}") from None
        self._configuration = self._run.write_evidence(text.encode())

    def steps(self, total: int) -> Iterator[int]:
        """The remaining steps of `total`. Each step counts when its loop body has ended."""
        end = total if self.replay is None else min(total, self.replay.end_step)
        for step in range(self.next_step, end):
            self._under_way = step + 1
            yield step
            self.step()

    @property
    def steps_in_checkpoint(self) -> int:
        """The number of steps in a checkpoint that is saved now, with `steps`' current one."""
        return self.next_step if self._under_way is None else self._under_way

    def resume_at(self, step: int) -> None:
        """Called when the script has loaded a checkpoint, after which `step` comes next."""
        read = self.notes.resumed_at(step)
        if self.next_step != self._first_step:
            self.flush()
        self.next_step = self._first_step = step
        for checkpoint in read:
            self.notes.checkpoint_in(checkpoint)

    def step(self, count: int = 1) -> None:
        """Counts steps that have ended. After every `every` steps the interval ends too."""
        self.next_step += count
        self._under_way = None
        if self.next_step // self._every > self._first_step // self._every:
            self.flush()

    def note_privacy(self, mechanism: str, epsilon: float, delta: float, **parameters: Any) -> None:
        """Notes the privacy spent by the whole run so far, as the script's accountant says."""
        text = json.dumps(parameters, sort_keys=True, allow_nan=False)
        self.notes.privacy = Privacy(mechanism, repr(epsilon), repr(delta), text)

    def flush(self) -> None:
        """Ends the interval now."""
        self._end_interval(final=False)

    def wait(self) -> None:
        """Returns when all statements so far are on the disk, and logged if this is rank 0."""
        self._waiting.join()
        self._raise_problem()

    def close(self, *, final: bool = True) -> None:
        """Writes the last statement and waits until it is on the disk. Further calls do nothing.

        With `final=False` the chain gets no end: the run was cut off, or goes on later. Then
        nothing is written if nothing was done.
        """
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        try:
            if final or self.next_step != self._first_step or self.notes.any():
                self._end_interval(final=final)
        finally:
            self._waiting.put(None)
            self._thread.join()
            _ended.append(self.path)
            if current() is self:
                _set_current(None)
        self._raise_problem()
        if self._log is not None and final:
            missing = self._log.wait_for_all(self._world, _LAST_STATEMENTS_SECONDS)
            if missing:
                _LOG.warning(
                    "sealring: the run in %s has no final statement of ranks %s", self.path, missing
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(final=kind is None)

    # ---- internals

    def _end_interval(self, *, final: bool) -> None:
        self._raise_problem()
        noted, traffic = self.notes.take(), traffic_so_far()
        first, end, now = self._first_step, self.next_step, int(time.time())
        started, self._started = self._started, now
        configuration, privacy = self._configuration, self.notes.privacy

        def unsigned(sequence: int, previous: str | None) -> Interval:
            return Interval(
                run=self._run.head.run,
                sequence=sequence,
                previous=previous,
                final=final,
                world=self._world,
                first_step=first,
                end_step=end,
                started=min(started, now),
                finished=now,
                code=self._code,
                configuration=configuration,
                data=noted.data,
                groups=traffic.groups,
                collectives=traffic.collectives,
                links=traffic.links,
                checkpoints_in=noted.checkpoints_in,
                checkpoints_out=noted.checkpoints_out,
                privacy=privacy,
            )

        self._first_step = end
        self._waiting.put(unsigned)

    def _write(self) -> None:
        """The writing thread. After a problem it writes no more: the chain would have a gap."""
        while (unsigned := self._waiting.get()) is not None:
            try:
                if self._problem is None:
                    self._chain.append(unsigned)
                    if self._log is not None:
                        self._log.append_new()
            except BaseException as problem:
                self._problem = problem
            finally:
                self._waiting.task_done()

    def _raise_problem(self) -> None:
        """Raises a problem of the writing thread: training must not go on unrecorded."""
        problem = self._problem
        if problem is not None:
            raise problem


def _from_torchrun(name: str, given: int | None) -> int:
    if given is not None:
        return given
    text = os.environ.get(name, "")
    if not text.isdecimal():
        raise ConfigurationError(
            f"which worker is this? {name} is not set: start with `sealring run`, or pass rank= "
            "and world= to record_run"
        )
    return int(text)


# ---- reports to the recording of this process; without a recording they are dropped


def count_step(done: int | None = None) -> None:
    """Counts a framework's step. `done`: the number of steps that the framework has counted."""
    if (recording := current()) is not None:
        recording.step(1 if done is None else max(0, done - recording.next_step))


def recorded() -> bool:
    """Whether this process is recorded."""
    return current() is not None


def trusted_in_replay() -> tuple[tuple[x509.Certificate, ...], str] | None:
    """The authorities and the job whose checkpoints a repetition loads: the recorded run's."""
    request = requested(os.environ)
    return None if request is None else (read_authorities(Path(request.authorities)), request.job)


def note_data(
    name: str,
    digest: str,
    epoch: int,
    first: int,
    end: int,
    *,
    seed: int | None = None,
    share: Share | None = None,
) -> None:
    """Notes that this rank has read positions `first` to before `end` of a dataset's order.

    If all ranks read the range together, `share` says which of the positions this rank read.
    """
    if (recording := current()) is not None:
        recording.notes.data(DataRange(name, digest, epoch, first, end, seed, share))


def note_opened(name: str, digest: str) -> None:
    """Notes that this process has opened a dataset, and can read any sample of it by its number."""
    found = opened(name, digest)
    if (recording := current()) is not None:
        recording.notes.data(found)


def note_checkpoint_in(name: str, manifest: str, content: str | None = None) -> None:
    """Notes that this rank has loaded a checkpoint."""
    if (recording := current()) is not None:
        recording.notes.checkpoint_in(CheckpointRef(name, recording.next_step, manifest, content))


def note_checkpoint_out(name: str, manifest: str, content: str | None = None) -> None:
    """Notes that this rank has completed a checkpoint. Others may have written parts of it."""
    if (recording := current()) is not None:
        step = recording.steps_in_checkpoint
        recording.notes.checkpoint_out(CheckpointRef(name, step, manifest, content))


# ---- a transformation, in the folder of a run


def record_transformation(
    run: Path,
    transformation: Transformation,
    signer: Credentials | Ed25519PrivateKey,
    authorities: Sequence[x509.Certificate] = (),
) -> Path:
    """Signs a transformation and writes it into the run's folder, and logs it if the key is here.

    Before training there is no log yet. Rank 0 logs the statement later, when it finds it.
    `authorities` are those of the run's workers, whose statements may also have to be logged.
    """
    run = run.absolute()
    envelope = sign_statement(transformation, signer)
    name = f"{transformation.kind}-{statement_digest(envelope)[:16]}"
    path = write_statement(run, name, envelope)
    if (run / "run.json").exists() and (folder := open_run(run)).key.exists():
        RunLog(folder, authorities).append_new()
    return path
