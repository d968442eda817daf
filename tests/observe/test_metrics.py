"""Counts through OpenTelemetry, read from real groups with its SDK's in-memory reader."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sealring.core.settings import with_settings
from sealring.errors import OutOfStep
from tests.workers import Workers


def read(reader: Any) -> dict[str, dict[frozenset[tuple[str, object]], float]]:
    """Return the values by name and by attributes."""
    data = reader.get_metrics_data()
    return {
        metric.name: {frozenset(p.attributes.items()): p.value for p in metric.data.data_points}
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if scope.scope.name == "sealring"
    }


def measured(rank: int, world: int) -> tuple[Any, Any, Any]:
    from opentelemetry import metrics
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    metrics.set_meter_provider(MeterProvider([reader]))  # the group exists already
    group: Any = dist.group.WORLD
    dist.all_reduce(torch.ones(50_000))
    dist.barrier()
    deal = dist.send if rank == 0 else dist.recv
    deal(torch.ones(250), 1 - rank)
    first, account = read(reader), group.account()
    # A second group of this name continues the first one's counts.
    dist.destroy_process_group()
    dist.init_process_group("sealring")
    with pytest.raises(OutOfStep):
        dist.all_reduce(torch.ones(10 if rank else 20))
    return first, account, read(reader)


def test_metrics_count_what_was_sealed_opened_rekeyed_and_waited_for() -> None:
    own = Workers(2)  # new ones, since a process can set its MeterProvider only once
    try:
        results = own.run(
            measured,
            world=2,
            env={"SEALRING_JOB": "metrics", **with_settings({}, rekey_bytes=50000)},
        )
    finally:
        own.close()
    for rank, (first, account, second) in enumerate(results):
        ((identity, sealed),) = first["sealring.sealed"].items()
        assert dict(identity).keys() == {"sealring.job", "sealring.rank", "sealring.group"}
        assert ("sealring.job", "metrics") in identity
        assert ("sealring.rank", rank) in identity
        sent, received = (1000, 0) if rank == 0 else (0, 1000)
        assert sealed == account["sealed_bytes"] >= 200_000 + sent
        assert first["sealring.opened"] == {identity: account["opened_bytes"]}
        assert account["opened_bytes"] >= 200_000 + received
        way = "send" if rank == 0 else "recv"
        assert first["sealring.messages"] == {identity | {("sealring.operation", way)}: 1}
        assert first["sealring.rekeys"] == {identity: sum(account["rekeys"])}
        assert sum(account["rekeys"]) >= 3
        peer = identity | {("sealring.peer", 1 - rank)}
        assert first["sealring.wait"] == {peer: account["waited_s"][1 - rank]}
        assert first["sealring.collectives"] == {
            identity | {("sealring.operation", "all_reduce")}: 1,
            identity | {("sealring.operation", "barrier")}: 1,
        }
        assert "sealring.errors" not in first
        assert second["sealring.sealed"].keys() == {identity}
        assert second["sealring.sealed"][identity] >= sealed
        assert second["sealring.errors"] == {identity | {("error.type", "group.out_of_step")}: 1}


def test_without_opentelemetry_there_are_no_metrics_and_no_error() -> None:
    code = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from sealring.observe.metrics import publish_metrics\n"
        "assert publish_metrics(dict) is False"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
