"""The tensors of a step: their values, and how they lie in memory."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch
from torch.testing._internal.two_tensor import TwoTensor

from tests.fuzz_api.plan import REDUCING, Step


def values(step: Step, rank: int, index: int, shape: Sequence[int]) -> torch.Tensor:
    """Returns values that sealring and Gloo share, but that differ by rank and by tensor."""
    generator = torch.Generator().manual_seed(step.seed * 4099 + rank * 101 + index)
    count = math.prod(shape)
    if step.dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool().reshape(tuple(shape))
    if not step.exact:
        drawn = torch.randn(count, generator=generator, dtype=torch.float64)
    elif step.operation in REDUCING and step.reduction == "PRODUCT":
        drawn = 2.0 ** torch.randint(0, 2, (count,), generator=generator)
    else:
        low = 0 if step.dtype == torch.uint8 else -4
        drawn = torch.randint(low, 5, (count,), generator=generator).double()
    return drawn.to(step.dtype).reshape(tuple(shape))


def laid_out(tensor: torch.Tensor, view: str, *, written: bool) -> torch.Tensor:
    """Lays the values out elsewhere; `written` tensors must not overlap themselves."""
    if view == "parameter":
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor.clone()
        return torch.nn.Parameter(tensor.clone(), requires_grad=False)
    if view == "conjugated" and tensor.is_complex():
        return tensor.conj().resolve_conj().conj()
    if view == "negated" and tensor.dtype not in (torch.bool, torch.uint8):
        return torch._neg_view(-tensor)
    if view == "subclass":
        return TwoTensor(tensor.clone(), tensor.clone())
    if view == "offset":
        memory = torch.zeros(tensor.numel() + 7, dtype=tensor.dtype)
        result = memory[3 : 3 + tensor.numel()].reshape(tensor.shape)
    elif view == "strided" and tensor.dim() > 0:
        memory = torch.zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]), dtype=tensor.dtype)
        result = memory[..., ::2]
    elif view == "transposed" and tensor.dim() > 1:
        result = torch.zeros(tuple(reversed(tensor.shape)), dtype=tensor.dtype)
        result = result.permute(*reversed(range(tensor.dim())))
    elif view == "channels_last" and tensor.dim() == 4:
        result = torch.empty_like(tensor, memory_format=torch.channels_last)
    elif view == "expanded" and tensor.dim() > 0 and not written and tensor.numel() > 0:
        # All values are those of the first row; the caller makes the plain tensor equal.
        return tensor[:1].clone().expand(tensor.shape)
    else:
        return tensor.clone()
    result.copy_(tensor)
    return result


def make(
    step: Step,
    rank: int,
    index: int,
    shape: Sequence[int] | None = None,
    *,
    views: bool,
    written: bool,
) -> torch.Tensor:
    tensor = values(step, rank, index, step.shape if shape is None else shape)
    if step.view == "expanded" and not written and tensor.dim() > 0 and tensor.numel() > 0:
        tensor = tensor[:1].expand(tensor.shape).contiguous()
    return laid_out(tensor, step.view, written=written) if views else tensor.clone()


def same(ours: object, theirs: object, step: Step) -> bool:
    """Compares bit for bit, unless the order of additions could round."""
    if isinstance(ours, TwoTensor):
        return same(ours.a, theirs, step) and same(ours.b, theirs, step)
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            return False
        if not _rounds(step):
            return torch.equal(ours.detach().clone(), theirs.detach())
        tolerance = 64 * torch.finfo(ours.abs().dtype).eps
        wide = torch.complex128 if ours.is_complex() else torch.float64
        return torch.allclose(ours.to(wide), theirs.to(wide), rtol=tolerance, atol=tolerance)
    return ours == theirs


def _rounds(step: Step) -> bool:
    """Tells whether the step rounds; a division by the number of ranks always does."""
    if step.operation not in REDUCING or not (
        step.dtype.is_floating_point or step.dtype.is_complex
    ):
        return False
    return not step.exact or step.reduction == "AVG"


def an_object(step: Step, rank: int) -> object:
    rng = random.Random(step.seed + rank)
    choices = (
        rng.random(),
        "text" * rng.randint(0, 50),
        {"rank": rank, "list": [rng.random() for _ in range(rng.randint(0, 300))]},
        None,
        (rank, b"bytes" * rng.randint(0, 4000)),
    )
    return rng.choice(choices)
