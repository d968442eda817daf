"""Every example on a GPU, with the CPU's script, reaches the losses of one process."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from sealring.core.settings import with_settings
from tests.examples.test_commands import printed_by
from tests.gpu.test_group import in_group

HERE = Path(__file__).parents[2] / "examples"
STEPS = 6
EXACT, HALVED, ROUNDED = 1e-4, 2e-4, 2e-3
EXAMPLES: dict[str, tuple[str, dict[str, Any], float]] = {
    "ddp": ("ddp", {}, EXACT),
    "ddp in bf16": ("ddp_hooks", {"hook": "bf16"}, ROUNDED),
    "ddp in fp16": ("ddp_hooks", {"hook": "fp16"}, HALVED),
    "ddp by PowerSGD": ("ddp_hooks", {"hook": "powersgd"}, ROUNDED),
    "zero1": ("zero1", {}, EXACT),
    "fsdp": ("fsdp", {}, EXACT),
    "hybrid sharding": ("hybrid_sharding", {}, EXACT),
    "tensor parallel": ("tensor_parallel", {}, EXACT),
    "tensor and data parallel": ("tensor_and_data_parallel", {}, EXACT),
    "pipeline, gpipe": ("pipeline", {"schedule": "gpipe"}, EXACT),
    "pipeline, 1f1b": ("pipeline", {"schedule": "1f1b"}, EXACT),
}


def losses_of_all(rank: int) -> dict[str, list[float]]:
    """Runs all examples in one group, because starting a group takes longer than training in it."""
    sys.path.insert(0, str(HERE))
    found = {"alone": importlib.import_module("gpt").train(STEPS, device="cuda")}
    for name, (module, options, _) in EXAMPLES.items():
        found[name] = importlib.import_module(module).train(STEPS, device="cuda", **options)
    return found


@pytest.fixture(scope="module", params=["host", "stream"])
def losses(request: pytest.FixtureRequest) -> list[dict[str, list[float]]]:
    """The losses by rank, whether the host or a stream waits for results."""
    found: list[Any] = in_group(4, losses_of_all, **with_settings({}, cuda_wait=request.param))
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("example", EXAMPLES)
def test_losses_are_those_of_one_process(
    losses: list[dict[str, list[float]]], example: str
) -> None:
    for by_rank in losses:
        assert by_rank["alone"][-1] < 0.9 * by_rank["alone"][0]  # the model learns
        assert by_rank[example] == losses[0][example]
        assert by_rank[example] == pytest.approx(by_rank["alone"], rel=EXAMPLES[example][2])


def test_a_killed_worker_comes_back_to_its_gpu(tmp_path: Path) -> None:
    alone = printed_by(
        sys.executable, "examples/gpt.py", "--steps", "5", "--device", "cuda", "--json"
    )
    result = json.loads(
        printed_by(
            str(Path(sys.executable).parent / "sealring"), "run", "-n", "2", "--max-restarts", "1",
            "examples/elastic.py", "--device", "cuda", "--steps", "5", "--json",
            "--checkpoint", str(tmp_path / "gpt.pt"), "--kill-at", "3",
        )
    )  # fmt: skip
    assert (result["restarts"], result["resumed_at"]) == (1, 3)
    assert result["losses"] == pytest.approx(json.loads(alone)["losses"], rel=EXACT)
