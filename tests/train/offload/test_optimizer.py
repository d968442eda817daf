"""The optimizer that parks its state, on a CPU stand-in that seals nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sealring.errors import ConfigurationError
from sealring.train.offload import OffloadedOptimizer


class OnCpu:
    """Stands in for a Parking."""

    device = torch.device("cpu")

    def park(self, tensor: torch.Tensor) -> Any:
        return SimpleNamespace(kept=tensor.clone())

    def prefetch(self, parked: Any) -> None: ...

    def fetch(self, parked: Any) -> torch.Tensor:
        kept: torch.Tensor = parked.kept
        return kept.clone()


class Exchanging(torch.optim.Optimizer):
    """Keeps two tensors for each parameter, and in each step swaps them and views them anew."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["one"] = torch.zeros(32, 64)
                state["other"] = torch.arange(32.0 * 64).view(32, 64)
            state["one"], state["other"] = state["other"].T, state["one"].T
            parameter += state["one"].reshape(-1)[: parameter.numel()]


def test_state_that_an_optimizer_exchanges_or_views_otherwise() -> None:
    one, other = (torch.nn.Parameter(torch.zeros(300)) for _ in range(2))
    parking: Any = OnCpu()
    offloaded, plain = OffloadedOptimizer([one], Exchanging, parking), Exchanging([other])
    for _ in range(4):
        offloaded.step()
        plain.step()
        assert torch.equal(one, other)


def test_a_group_that_is_added_later_is_trained() -> None:
    """A scheduler that was made before, and a saved state, know the new group too."""
    ours, theirs = (
        [torch.nn.Parameter(torch.ones(1000)) for _ in range(4)] for _ in range(2)
    )  # fmt: skip
    parking: Any = OnCpu()
    offloaded = OffloadedOptimizer(
        iter(ours[:2]), lambda groups: torch.optim.AdamW(groups, lr=0.1), parking, bucket_bytes=4096
    )
    plain = torch.optim.AdamW(theirs[:2], lr=0.1)
    for step in range(3):
        for one in (*ours, *theirs):
            one.grad = torch.full_like(one, step + 1.0)
        offloaded.step()
        plain.step()
        if step == 0:
            offloaded.add_param_group({"params": iter(ours[2:]), "lr": 0.5})
            plain.add_param_group({"params": theirs[2:], "lr": 0.5})
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
    assert len(offloaded.state_dict()["state"]) == 4
    with pytest.raises(ConfigurationError, match="more than one group"):
        offloaded.add_param_group({"params": ours[0]})


def test_a_state_of_other_buckets_is_refused() -> None:
    parameters = [torch.nn.Parameter(torch.ones(1000)) for _ in range(3)]
    parking: Any = OnCpu()

    def made(count: int, bucket_bytes: int) -> OffloadedOptimizer:
        return OffloadedOptimizer(
            parameters[:count], torch.optim.AdamW, parking, bucket_bytes=bucket_bytes
        )

    saved = made(3, 4096).state_dict()
    for other in (made(2, 4096), made(3, 8192), made(1, 4096)):
        with pytest.raises(ConfigurationError, match=r"has 3 groups, .* bucket_bytes"):
            other.load_state_dict(saved)
    made(3, 4096).load_state_dict(saved)
