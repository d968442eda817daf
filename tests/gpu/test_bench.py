"""The benchmarks on a GPU end, reduce to the right sums and keep their measurements."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sealring.lab.bench import gpu
from sealring.lab.bench.gpu import rows_of
from sealring.lab.bench.harness import BenchSession
from sealring.lab.bench.workers import WorkerPlace, find_place
from sealring.lab.results import read_results
from tests.cli.test_commands import sealring
from tests.lab.bench.test_models import has_torchvision


def one_gpu() -> WorkerPlace:
    place = find_place("cuda")
    return WorkerPlace("cuda", place.name, gpus=1)


def test_every_kernel_has_its_bar() -> None:
    (measured,) = gpu.measure_kernels(one_gpu())
    rows = rows_of(BenchSession("bench", measured=[measured]).results())
    assert [row.what for row in rows if row.reached is not None] == [
        "seal", "open", "open_reduce fp32", "hop fp32", "seal of 4 KiB"
    ]  # fmt: skip
    assert all(row.value > 0 for row in rows)


@pytest.mark.parametrize("wires", [["host"], ["peer"], ["nccl"], ["hosts"]])
def test_all_reduces_over_each_wire_come_to_the_sum(wires: list[str]) -> None:
    """A wrong sum would fail the worker."""
    (found,) = gpu.measure_allreduces(one_gpu(), 2, 8 << 20, wires, blocks=3)
    assert [(each.variant, each.transport) for each in found.cases] == gpu.ways_over(wires)
    assert found.cases[0].sealed_bytes == 8 << 20


@pytest.mark.timeout(300)
def test_a_step_is_measured_sealed_and_unsealed() -> None:
    (found,) = gpu.measure_step(one_gpu(), "gpt2", 2, "host", most=3)
    sealed, unsealed = found.cases
    assert (sealed.variant, unsealed.variant) == ("sealed", "unsealed")
    assert len(sealed.seconds) == len(unsealed.seconds) == 3
    assert (sealed.sealed_bytes, unsealed.sealed_bytes) == (124_439_808 * 4, 0)
    assert 12 <= sealed.all_reduces <= 14  # buckets of 25 MB, and one embedding of 154 MB


MODELS = [
    "mlp",
    *(
        pytest.param(name, marks=pytest.mark.skipif(not has_torchvision(), reason="no torchvision"))
        for name in ("resnet50", "vgg16")
    ),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", MODELS)
def test_bench_step_trains_on_the_gpu_against_nccl(model: str, tmp_path: Path) -> None:
    kept = tmp_path / "results.json"
    done = sealring(
        "bench", "step", "--device", "cuda", "--model", model, "--ranks", "2", "--steps", "3",
        "--variants", "compute,plain,sealed", "--json", "--results", str(kept),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    (case,) = printed["cases"]
    assert case["nccl_ms"] > 0
    assert case["sealed_bytes"] >= case["parameters"] * 4
    results = read_results(kept)
    assert {(c.variant, c.transport) for c in results.step} == {
        ("compute", "none"),
        ("plain", "nccl"),
        ("sealed", "gpu"),
    }
    assert {c.device for c in results.step} == {printed["device"]} != {"cpu"}
    assert bool(printed["notes"]) is (results.machine.gpus.count(printed["device"]) < 2)
    sealed = next(c for c in results.step if c.variant == "sealed")
    assert [part.name for part in sealed.split] == ["compute", "transfer"]
