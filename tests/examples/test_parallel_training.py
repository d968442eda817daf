"""Every example trains over sealed links to the losses of one process."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.workers import Workers

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 8


def losses(rank: int, world: int, example: str, options: dict[str, Any]) -> list[float]:
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))  # as for a script that is started there
    result: list[float] = importlib.import_module(example).train(STEPS, **options)
    return result


@pytest.fixture(scope="module")
def alone(workers: Workers) -> list[float]:
    """The losses of one process, without torch.distributed."""
    [result] = workers.run(losses, "gpt", {}, world=1, group=False)
    assert result[-1] < 0.8 * result[0]  # it learns, so that equal losses mean something
    return result


def sealed(workers: Workers, example: str, **options: Any) -> list[float]:
    by_rank = workers.run(losses, example, options, world=4)
    assert all(result == by_rank[0] for result in by_rank)
    return by_rank[0]


@pytest.mark.parametrize(
    ("example", "options"),
    [
        ("ddp", {}),
        ("zero1", {}),
        ("fsdp", {}),
        ("hybrid_sharding", {}),
        ("tensor_parallel", {}),
        ("tensor_and_data_parallel", {}),
        ("pipeline", {"schedule": "gpipe"}),
        ("pipeline", {"schedule": "1f1b"}),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else value,
)
def test_losses_are_those_of_one_process(
    workers: Workers, alone: list[float], example: str, options: dict[str, Any]
) -> None:
    # Sums are taken in another order, so the last bits of fp32 differ, by some 1e-7 a step.
    assert sealed(workers, example, **options) == pytest.approx(alone, rel=1e-5)


# A gradient's rounding error is at most 2**-9 of it in bf16 and 2**-12 in fp16, at each of the
# hops; AdamW's step of 2e-3 a weight passes on a part of that.
@pytest.mark.parametrize(("hook", "tolerance"), [("bf16", 2e-3), ("fp16", 2e-4)])
def test_half_precision_hooks_change_the_losses_by_their_rounding(
    workers: Workers, alone: list[float], hook: str, tolerance: float
) -> None:
    result = sealed(workers, "ddp_hooks", hook=hook)
    assert result == pytest.approx(alone, rel=tolerance)
    assert result != pytest.approx(alone, rel=1e-7)  # the hook was really used


def test_powersgd_trains_nearly_as_well(workers: Workers, alone: list[float]) -> None:
    """Rank 4 is an approximation; what it leaves out is added to the next step."""
    result = sealed(workers, "ddp_hooks", hook="powersgd")
    exact = 4  # the hook's start_powerSGD_iter
    assert result[:exact] == pytest.approx(alone[:exact], rel=1e-5)
    assert result[exact + 1 :] != pytest.approx(alone[exact + 1 :], rel=1e-6)
    assert result == pytest.approx(alone, rel=1e-3)
