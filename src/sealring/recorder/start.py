"""A new group's flight recorder, with everything that reads it."""

from __future__ import annotations

import signal
from pathlib import Path

from sealring.recorder import process
from sealring.recorder.flight import Accountable, FlightRecorder
from sealring.recorder.mail import MailAccountable
from sealring.recorder.metrics import publish_metrics


def start_recorder(
    engine: Accountable,
    mailbox: MailAccountable,
    *,
    job: str,
    job_rank: int,
    group: str,
    group_id: str,
    epoch: str,
    members: tuple[int, ...],
    directory: Path | None = None,
    on_signal: signal.Signals | None = None,
) -> FlightRecorder:
    """`directory`: where the record goes when a call fails, and when the signal comes."""

    def on_failure() -> None:
        if directory is not None:
            process.dump_without_failing(directory, f"a call of group {group} failed")

    recorder = FlightRecorder(
        engine,
        mailbox,
        job=job,
        job_rank=job_rank,
        group=group,
        group_id=group_id,
        epoch=epoch,
        members=members,
        on_failure=on_failure,
    )
    process.keep(recorder)
    if directory is not None and on_signal is not None:
        process.dump_on_signal(on_signal, directory)
    publish_metrics(process.counts_of_all_groups)
    return recorder
