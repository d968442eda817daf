"""torch's symmetric memory is refused for sealed groups, and left as it is for others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.workers import Workers


def error_of(name: str) -> str:
    try:
        torch.ops.symm_mem.one_shot_all_reduce(torch.ones(1), "sum", name)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def errors(rank: int, world: int) -> tuple[str, str, str]:
    symmetric: Any = torch._C._distributed_c10d._SymmetricMemory
    sealed: Any = dist.group.WORLD
    plaintext: Any = dist.new_group(backend="gloo")
    try:
        symmetric.rendezvous(torch.ones(1), sealed.group_name)
        rendezvous = "no error"
    except Exception as error:
        rendezvous = f"{type(error).__name__}: {error}"
    return error_of(sealed.group_name), rendezvous, error_of(plaintext.group_name)


@pytest.mark.threat("G6")
def test_peers_memory_is_not_reached_through_a_sealed_group(workers: Workers) -> None:
    for operator, rendezvous, others in workers.run(errors, world=2):
        assert operator.startswith("Unsupported: ")
        assert "uses torch.ops.symm_mem.one_shot_all_reduce with a sealed group" in operator
        assert rendezvous.startswith("Unsupported: ")
        assert "uses symmetric memory (rendezvous) with a sealed group" in rendezvous
        # torch's own answer: it has no kernel for CPUs.
        assert others.startswith("NotImplementedError: Could not run 'symm_mem::one_shot")
