"""`sealring.tune` makes DDP with the bucket size that was planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import sealring
from sealring.errors import ConfigurationError
from sealring.lab.plan.answer import planned_bucket_mb
from sealring.lab.results import write_results
from tests.lab.plan.measured import results_of
from tests.lab.plan.test_validate import imagined


@pytest.fixture
def results(tmp_path: Path) -> Path:
    path = tmp_path / "results.json"
    write_results(path, results_of(imagined()))
    return path


def model() -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))


def test_a_group_comes_first() -> None:
    with pytest.raises(ConfigurationError, match="call init_process_group first"):
        sealring.tune(model())


def test_on_cpus_a_profile_is_needed() -> None:
    with pytest.raises(ConfigurationError, match=r"pass profile='results\.json'"):
        planned_bucket_mb(model(), ranks=2)


def test_the_planned_bucket_is_the_answers(results: Path) -> None:
    planned = planned_bucket_mb(model(), ranks=2, profile=results)
    assert planned is None or planned > 0


def test_links_that_cost_per_message_want_larger_buckets(results: Path) -> None:
    import dataclasses

    from sealring.lab.results import read_results
    from tests.lab.plan.measured import figure

    truth = imagined()
    assert truth.sealed is not None
    slow = dataclasses.replace(truth, sealed=dataclasses.replace(truth.sealed, call_s=figure(0.05)))
    path = results.with_name("slow.json")
    write_results(path, results_of(slow))
    assert read_results(path).complete
    whole = sum(p.numel() for p in model().parameters()) * 4 / (1 << 20)
    planned = planned_bucket_mb(model(), ranks=2, profile=path)
    assert planned is not None
    assert planned >= whole


def test_ddp_gets_the_bucket_and_the_callers_own_wins(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: 2)
    monkeypatch.setattr(
        "torch.nn.parallel.DistributedDataParallel",
        lambda module, **options: given.append(options) or module,
    )
    sealring.tune(model(), profile=results, static_graph=True)
    sealring.tune(model(), profile=results, bucket_cap_mb=3)
    assert given[0]["bucket_cap_mb"] == planned_bucket_mb(model(), ranks=2, profile=results)
    assert given[0]["static_graph"] is True
    assert given[1]["bucket_cap_mb"] == 3
