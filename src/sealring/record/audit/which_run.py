"""Which run and which job the records must be of. `run.json` is not signed: it does not decide.

The auditor names the job. A log that a run's recording made names the run in its origin, which is a
part of the key that the auditor believes. `run.json` is asked only where neither is said.
"""

from __future__ import annotations

from dataclasses import replace

from sealring.record.audit.findings import Fault, Finding
from sealring.record.audit.result import LogSeen
from sealring.record.audit.trust import AuditTrust
from sealring.record.provenance.runs import RunHead, run_of_log


def wanted_run(
    head: RunHead, log: LogSeen | None, trust: AuditTrust
) -> tuple[RunHead, list[Finding]]:
    """What every statement must name, and a finding if `run.json` names something else."""
    logged = None if log is None else run_of_log(log.origin)
    wanted = replace(head, run=logged or head.run, job=trust.job or head.job)
    if wanted == head:
        return head, []
    text = (
        f"run.json names run {head.run} of job {head.job}, and the audit is of run {wanted.run} of "
        f"job {wanted.job}: it was changed, or this is the folder of another run"
    )
    return wanted, [Finding(Fault.OTHER_JOB, ("the disk",), text)]
