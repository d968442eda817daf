"""The whole audit, from a run's folder to answers, findings, the graph and one status."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from sealring.formats.log.checkpoints import SignedCheckpoint
from sealring.record.audit.artefacts import check_artefacts
from sealring.record.audit.chains import check_chains
from sealring.record.audit.claims import RunClaims, Shown, answer_claims, check_model
from sealring.record.audit.data import check_data
from sealring.record.audit.findings import ClaimAnswer, Fault, Finding, Means, Said
from sealring.record.audit.graph import Graph, build_graph, mark_faults
from sealring.record.audit.machines import check_brokers, check_machines
from sealring.record.audit.records import AuditTrust, check_log, read_records, wanted_run
from sealring.record.audit.spot_checks import Repetition, Repetitions, spot_check
from sealring.record.audit.traffic import check_collectives, check_links
from sealring.record.statements.run_folder import check_folder, open_run


@dataclass(frozen=True, slots=True)
class AuditQuestion:
    """What an auditor asks about a run."""

    claims: RunClaims = field(default_factory=RunClaims)
    model: Path | None = None
    replay: Repetition | None = None
    broker_logs: Sequence[Path] = ()
    """Published logs of brokers, with which certificates are compared. `AuditTrust.brokers` says
    which of them to trust."""


class Status(IntEnum):
    """The exit status of `sealring audit`."""

    SHOWN = 0
    """Every claim is answered with yes, and no record contradicts another."""
    REFUTED = 1
    """A claim is answered with no, or records contradict each other or are forged."""
    NOT_SHOWN = 2
    """A claim is not shown, or something cannot be read."""


@dataclass(frozen=True, slots=True)
class AuditResult:
    run: str
    """The run's name."""
    jobs: tuple[str, ...]
    log: SignedCheckpoint | None
    """The log's checkpoint. None if the log is not trusted; a finding says why."""
    payloads: Mapping[str, str]
    """Each verified statement's content as JSON, by the statement's digest."""
    graph: Graph
    findings: tuple[Finding, ...]
    answers: tuple[ClaimAnswer, ...]
    ranks: int
    intervals: int
    repetitions: Repetitions | None = None
    """The parts that were executed again. None if none were."""

    @property
    def status(self) -> Status:
        unread = [one for one in self.findings if one.fault.way is Means.READING]
        if len(unread) < len(self.findings) or any(one.said is Said.NO for one in self.answers):
            return Status.REFUTED
        if unread or any(one.said is Said.NOT_SHOWN for one in self.answers):
            return Status.NOT_SHOWN
        return Status.SHOWN

    @property
    def verdict(self) -> str:
        """The status in words, for the terminal and the page."""
        if self.status is Status.REFUTED:
            return "Something is refuted: see what is answered with no, and the findings."
        if self.status is Status.NOT_SHOWN:
            return "Something is not shown: see which claims, what cannot be read, and why."
        shown = "Every claim is shown" if self.answers else "No claims were given, so none is shown"
        return f"{shown}, and no record contradicts another."

    def as_json(self) -> dict[str, Any]:
        log = self.log
        return {
            "run": self.run,
            "jobs": list(self.jobs),
            "status": self.status.value,
            "statements": len(self.payloads),
            "ranks": self.ranks,
            "intervals": self.intervals,
            "log": None
            if log is None
            else {"origin": log.origin, "size": log.size, "cosigned_by": log.witnesses},
            "claims": [one.as_json() for one in self.answers],
            "findings": [one.as_json() for one in self.findings],
            "replay": None if self.repetitions is None else self.repetitions.as_json(),
        }


def audit(
    path: Path, trust: AuditTrust, question: AuditQuestion | None = None,
    stage: Callable[[str], None] = lambda name: None,
) -> AuditResult:  # fmt: skip
    """Audits a run's folder. Raises MalformedRun if it holds no run; other faults are findings.

    `stage` is called with the name of each step of the work, for a progress bar.
    """
    question = question or AuditQuestion()
    with _without_collector():
        stage("the folder")
        check_folder(path)
        run = open_run(path)
        stage("the log")
        log, logged, findings = check_log(run.log, trust)
        stage("signatures")
        head, strange = wanted_run(run.head, log, trust)
        records = read_records(head, run.statements(), logged, trust)
        findings += [*strange, *records.findings]
        stage("contradictions")
        links = check_links(records)
        machines = check_machines(records, run, question.claims.machines, trust)
        findings += [*machines.findings, *check_brokers(question.broker_logs, records, trust)]
        findings += [*check_chains(records), *links.findings, *check_collectives(records)]
        findings += [*check_data(records), *check_artefacts(records)]
        stage("the graph")
        graph = build_graph(records)
        findings += _cycle(graph)
        answers = list(
            answer_claims(question.claims, Shown(records, graph, findings, links, machines))
        )
    if question.model is not None:
        answer, more = check_model(question.model, records, graph, findings)
        answers.append(answer)
        findings += more
    repetitions = None
    if question.replay is not None:
        answer, more, repetitions = spot_check(question.replay, records, run, log, trust, stage)
        answers.append(answer)
        findings += more
    mark_faults(graph, findings)
    return AuditResult(
        run=head.run,
        jobs=tuple(sorted({turn.worker.job for turn in records.turns})),
        log=log,
        payloads=records.payloads,
        graph=graph,
        findings=tuple(findings),
        answers=tuple(answers),
        ranks=len({turn.rank for turn in records.turns}),
        intervals=len({turn.interval.sequence for turn in records.turns}),
        repetitions=repetitions,
    )


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Turns the garbage collector off: the records have no cycles, and scanning them takes long."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _cycle(graph: Graph) -> list[Finding]:
    keys = graph.cycle()
    if not keys:
        return []
    nodes = [graph.nodes[key] for key in keys]
    records = dict.fromkeys(record for node in nodes for record in node.records)
    titles = " -> ".join(node.title for node in nodes[:8])
    text = f"these lead to each other in a circle, so that none of them can be the origin: {titles}"
    return [Finding(Fault.CYCLE, ("the signers of these records",), text, tuple(records))]
