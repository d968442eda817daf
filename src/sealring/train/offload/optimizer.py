"""An optimizer whose state is in host memory as ciphertext while it is not used.

Parameters are split into buckets, each with its own optimizer. A step handles one bucket after the
other: while it computes with one bucket's state, the next one is copied in and the previous one
copied out. So the GPU holds the state of about three buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from sealring.errors import ConfigurationError
from sealring.train.offload.parking import Parked, Parking

BUCKET_BYTES: Final = 64 << 20
_ALIGNMENT: Final = 256
_SMALLEST_BYTES: Final = 1 << 10
"""Smaller tensors, such as step counters, stay with the optimizer."""

Groups = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _Piece:
    """One tensor of the state, and its place in its bucket's memory."""

    parameter: torch.Tensor
    name: str
    shape: torch.Size
    dtype: torch.dtype
    start: int
    bytes: int


@dataclass(slots=True)
class _Bucket:
    optimizer: torch.optim.Optimizer
    pieces: list[_Piece] = field(default_factory=list)
    bytes: int = 0
    parked: Parked | None = None

    def gather(self, device: torch.device) -> torch.Tensor:
        """Copies the state to be parked into contiguous memory, and notes the new layout."""
        self.pieces, self.bytes = [], 0
        found = []
        for parameter, state in self.optimizer.state.items():
            for name, value in state.items():
                if not (isinstance(value, torch.Tensor) and value.device == device):
                    continue
                if value.nbytes < _SMALLEST_BYTES:
                    continue
                piece = _Piece(parameter, name, value.shape, value.dtype, self.bytes, value.nbytes)
                self.pieces.append(piece)
                found.append(value)
                self.bytes += -(-value.nbytes // _ALIGNMENT) * _ALIGNMENT
        flat = torch.empty(self.bytes, dtype=torch.uint8, device=device)
        for piece, value in zip(self.pieces, found, strict=True):
            self.view(flat, piece).copy_(value)
        return flat

    @staticmethod
    def view(flat: torch.Tensor, piece: _Piece) -> torch.Tensor:
        part = flat[piece.start : piece.start + piece.bytes]
        return part.view(piece.dtype).view(piece.shape)

    def attach(self, flat: torch.Tensor) -> None:
        for piece in self.pieces:
            self.optimizer.state[piece.parameter][piece.name] = self.view(flat, piece)

    def detach(self) -> None:
        for piece in self.pieces:
            self.optimizer.state[piece.parameter][piece.name] = None


class OffloadedOptimizer(torch.optim.Optimizer):
    """Any torch optimizer, by buckets. `make` must make an optimizer for parameter groups.

        parking = Parking("cuda")
        OffloadedOptimizer(model.parameters(), lambda groups: AdamW(groups, lr=1e-4), parking)

    An optimizer that computes over all parameters together gives other results by buckets. Clip
    gradients before the step, as usual. `state_dict` brings all of the state into the GPU's memory.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter] | Groups,
        make: Callable[[Groups], torch.optim.Optimizer],
        parking: Parking,
        *,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._parking, self._make, self._bucket_bytes = parking, make, bucket_bytes
        self._buckets: list[_Bucket] = []
        super().__init__(parameters, {})  # it calls add_param_group
        self.defaults = dict(self._buckets[0].optimizer.defaults) if self._buckets else {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        given = param_group["params"]
        parameters: list[Any] = [given] if isinstance(given, torch.Tensor) else list(given)
        known = {id(one) for group in self.param_groups for one in group["params"]}
        if any(id(one) in known for one in parameters):
            raise ConfigurationError("a parameter is in more than one group")
        for part in _dealt(parameters, self._bucket_bytes):
            bucket = _Bucket(self._make([{**param_group, "params": part}]))
            self._buckets.append(bucket)
            # The bucket's own groups, so that a scheduler that changes a group has an effect.
            self.param_groups += bucket.optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._prefetch(0)
        for index, bucket in enumerate(self._buckets):
            self._prefetch(index + 1)
            flat = self._bring_in(bucket)
            bucket.optimizer.step()
            self._send_out(bucket, flat if _unchanged(bucket, flat) else None)
        return loss

    def state_dict(self) -> dict[str, Any]:
        states: dict[int, Any] = {}
        groups: Groups = []
        for bucket in self._buckets:
            flat = self._bring_in(bucket)
            one = bucket.optimizer.state_dict()
            shift = sum(len(group["params"]) for group in groups)
            for number, state in one["state"].items():
                states[number + shift] = dict(state)
            for group in one["param_groups"]:
                groups.append({**group, "params": [p + shift for p in group["params"]]})
            if flat is not None:
                bucket.detach()  # the parked copy is still valid
        return {"state": states, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if len(state_dict["param_groups"]) != len(self.param_groups):
            raise ConfigurationError(
                f"the state has {len(state_dict['param_groups'])} groups, and this optimizer has "
                f"{len(self.param_groups)}, one for each bucket: make it of the same parameters, "
                "with the bucket_bytes that the state was saved with"
            )
        saved = iter(state_dict["param_groups"])
        shift = 0
        for bucket in self._buckets:
            groups = [dict(next(saved)) for _ in bucket.optimizer.param_groups]
            size = sum(len(group["params"]) for group in groups)
            for group in groups:
                group["params"] = [p - shift for p in group["params"]]
            state = {
                number - shift: state_dict["state"][number]
                for number in range(shift, shift + size)
                if number in state_dict["state"]
            }
            bucket.optimizer.load_state_dict({"state": state, "param_groups": groups})
            self._send_out(bucket, None)
            shift += size
        self.param_groups = [
            group for bucket in self._buckets for group in bucket.optimizer.param_groups
        ]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for bucket in self._buckets:
            bucket.optimizer.zero_grad(set_to_none)

    def _prefetch(self, index: int) -> None:
        if index < len(self._buckets):
            parked = self._buckets[index].parked
            if parked is not None:
                self._parking.prefetch(parked)

    def _bring_in(self, bucket: _Bucket) -> torch.Tensor | None:
        if bucket.parked is None:
            return None
        flat = self._parking.fetch(bucket.parked)
        bucket.attach(flat)
        return flat

    def _send_out(self, bucket: _Bucket, flat: torch.Tensor | None) -> None:
        """Parks a bucket's state. `flat` is the memory that holds all of it, or None."""
        if flat is None:
            flat = bucket.gather(self._parking.device)
        bucket.parked = self._parking.park(flat) if bucket.bytes else None
        if bucket.parked is not None:
            bucket.detach()


def _unchanged(bucket: _Bucket, flat: torch.Tensor | None) -> bool:
    """Whether all of the state is still where it was attached, as optimizers update in place."""
    if flat is None:
        return False
    count = 0
    for state in bucket.optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.device == flat.device:
                count += value.nbytes >= _SMALLEST_BYTES
    return count == len(bucket.pieces) and all(
        _is_same(bucket.optimizer.state[piece.parameter].get(piece.name), bucket.view(flat, piece))
        for piece in bucket.pieces
    )


def _is_same(value: Any, attached: torch.Tensor) -> bool:
    """Whether a value has the same memory, type and layout as the attached tensor."""
    return isinstance(value, torch.Tensor) and _layout(value) == _layout(attached)


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _dealt(
    parameters: list[torch.nn.Parameter], bucket_bytes: int
) -> Iterator[list[torch.nn.Parameter]]:
    """Splits parameters, in order, into buckets of up to `bucket_bytes`, or one larger
    parameter."""
    bucket: list[torch.nn.Parameter] = []
    size = 0
    for parameter in parameters:
        if bucket and size + parameter.nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.nbytes
    if bucket:
        yield bucket
