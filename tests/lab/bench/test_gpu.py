"""`python -m sealring.lab gpu` without a GPU: the compared ways, their turns and the bars."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from sealring.core.settings import HOST
from sealring.errors import ConfigurationError
from sealring.lab.__main__ import app
from sealring.lab.bench import gpu, suite
from sealring.lab.bench.gpu import WIRES, over, rows_of
from sealring.lab.bench.harness import Cases
from sealring.lab.bench.workers import CPU, Report, WorkerPlace, run_workers
from tests.lab.report.examples import whole, with_gpu

PLACE = WorkerPlace("cuda", "NVIDIA H200", gpus=8)


# ---- bars


def test_there_is_one_row_for_each_bar() -> None:
    bars = {row.what: row.bar for row in rows_of(with_gpu())}
    assert bars == {
        "copy on the device": "-",
        "product of matrices, TF32": "-",
        "seal": "≥ 950",
        "open": "≥ 950",
        "open_reduce fp32": "≥ 700",
        "hop fp32": "≥ 450",
        "seal of 4 KiB": "≤ 20",
        "all_reduce 256 MiB, 2 ranks, host: unsealed": "≤ 1.05",
        "all_reduce 256 MiB, 2 ranks, host: Gloo": "≤ 0.5",
        "all_reduce 256 MiB, 2 ranks, peer: NCCL": "-",
        "all_reduce 256 MiB, 2 ranks, nccl: NCCL": "≤ 1",
        "all_reduce 256 MiB, 4 ranks, host: unsealed": "≤ 1.05",
        "all_reduce 256 MiB, 4 ranks, host: Gloo": "≤ 0.5",
        "all_reduce 256 MiB, 4 ranks, peer: NCCL": "≤ 0.2",
        "all_reduce 256 MiB, 4 ranks, nccl: NCCL": "≤ 1",
        "DDP step, gpt2, 4 ranks, host: unsealed": "≤ 1.05",
        "DDP step, gpt2-xl, 4 ranks, host: unsealed": "≤ 1.05",
    }


def test_a_row_says_what_was_measured_and_whether_it_is_enough() -> None:
    rows = {row.what: row for row in rows_of(with_gpu())}
    seal = rows["seal"]
    assert (seal.value, seal.unit, seal.met) == (1003.5, "GB/s", True)
    assert seal.reached == pytest.approx(1003.5 / 950)
    assert (rows["seal of 4 KiB"].value, rows["seal of 4 KiB"].unit) == (19.0, "µs")
    peer = rows["all_reduce 256 MiB, 4 ranks, peer: NCCL"]
    assert peer.value == pytest.approx(0.04, rel=0.05)
    assert peer.low is not None
    assert peer.high is not None
    assert peer.low <= peer.value <= peer.high
    assert rows["all_reduce 256 MiB, 4 ranks, host: Gloo"].met is False


def test_cores_have_no_bars_and_samples_that_are_missing_no_rows() -> None:
    assert rows_of(whole()) == []
    empty = [dataclasses.replace(case, seconds=[]) for case in with_gpu().gpu]
    assert not [row for row in rows_of(with_gpu(gpu=empty)) if row.part == "kernels"]
    cut = [
        dataclasses.replace(case, seconds=case.seconds[:3]) if case.variant == "sealed" else case
        for case in with_gpu().step
    ]
    assert not [row for row in rows_of(with_gpu(step=cut)) if row.part == "step"]


# ---- all-reduces


def test_every_wire_is_measured_beside_what_it_is_compared_with() -> None:
    assert gpu.ways_over(["host"]) == [
        ("sealed", "host"),
        ("unsealed", "host"),
        ("plain", "tcp"),
    ]
    assert gpu.ways_over(["peer"]) == [("sealed", "peer"), ("plain", "nccl")]
    assert gpu.ways_over(["hosts"]) == [("sealed", "hosts"), ("unsealed", "hosts")]
    assert len(gpu.ways_over(WIRES)) == 8


def test_the_wire_is_set_for_a_group_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEALRING_GPU_WIRE", raising=False)
    with over("peer"):
        assert os.environ["SEALRING_GPU_WIRE"] == "peer"
        with over("nccl"):
            assert os.environ["SEALRING_GPU_WIRE"] == "nccl"
        assert os.environ["SEALRING_GPU_WIRE"] == "peer"
    assert "SEALRING_GPU_WIRE" not in os.environ


def test_half_of_the_ranks_are_on_each_of_two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEALRING_SETTINGS", raising=False)
    found = []
    for rank in range(4):
        with over("hosts", rank, 4):
            found.append((os.environ["SEALRING_GPU_WIRE"], HOST.read(os.environ)))
    assert found == [("nccl", f"host-{rank // 2}") for rank in range(4)]
    assert "SEALRING_SETTINGS" not in os.environ


@pytest.mark.timeout(180)
def test_ways_take_turns_and_their_sums_are_right() -> None:
    """Uses the same worker with tensors on the CPU, which has these two ways."""
    ways = [("sealed", "host"), ("plain", "tcp")]
    reports = [
        report for _, report in run_workers(2, gpu.time_all_reduces, CPU, 2, 1 << 16, ways, 3)
    ]
    (found,) = [each for each in reports if isinstance(each, Cases)]
    assert [each for each in reports if each is not found] == [1 / 3, 2 / 3, 1.0]
    sealed, plain = found.cases
    assert len(sealed.seconds) == len(plain.seconds) == 3
    assert (sealed.variant, sealed.transport) == ("sealed", "host")
    assert (plain.variant, plain.transport) == ("plain", "tcp")
    assert sealed.sealed_bytes == 1 << 16  # two ranks: each seals half, then half again
    assert (plain.sealed_bytes, plain.opened_bytes) == (0, 0)


# ---- steps


def test_as_many_steps_are_trained_as_there_is_time_for() -> None:
    assert gpu.affordable(0.1, 2) == 11
    assert gpu.affordable(5.0, 2) == 6
    assert gpu.affordable(60.0, 2) == 5
    assert gpu.affordable(60.0, 2, most=3) == 3
    assert (gpu.batch_of(354_823_168), gpu.batch_of(1_557_611_200)) == (4, 1)


def switching(rank: int, report: Report) -> None:
    dist.init_process_group("sealring")
    groups: list[Any] = [dist.new_group(backend="sealring") for _ in range(2)]
    turn = gpu.BucketTurn(groups[0])
    step, parameters, batch = gpu.trained_by("gpt-demo", turn, torch.device("cpu"))
    sealed = []
    for group in (*groups, *groups):  # in the first two steps DDP lays out its buckets
        turn.group, turn.buckets = group, 0
        before = [each.account()["sealed_bytes"] for each in groups]
        step()
        after = [each.account()["sealed_bytes"] for each in groups]
        sealed.append([b - a for a, b in zip(before, after, strict=True)])
    report((parameters, batch, turn.buckets, sealed[2:]))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.timeout(180)
def test_one_ddp_reduces_by_the_group_whose_turn_it_is() -> None:
    whole_model = 832_256 * 4  # two ranks: each seals half of the gradients, then half again
    for _, found in run_workers(2, switching):
        parameters, batch, buckets, sealed = found
        assert (parameters, batch) == (832_256, 4)
        assert buckets >= 1
        assert sealed == [[whole_model, 0], [0, whole_model]]


# ---- what there is to do


def labels(jobs: list[Any]) -> list[str]:
    return [job.label for job in jobs]


def test_parts_models_and_ranks_choose_what_is_done() -> None:
    jobs = suite.gpu(["allreduce", "step"], [2, 4], ["gpt2-xl"], ["host", "peer"], PLACE)
    assert labels(jobs) == [
        "all-reduce, 2 ranks on one GPU, host",
        "all-reduce, 2 ranks on one GPU, peer",
        "all-reduce, 4 ranks on one GPU, host",
        "all-reduce, 4 ranks on one GPU, peer",
        "training gpt2-xl, 4 ranks on one GPU",
    ]
    assert labels(suite.gpu(["kernels"], [2], [], WIRES, PLACE)) == ["kernels of NVIDIA H200"]
    many = suite.gpu(["allreduce", "step"], [2, 16], ["gpt2"], WIRES, PLACE)
    assert labels(many) == [
        *(f"all-reduce, 2 ranks on one GPU, {wire}" for wire in ("host", "peer", "nccl", "hosts")),
        *(f"all-reduce, 16 ranks on one GPU, {wire}" for wire in ("nccl", "hosts")),
        "training gpt2, 2 ranks on one GPU",
    ]
    (only,) = suite.gpu(["allreduce"], [2, 16], [], ["host"], PLACE)
    assert only.label == "all-reduce, 2 ranks on one GPU, host"


def test_all_has_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "gpu" not in suite.everything(quick=True)
    monkeypatch.setattr(suite, "find_place", lambda wanted: PLACE)
    monkeypatch.setattr(WorkerPlace, "free_bytes", lambda _: 139 << 30)
    quick, full = (suite.everything(quick=each)["gpu"] for each in (True, False))
    assert len(quick) == 6
    assert len(full) == 16
    monkeypatch.setattr(
        WorkerPlace, "free_bytes", lambda _: 79 << 30
    )  # too little for four ranks of the largest model
    smaller = labels(suite.everything(quick=False)["gpu"])
    assert smaller[-1] == "training gpt2-medium, 4 ranks on one GPU"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--part", "kernel"], "'kernel' is not a part; there is kernels, allreduce, step"),
        (["--model", "mlp"], "'mlp' is not a GPT-2; there is gpt2, gpt2-medium, gpt2-large"),
        (["--wires", "host,rope"], "'rope' is not a wire; there is host, peer, nccl"),
        (["--step-wire", "auto"], "'auto' is not a wire; there is host, peer, nccl"),
        ([], "torch finds no GPU here"),
    ],
)
def test_refused(arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(app, ["gpu", *arguments])
    assert type(done.exception) is ConfigurationError
    assert str(done.exception).startswith(sentence)
