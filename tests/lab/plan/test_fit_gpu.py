"""A GPU's profile is made from the results of `python -m sealring.lab gpu`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from statistics import median

import pytest

from sealring.core.schedule import Operation
from sealring.errors import ConfigurationError
from sealring.lab.plan.answer import machine
from sealring.lab.plan.collectives import Cluster
from sealring.lab.plan.fit import gpu_profile_of
from sealring.lab.plan.layouts import ClusterSetting, alone
from sealring.lab.plan.profiles import Way, load_network
from sealring.lab.plan.validate import validate
from sealring.lab.results import StepCase, write_results
from tests.cli.test_plan import planned
from tests.lab.plan.measured import results_of
from tests.lab.plan.test_validate import imagined
from tests.lab.report.examples import GPU, with_gpu


def test_rates_are_the_kernels() -> None:
    profile = gpu_profile_of(with_gpu())
    assert profile.device.kind == "gpu"
    assert profile.device.cores_per_host.value == 1
    assert profile.device.memory_bytes.value == 150e9
    assert profile.device.fp32_flops.value == pytest.approx(2 * 8192**3 / 2.9e-3)
    assert profile.sealed is not None
    assert profile.sealed.seal_bytes_per_s.value == pytest.approx(2**30 / 1.07e-3)
    together = (
        1 / profile.sealed.open_bytes_per_s.value + 1 / profile.sealed.reduce_bytes_per_s.value
    )
    assert 1 / together == pytest.approx(2**30 / 1.2e-3)
    assert profile.sealed.call_s.value == 1.9e-5
    assert profile.cc is None


@pytest.mark.parametrize(("way", "transport"), [("sealed", "peer"), ("plain", "nccl")])
def test_an_all_reduce_takes_what_it_took(way: Way, transport: str) -> None:
    """sealring's fastest wire is used, and NCCL, even if Gloo is faster."""
    results = with_gpu()
    profile = gpu_profile_of(results)
    (case,) = [
        each
        for each in results.allreduce
        if (each.variant, each.transport, each.ranks) == (way, transport, 4)
    ]
    setting = ClusterSetting(profile, way, load_network(profile.network), Cluster(4, 4))
    predicted = alone(setting, Operation.ALL_REDUCE, case.bytes)
    assert predicted == pytest.approx(median(case.seconds), rel=0.01)


def test_a_wire_that_is_faster_than_its_kernels_is_not_what_limits() -> None:
    quick = [
        dataclasses.replace(case, seconds=[1e-6] * 9) if case.transport == "peer" else case
        for case in with_gpu().allreduce
    ]
    profile = gpu_profile_of(with_gpu(allreduce=quick))
    assert profile.sealed is not None
    assert profile.sealed.inside_bytes_per_s.value > 1e12


def test_training_alone_says_how_much_of_the_arithmetic_is_reached() -> None:
    alone_ = StepCase(
        "gpt2",
        124_439_808,
        1,
        4,
        512,
        "fp32",
        0.0,
        0,
        "none",
        "compute",
        GPU,
        0,
        40,
        [0.01] * 3,
        [],
    )
    usual, measured = gpu_profile_of(with_gpu()), gpu_profile_of(with_gpu(step=[alone_]))
    assert usual.device.efficiency.value == 0.4
    assert 0.01 < measured.device.efficiency.value < 0.4


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        ({"gpu": with_gpu().gpu[:2]}, "have no seal among a GPU's kernels"),
        ({"gpu": []}, "have no copy among a GPU's kernels"),
        ({"allreduce": []}, "have no plain all-reduce on NVIDIA H200"),
    ],
)
def test_results_that_lack_a_part_are_refused_with_a_way_out(
    missing: dict[str, list[object]], sentence: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"{sentence}.* -m sealring.lab gpu --results"):
        gpu_profile_of(with_gpu(**missing))  # type: ignore[arg-type]


def test_a_file_with_a_gpu_plans_for_the_gpu_unless_the_cpu_is_meant(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    both = results_of(imagined())
    gpu = with_gpu()
    exchanges = [case for case in gpu.allreduce if case.device == GPU]
    both = dataclasses.replace(
        both, machine=gpu.machine, gpu=gpu.gpu, allreduce=[*both.allreduce, *exchanges]
    )
    write_results(path, both)
    assert machine(str(path)).name == "this GPU"
    assert machine(str(path), "cpu").name == "this machine"
    found = json.loads(
        planned("gpt2", "--ranks", "4", "--per-host", "4", "--profile", str(path), "--json")
    )
    assert (found["profile"], found["hosts"]) == ("this GPU", 1)
    assert [each["way"] for each in found["ways"]] == ["plain", "sealed"]
    # Cores are validated as before; cases of a GPU do not count for them.
    assert {case.ranks for case in validate(both).cases} == {2, 3, 4}
    assert len(validate(both).cases) == len(validate(results_of(imagined())).cases)


def test_ranks_that_share_a_gpu_share_its_memory(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write_results(path, with_gpu())
    fits = [
        json.loads(
            planned(
                "gpt2-xl", "--ranks", "16", "--per-host", per_host, "--profile", str(path), "--json"
            )
        )["layouts"][0]["fits"]
        for per_host in ("1", "16")
    ]
    assert fits == [True, False]
