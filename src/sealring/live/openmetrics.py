"""Workers' answers as OpenMetrics text, which Prometheus and OpenTelemetry's collector read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from sealring.live.status import GroupStatus, WorkerStatus
from sealring.recorder.metrics import COUNTERS, Metric

CONTENT_TYPE: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"

Sample = tuple[dict[str, str], float]
_SUFFIX: Final = {"counter": "_total", "info": "_info"}


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


GAUGES: Final[tuple[Metric[WorkerStatus], ...]] = (
    Metric("job_ranks", "", "How many ranks the job has.",
           lambda worker: [({}, worker.size)], kind="gauge"),
    Metric("groups", "", "Sealed groups that have not ended.",
           lambda worker: [({}, worker.groups_open)], kind="gauge"),
    Metric("group_age", "s", "How long ago the group was made.",
           _of_open_groups(lambda group: ({}, group.age_s)), kind="gauge"),
    Metric("group_failed", "", "1 if a call of the group ended in an error.",
           _of_open_groups(lambda group: ({}, group.state == "failed")), kind="gauge"),
    Metric("group_gpu", "", "Which way records take between GPUs.",
           _of_open_groups(lambda group: ({"wire": group.gpu_wire or "none"}, 1)), kind="info"),
    Metric("certificate_end", "s", "When the worker's certificate ends, in seconds since 1970.",
           lambda worker: [({}, worker.certificate_ends_s)], kind="gauge"),
    Metric("worker", "", "Version and identity of a worker.", _build, kind="info"),
)  # fmt: skip
SILENT: Final = "sealring_silent_workers"


def as_text(workers: Sequence[WorkerStatus], silent: int = 0) -> str:
    """`silent`: how many sockets are there whose worker gave no answer."""
    lines: list[str] = []
    for metric in (*COUNTERS, *GAUGES):
        name = f"sealring_{metric.plain_name}"
        lines.append(f"# TYPE {name} {metric.kind}")
        if metric.plain_name != metric.name:
            lines.append(f"# UNIT {name} {metric.plain_name.removeprefix(f'{metric.name}_')}")
        lines.append(f"# HELP {name} {metric.text}")
        for worker in workers:
            for labels, value in _samples(metric, worker):
                named = _labels({**_labels_of(worker), **labels})
                lines.append(f"{name}{_SUFFIX.get(metric.kind, '')}{named} {_number(value)}")
    lines += [
        f"# TYPE {SILENT} gauge",
        f"# HELP {SILENT} Workers of this machine whose socket is there and gives no answer.",
        f"{SILENT} {silent}",
        "# EOF\n",
    ]
    return "\n".join(lines)


def _samples(metric: Metric[Any], worker: WorkerStatus) -> Iterator[Sample]:
    """The worker has read its counters itself."""
    if metric.kind != "counter":
        yield from metric.read(worker)
        return
    label = metric.attribute.rpartition(".")[2]
    for each in worker.counts:
        if each.metric == metric.plain_name:
            yield {"group": each.group, **({label: each.label} if label else {})}, each.value


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
