"""Where a bench runs: the choice of CPUs or GPUs, and the workers' environment."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sealring.errors import ConfigurationError
from sealring.lab.bench.step import StepSetting, Work
from sealring.lab.bench.workers import CPU, WorkerPlace, find_place, nccl_on_a_shared_gpu

TWO = WorkerPlace("cuda", "NVIDIA H200", gpus=2)


def found(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    """Makes torch report this number of GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")


def test_gpus_are_taken_when_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, 2)
    assert find_place("cpu") == CPU
    assert find_place("cuda") == find_place("auto") == TWO


def test_without_a_gpu_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, 0)
    assert find_place("auto") == CPU
    with pytest.raises(ConfigurationError, match=r"^torch finds no GPU here: measure on CPUs, or"):
        find_place("cuda")


def test_ranks_take_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.environ", {})
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda _: None)
    for rank in range(3):
        TWO.enter(rank, 3)
    assert [str(each) for each in taken] == ["cuda:0", "cuda:1", "cuda:0"]
    assert CPU.enter(1, 2).type == "cpu"


@pytest.mark.parametrize(("ranks", "shared"), [(2, False), (3, True)])
def test_nccl_is_told_of_several_ranks_on_a_gpu_and_of_nothing_else(
    ranks: int, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment: dict[str, str] = {}
    monkeypatch.setattr("os.environ", environment)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda _: None)
    assert TWO.shared_by(ranks) is shared
    TWO.enter(1, ranks)
    assert environment == (nccl_on_a_shared_gpu(1) if shared else {})
    assert nccl_on_a_shared_gpu(1)["NCCL_HOSTID"] != nccl_on_a_shared_gpu(2)["NCCL_HOSTID"]
    assert not CPU.shared_by(64)


def test_the_plain_variant_is_torchs_own_backend() -> None:
    assert (CPU.backend, TWO.backend) == ("gloo", "nccl")


def test_a_wire_is_for_tensors_on_gpus() -> None:
    settings = (StepSetting("mlp", 1, "fp32", 25.0),)
    on_cpu = Work(2, settings, wire="peer")
    assert on_cpu.environment() == {"SEALRING_TRANSPORT": "shm"}
    assert on_cpu.sealed_transport == "shm"
    on_gpu = Work(2, settings, place=TWO, wire="peer")
    assert on_gpu.environment()["SEALRING_GPU_WIRE"] == "peer"
    assert "CUDA_MODULE_LOADING" not in on_gpu.environment()
    assert replace(on_gpu, wire="nccl").environment()["CUDA_MODULE_LOADING"] == "EAGER"
    assert on_gpu.sealed_transport == "peer"
    assert Work(2, settings, place=TWO).sealed_transport == "gpu"
