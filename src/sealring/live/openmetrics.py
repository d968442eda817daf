"""Workers' answers as OpenMetrics text, which Prometheus and OpenTelemetry's collector read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from sealring.live.status import GroupCounts, GroupStatus, Tally, WorkerStatus

CONTENT_TYPE: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"

Sample = tuple[dict[str, str], float]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric. A counter's samples have the suffix _total, an info's the suffix _info."""

    name: str
    kind: Literal["counter", "gauge", "info"]
    text: str
    read: Callable[[WorkerStatus], Iterable[Sample]]
    unit: str = ""

    @property
    def sample_name(self) -> str:
        return f"{self.name}{ {'counter': '_total', 'info': '_info'}.get(self.kind, '') }"


def _by_name(
    value: Callable[[GroupCounts], float],
) -> Callable[[WorkerStatus], Iterator[Sample]]:
    def read(worker: WorkerStatus) -> Iterator[Sample]:
        for each in worker.counts:
            yield {"group": each.group}, value(each)

    return read


def _tallied(
    tallies: Callable[[GroupCounts], list[Tally]], label: str
) -> Callable[[WorkerStatus], Iterator[Sample]]:
    def read(worker: WorkerStatus) -> Iterator[Sample]:
        for each in worker.counts:
            for tally in tallies(each):
                yield {"group": each.group, label: tally.name}, tally.count

    return read


def _waited(worker: WorkerStatus) -> Iterator[Sample]:
    for each in worker.counts:
        for waited in each.waited:
            yield {"group": each.group, "peer": waited.peer}, waited.seconds


def _of_open_groups(
    value: Callable[[GroupStatus], Sample],
) -> Callable[[WorkerStatus], Iterator[Sample]]:
    """Of groups of one name, the newest that has not ended."""

    def read(worker: WorkerStatus) -> Iterator[Sample]:
        newest: dict[str, GroupStatus] = {}
        for each in sorted(worker.groups, key=lambda group: group.age_s):
            if each.state != "closed":
                newest.setdefault(each.name, each)
        for name, each in newest.items():
            labels, number = value(each)
            yield {"group": name, **labels}, number

    return read


def _build(worker: WorkerStatus) -> Iterator[Sample]:
    yield (
        {
            "version": worker.version,
            "identity": worker.identity,
            "sealed_only": "1" if worker.sealed_only else "0",
        },
        1,
    )


FAMILIES: Final[Sequence[Family]] = (
    Family("sealring_sealed_bytes", "counter", "Plaintext bytes that this rank sealed.",
           _by_name(lambda each: each.sealed_bytes), "bytes"),
    Family("sealring_opened_bytes", "counter", "Plaintext bytes that it opened and verified.",
           _by_name(lambda each: each.opened_bytes), "bytes"),
    Family("sealring_rekeys", "counter", "How often it replaced a sealing key.",
           _by_name(lambda each: each.rekeys)),
    Family("sealring_wait_seconds", "counter", "Time slept while this peer owed a record.",
           _waited, "seconds"),
    Family("sealring_collectives", "counter", "Collectives that went well.",
           _tallied(lambda each: each.collectives, "operation")),
    Family("sealring_messages", "counter", "Messages that went well.",
           _tallied(lambda each: each.messages, "operation")),
    Family("sealring_errors", "counter", "Calls that ended in an error.",
           _tallied(lambda each: each.errors, "type")),
    Family("sealring_job_ranks", "gauge", "How many ranks the job has.",
           lambda worker: [({}, worker.size)]),
    Family("sealring_groups", "gauge", "Sealed groups that have not ended.",
           lambda worker: [({}, worker.groups_open)]),
    Family("sealring_group_age_seconds", "gauge", "How long ago the group was made.",
           _of_open_groups(lambda group: ({}, group.age_s)), "seconds"),
    Family("sealring_group_failed", "gauge", "1 if a call of the group ended in an error.",
           _of_open_groups(lambda group: ({}, group.state == "failed"))),
    Family("sealring_group_gpu", "info", "Which way records take between GPUs.",
           _of_open_groups(lambda group: ({"wire": group.gpu_wire or "none"}, 1))),
    Family("sealring_certificate_end_seconds", "gauge",
           "When the worker's certificate ends, in seconds since 1970.",
           lambda worker: [({}, worker.certificate_ends_s)], "seconds"),
    Family("sealring_worker", "info", "Version and identity of a worker.", _build),
)  # fmt: skip

SILENT: Final = "sealring_silent_workers"


def as_text(workers: Sequence[WorkerStatus], silent: int = 0) -> str:
    """`silent`: how many sockets are there whose worker gave no answer."""
    lines: list[str] = []
    for family in FAMILIES:
        lines.append(f"# TYPE {family.name} {family.kind}")
        if family.unit:
            lines.append(f"# UNIT {family.name} {family.unit}")
        lines.append(f"# HELP {family.name} {family.text}")
        for worker in workers:
            for labels, value in family.read(worker):
                named = _labels({**_labels_of(worker), **labels})
                lines.append(f"{family.sample_name}{named} {_number(value)}")
    lines += [
        f"# TYPE {SILENT} gauge",
        f"# HELP {SILENT} Workers of this machine whose socket is there and gives no answer.",
        f"{SILENT} {silent}",
        "# EOF\n",
    ]
    return "\n".join(lines)


def _labels_of(worker: WorkerStatus) -> dict[str, str]:
    # Not "job": Prometheus has a label of that name for what it scrapes. And with the process: a
    # rank may have helpers with groups of their own, such as torch's saver of checkpoints.
    return {
        "job_name": worker.job,
        "rank": str(worker.rank),
        "host": worker.host,
        "pid": str(worker.pid),
    }


def _labels(labels: dict[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    """Whole numbers in full: a counter of bytes needs all its digits."""
    return str(int(value)) if value == int(value) else repr(float(value))
