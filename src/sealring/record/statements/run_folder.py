"""The folder of a run, which is what an auditor gets.

    run.json                    format, version, the run's name and its job
    statements/NAME.dsse.json   one envelope in each; the name is not believed
    log/                        the transparency log (tlog-tiles); every statement is an entry
    evidence/SHA256             a file that a statement names by its digest: the script, the list
                                of packages, configurations, authorities, policies, tokens

The log's key lies beside the folder, not in it: RUN.key, and its verifier key RUN.vkey. A folder
that comes from a stranger is checked (`check_folder`) before anything in it is read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from sealring.errors import ConfigurationError, MalformedRun
from sealring.formats.files import DurableFiles, not_written, read_limited
from sealring.formats.log.tree import MAX_ENTRY_BYTES
from sealring.formats.strict import read_as

FORMAT: Final = "sealring run"
VERSION: Final = 1
SUFFIX: Final = ".dsse.json"
MAX_EVIDENCE_BYTES: Final = 16 << 20
_MAX_HEAD_BYTES: Final = 64 << 10
_LOG_ORIGIN: Final = "sealring.run/"
_NAME: Final = re.compile(r"[0-9a-z][0-9a-z-]{0,99}")


@dataclass(frozen=True, slots=True)
class RunHead:
    format: str
    version: int
    run: str
    job: str


@dataclass(frozen=True, slots=True)
class RunFolder:
    """An open run folder. `create_run` and `open_run` make it."""

    path: Path
    head: RunHead

    @property
    def log(self) -> Path:
        return self.path / "log"

    @property
    def key(self) -> Path:
        return self.path.with_name(f"{self.path.name}.key")

    @property
    def vkey(self) -> Path:
        return self.path.with_name(f"{self.path.name}.vkey")

    def statement_path(self, name: str) -> Path:
        return self.path / "statements" / f"{name}{SUFFIX}"

    def write_statement(self, name: str, envelope: bytes) -> Path:
        return write_statement(self.path, name, envelope)

    def statement_names(self) -> list[str]:
        """The names of the statements. Files with other names are ignored.

        A worker that records goes on beside such files; `check_folder` refuses them in an audit.
        """
        folder = self.path / "statements"
        found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        names = [file.removesuffix(SUFFIX) for file in found if file.endswith(SUFFIX)]
        return [name for name in names if _NAME.fullmatch(name) is not None]

    def read_statement(self, name: str) -> bytes:
        """Reads an envelope. Nothing in it is checked."""
        path = f"{self.path}/statements/{name}{SUFFIX}"
        content = read_limited(path, MAX_ENTRY_BYTES, MalformedRun, links=False)
        if content is None:
            raise MalformedRun(f"{path} was removed while the run was read")
        return content

    def statements(self) -> Iterator[tuple[str, bytes]]:
        """Yields (name, envelope) in the order of the names. Nothing is checked."""
        for name in self.statement_names():
            yield name, self.read_statement(name)

    def write_evidence(self, content: bytes) -> str:
        """Keeps a file under its digest, and returns the digest."""
        if len(content) > MAX_EVIDENCE_BYTES:
            raise ConfigurationError(
                f"a file beside a run's statements has at most {MAX_EVIDENCE_BYTES} bytes"
            )
        digest = hashlib.sha256(content).hexdigest()
        try:
            present = self.evidence(digest) is not None
        except MalformedRun:  # another file has its name
            present = False
            self._put_aside(self.path / "evidence" / digest)
        if not present:
            batch = DurableFiles(self.path)
            batch.write(f"evidence/{digest}", content)
            batch.sync()
        return digest

    def put_statement_aside(self, name: str) -> None:
        """Frees a statement's name that another file has taken."""
        self._put_aside(self.statement_path(name))

    def _put_aside(self, path: Path) -> None:
        """Moves a file, a link or a folder to `.new`, which readers ignore."""
        try:
            os.rename(path, aside := DurableFiles(self.path).new_name())
        except OSError as problem:
            raise ConfigurationError(
                f"{path} is not what this run wrote there, and cannot be moved away: "
                f"{problem.strerror}"
            ) from None
        with contextlib.suppress(OSError):  # an audit refuses links, pipes and folders there
            mode = os.lstat(aside).st_mode
            if stat.S_ISDIR(mode):
                os.rmdir(aside)
            elif not stat.S_ISREG(mode):
                os.unlink(aside)

    def evidence(self, digest: str) -> bytes | None:
        """The file with this digest. None if the folder does not have it."""
        path = self.path / "evidence" / digest
        if re.fullmatch(r"[0-9a-f]{64}", digest) is None:
            raise MalformedRun(f"{digest[:80]!r} is not a digest")
        content = read_limited(path, MAX_EVIDENCE_BYTES, MalformedRun, links=False)
        if content is not None and hashlib.sha256(content).hexdigest() != digest:
            raise MalformedRun(f"{path} is not the file that its name says: it was changed")
        return content


