"""A bench run on the terminal: its bar, and what becomes of it when it is stopped."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

import typer

from sealring.bench.session import Job, Session
from sealring.cli.terminal import errors, progress_bar
from sealring.errors import WorkerFailed


class _Stopped(BaseException):
    """SIGTERM came."""


def new_session(path: Path | None = None) -> Session:
    return Session(" ".join(["sealring", *sys.argv[1:]]), path)


def run(session: Session, jobs: Sequence[Job]) -> int | None:
    """Measures under a bar. The exit status to end with if it was stopped, else None.

    A user who stops it gets what was measured by then: printed, and in the file if there is one.
    """
    total = sum(job.count for job in jobs)
    try:
        with _sigterm_stops(), progress_bar("{task.completed:.0f}/{task.total} cases") as bar:
            task = bar.add_task("starting", total=total)
            said: list[str] = []

            def tell(done: float, label: str) -> None:
                bar.update(task, completed=done, description=label)
                # A log has no bar: it gets a line for each job that begins.
                if not errors.is_terminal and label not in said:
                    said.append(label)
                    errors.print(f"{done:.0f}/{total} {label}", markup=False, highlight=False)

            session.run(jobs, tell)
    except (KeyboardInterrupt, _Stopped) as stop:
        status = 143 if isinstance(stop, _Stopped) else 130
        _keep(session, f"stopped by {'SIGTERM' if status == 143 else 'Ctrl-C'}", total)
        return status
    except WorkerFailed:
        _keep(session, "a worker failed", total)
        raise
    return None


def _keep(session: Session, why: str, total: int) -> None:
    told = f"{why} after {len(session.measured)} of {total} cases"
    session.save(told)
    where = f"; they are in {session.path}" if session.path is not None else ""
    errors.print(f"{told}{where}", markup=False, highlight=False, soft_wrap=True)


def end(status: int | None) -> None:
    if status is not None:
        raise typer.Exit(status)


@contextmanager
def _sigterm_stops() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise _Stopped

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
