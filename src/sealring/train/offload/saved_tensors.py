"""Activations that autograd saves for the backward pass, parked in host memory as ciphertext."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from sealring.errors import ConfigurationError
from sealring.train.offload.parking import Parked, Parking

SMALLEST_BYTES: Final = 64 << 10


@contextmanager
def offload_saved_tensors(
    parking: Parking, *, smallest_bytes: int = SMALLEST_BYTES, ahead: int = 4
) -> Iterator[None]:
    """Around a forward pass: what it saves is parked, and fetched again by the backward pass.

    The backward pass needs them in about the opposite order, so `ahead` of them are brought back
    before they are asked for. Parameters and tensors below `smallest_bytes` stay where they are.
    """
    if ahead < 0:
        raise ConfigurationError("ahead counts tensors: 0 or more")
    order: list[weakref.ref[Parked]] = []
    places: weakref.WeakKeyDictionary[Parked, int] = weakref.WeakKeyDictionary()

    def pack(tensor: torch.Tensor) -> torch.Tensor | Parked:
        stays = (
            tensor.device != parking.device
            or tensor.nbytes < smallest_bytes
            or tensor.layout != torch.strided
            or _is_parameter(tensor)
        )
        if stays:
            return tensor
        parked = parking.park(tensor)
        places[parked] = len(order)
        order.append(weakref.ref(parked))
        return parked

    def unpack(packed: torch.Tensor | Parked) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        at = places[packed]
        parking.prefetch(packed)
        for reference in reversed(order[max(0, at - ahead) : at]):
            if (earlier := reference()) is not None:
                parking.prefetch(earlier)
        return parking.fetch(packed)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _is_parameter(tensor: torch.Tensor) -> bool:
    """Or a view of one: it stays in the GPU's memory anyway."""
    base = tensor._base if tensor._is_view() else tensor
    return base is not None and base.is_leaf and base.requires_grad
