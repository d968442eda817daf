"""A bench run on the terminal: its bar, and what becomes of it when it is stopped."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

import typer

from sealring.bench.session import Job, Session
from sealring.cli.terminal import errors, progress_bar
from sealring.errors import WorkerFailed

_ENDS: Final = (signal.SIGTERM, signal.SIGHUP)
"""Besides Ctrl-C: a scheduler's, and that of a connection or a terminal which is gone."""


class _Stopped(BaseException):
    """One of these came."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)


def new_session(path: Path | None = None) -> Session:
    return Session(" ".join(["sealring", *sys.argv[1:]]), path)


def run(session: Session, jobs: Sequence[Job]) -> int | None:
    """Measures under a bar. The exit status to end with if it was stopped, else None.

    A user who stops it gets what was measured by then: printed, and in the file if there is one.
    """
    total = sum(job.count for job in jobs)
    try:
        with _signals_stop(), progress_bar("{task.completed:.0f}/{task.total} cases") as bar:
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
        by = stop.signal if isinstance(stop, _Stopped) else signal.SIGINT
        _keep(session, f"stopped by {'Ctrl-C' if by is signal.SIGINT else by.name}", total)
        return 128 + by
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
def _signals_stop() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise _Stopped(number)

    # What nohup has the process ignore stays ignored.
    before = {each: signal.getsignal(each) for each in _ENDS}
    taken = {each: old for each, old in before.items() if old is not signal.SIG_IGN}
    for each in taken:
        signal.signal(each, stop)
    try:
        yield
    finally:
        for each, old in taken.items():
            signal.signal(each, old)