def log_of_run(run: str) -> str:
    """The origin of a run's log."""
    return f"{_LOG_ORIGIN}{run}"


def run_of_log(origin: str) -> str | None:
    """The run whose log has this origin. None if it is no run's log."""
    return origin.removeprefix(_LOG_ORIGIN) if origin.startswith(_LOG_ORIGIN) else None


def write_statement(run: Path, name: str, envelope: bytes) -> Path:
    """Writes a statement durably. A name can be used only once.

    The run may have no name yet: stages on raw data come before the job that trains on it.
    """
    path = run / "statements" / f"{name}{SUFFIX}"
    try:
        # Two workers of one rank may write at the same time, if a job was started twice.
        new = _NAME.fullmatch(name) is not None and DurableFiles(run).write_new(
            f"statements/{name}{SUFFIX}", envelope
        )
    except OSError as problem:
        raise not_written(path, problem) from None
    if not new:
        raise ConfigurationError(f"{path} exists, or is no name for a statement")
    return path


def create_run(path: Path, job: str, run: str | None = None) -> RunFolder:
    """Makes a run's folder, or opens it if another rank made it. The first rank names the run."""
    path = path.absolute()
    head = RunHead(FORMAT, VERSION, run or secrets.token_hex(16), job)
    try:
        path.mkdir(parents=True, exist_ok=True)
        there = {one.name for one in path.iterdir()}  # listed once: another rank may write now
        if "run.json" not in there:
            if not there <= _PARTS:
                raise ConfigurationError(f"{path} is not empty: choose another folder for the run")
            DurableFiles(path).write_new("run.json", json.dumps(asdict(head)).encode() + b"\n")
    except OSError as problem:
        raise not_written(path, problem) from None
    found = open_run(path)
    if found.head.job != job or (run is not None and found.head.run != run):
        raise ConfigurationError(
            f"{path} holds run {found.head.run} of job {found.head.job}, and this is another one "
            f"(job {job}): choose another folder"
        )
    return found


_PARTS: Final = frozenset({".new", "statements", "log", "evidence"})


def open_run(path: Path) -> RunFolder:
    path = path.absolute()
    content = read_limited(path / "run.json", _MAX_HEAD_BYTES, MalformedRun, links=False)
    if content is None:
        raise MalformedRun(f"{path} is not the folder of a run: it has no run.json")
    head = read_as(RunHead, content, str(path / "run.json"), "run's folder", MalformedRun)
    if head.format != FORMAT or head.version != VERSION:
        raise MalformedRun(
            f"{path} is of version {head.version} of {head.format[:80]!r}; this sealring reads "
            f"version {VERSION} of {FORMAT!r}"
        )
    return RunFolder(path, head)


# ---- what a folder from a stranger may hold


MAX_FILES: Final = 400_000
MAX_BYTES: Final = 4 << 30
MAX_DEPTH: Final = 12
_OF_A_RUN: Final = re.compile(
    r"run\.json|statements/[0-9a-z][0-9a-z-]{0,99}\.dsse\.json|evidence/[0-9a-f]{64}"
    r"|log/(checkpoint|\.lock|tile/([0-9]|entries)/(x[0-9]{3}/)*[0-9]{3}(\.p/[0-9]{1,3})?)"
    r"|(log/)?\.new/[0-9a-f]{16}(\.new)?"
)
"""The files of a run's folder. `.new` holds what a killed writer left."""


def check_folder(path: Path) -> None:
    """MalformedRun if there is a symlink, a special or unknown file, or more than audits read."""
    files = size = 0
    below = len(os.path.join(path, ""))
    waiting = [(path, 0)]
    while waiting:
        folder, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise MalformedRun(f"{_below(folder, path)} is deeper than {MAX_DEPTH} folders")
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(status.st_mode):
                        waiting.append((Path(entry.path), depth + 1))
                    elif not stat.S_ISREG(status.st_mode):
                        raise MalformedRun(
                            f"{_below(Path(entry.path), path)} is a symlink or a special file, and "
                            "a run's folder has none: take a copy of the files themselves"
                        )
                    elif not _OF_A_RUN.fullmatch(entry.path[below:]):
                        raise MalformedRun(
                            f"{_below(Path(entry.path), path)} is no file of a run: a run's folder "
                            "has no others, so that nothing in it goes unread"
                        )
                    files, size = files + 1, size + status.st_size
                    if files > MAX_FILES or size > MAX_BYTES:
                        raise MalformedRun(
                            f"{path} has more than {MAX_FILES} files or {MAX_BYTES >> 30} GiB, "
                            "which is more than an audit reads"
                        )
        except OSError as problem:
            raise MalformedRun(
                f"{_below(folder, path)} cannot be read: {problem.strerror}"
            ) from None


def _below(path: Path, root: Path) -> str:
    return repr(str(path.relative_to(root)))[:200]
