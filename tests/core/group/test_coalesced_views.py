"""Coalesced calls on tensors that are not contiguous."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.workers import Workers


def reduces_transposed_tensors(rank: int, world: int) -> list[float]:
    tensors = [torch.full((3, 5), rank + 1.0).t() for _ in range(2)]
    dist.all_reduce_coalesced(tensors)
    return [tensor.sum().item() for tensor in tensors]


def test_transposed_tensors_get_their_results(workers: Workers) -> None:
    assert workers.run(reduces_transposed_tensors) == [[45.0, 45.0]] * 2
