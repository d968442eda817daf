"""One run of `sealring bench`: what is to be measured, what was, and the file that keeps it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from sealring.bench.exchange import Progress
from sealring.group.settings import read_settings
from sealring.results import Results, this_machine, write_results
from sealring.schedule.table import format_table

Section = Literal["aead", "link", "allreduce", "collectives", "step", "gpu", "scale"]


class Measured(Protocol):
    """What was measured alternately in one run."""

    @property
    def section(self) -> Section: ...
    @property
    def label(self) -> str: ...
    def cases(self, run: int) -> Sequence[Any]:
        """As the results file holds them, one for each variant."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """What one world of workers measures."""

    label: str
    count: int
    """How many it will yield."""
    measure: Callable[[Progress], Iterator[Measured]]


def _table() -> str:
    """What the workers, which inherit this environment, choose algorithms by."""
    settings = read_settings(os.environ)
    return format_table(settings.table.fixed_to(settings.algorithms), {})


@dataclass(slots=True)
class Session:
    command: str
    path: Path | None = None
    """Where the results go; None where no file was asked for."""
    measured: list[Measured] = field(default_factory=list)
    stopped: str | None = None
    """Why it ended early, once it has."""
    _made: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    _algorithms: str = field(default_factory=_table)

    def run(self, jobs: Sequence[Job], tell: Callable[[float, str], None]) -> None:
        """Measures; `tell` gets how many are done and what is under way.

        The file is written after each job, between two worlds of workers, where it takes no time
        from anybody: so what was measured is kept however this process ends.
        """
        total = sum(job.count for job in jobs)
        for job in jobs:

            def progress(part: float, label: str = job.label) -> None:
                tell(len(self.measured) + part, label)

            progress(0.0)
            for measured in job.measure(progress):
                self.measured.append(measured)
            if len(self.measured) < total:
                self.save(f"it ended after {len(self.measured)} of {total} cases")
        self.save(None)

    def save(self, stopped: str | None) -> None:
        self.stopped = stopped
        if self.path is not None:
            write_results(self.path, self.results(stopped))

    def results(self, stopped: str | None = None) -> Results:
        sections: dict[Section, list[Any]] = {}
        for run, each in enumerate(self.measured):
            sections.setdefault(each.section, []).extend(each.cases(run))
        return Results(
            command=self.command,
            made=self._made,
            complete=stopped is None,
            stopped=stopped,
            machine=this_machine(),
            algorithms=self._algorithms,
            **sections,
        )
