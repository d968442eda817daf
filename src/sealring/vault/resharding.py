"""Changes the layout of a training state between running workers, without a disk.

    moved = reshard(held, wanted)

Both are state dicts as `dcp.save` and `dcp.load` take them. `held` is what this rank holds in the
old layout. `wanted` has the tensors of the new layout, which are filled. A rank that joins holds
nothing, and a rank that leaves wants nothing. Each byte is sent once in the group's sealed
messages, from a rank that holds it to a rank that does not. What a rank holds itself is not sent.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.tensor import DTensor

from sealring.errors import (
    ConfigurationError,
    ForeignPart,
    SealringError,
    Unsupported,
    WorkerFailed,
    named,
)
from sealring.formats.strict import read_json, strictly
from sealring.vault.checkpoint_form import dtype_name, load_entry
from sealring.vault.movement import Box, Layout, Move, Part, check_layout, digest_of, entry, plan
from sealring.vault.sealed import shown

_MESSAGE_BYTES: Final = 32 << 20
"""The most bytes that are staged at once for each pair of ranks."""
_LARGEST_LAYOUT: Final = 64 << 20
"""The most bytes of a rank's description: all ranks make room for the longest."""
_LARGEST_REASON: Final = 300
_DIGEST_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class Moved:
    """How many bytes one rank needed, received and kept."""

    bytes_needed: int
    """Bytes that the rank wants and does not hold."""
    bytes_received: int
    bytes_kept: int
    """Bytes that the rank wants and already held."""


@dataclass(frozen=True, slots=True)
class _Named:
    name: str
    part: Part


@dataclass(frozen=True, slots=True)
class _Said:
    """The message of each rank to the others. `problem`: why the rank cannot take part."""

    problem: str | None
    held: list[_Named]
    wanted: list[_Named]
    entries: list[str]
    """Names of wanted entries that are not tensors: only a holder knows how long they are."""


def reshard(
    held: Mapping[str, Any], wanted: dict[str, Any], process_group: dist.ProcessGroup | None = None
) -> Moved:
    """Fills `wanted` with what the ranks of the group hold. Every rank of the group calls it.

    A rank that already holds an entry that it wants keeps its own. If this raises, `wanted` may be
    partly filled.
    """
    rank = dist.get_group_rank(process_group, dist.get_rank()) if process_group else dist.get_rank()
    try:
        source, target = _State(held, "held"), _State(wanted, "wanted")
        source.require_apart(target)
        said = _Said(None, source.said(), target.said(), sorted(target.pickled))
        own: SealringError | None = None
    except SealringError as problem:
        own = problem
        said = _Said(f"{named(problem)}: {problem}", [], [], [])
    everyone = _gathered(said, process_group)
    if own is not None:
        raise own
    for other, one in enumerate(everyone):
        if one.problem is not None:
            raise WorkerFailed(
                f"rank {other} cannot take part in this change of layout: "
                f"{shown(one.problem, _LARGEST_REASON)}"
            )
    layouts = [_layout(other, one.held) for other, one in enumerate(everyone)]
    moves = plan(layouts, [_wanted(other, one, layouts) for other, one in enumerate(everyone)])
    incoming = [move for move in moves if move.target == rank]
    target.make_room(incoming)
    received = _exchange(moves, rank, source, target, process_group)
    kept = 0
    for move in incoming:
        if move.source == rank:
            kept += move.bytes
            target.fill(move, source.cut(move))
    target.finish()
    needed = sum(move.bytes for move in incoming) - kept
    return Moved(needed, received, kept)


class _State:
    """A state dict as boxes of bytes."""

    def __init__(self, state: Mapping[str, Any], what: str) -> None:
        flat, self._paths = flatten_state_dict(dict(state))
        self._whole = state
        self._wanted = what == "wanted"
        self.tensors: dict[str, tuple[torch.Tensor, Part]] = {}
        self.pickled: dict[str, torch.Tensor] = {}
        """Pickles of the entries that are not tensors; in a wanted state, the room for them."""
        for name, value in flat.items():
            if isinstance(value, torch.Tensor):
                if (found := _local(name, value)) is not None:
                    self.tensors[name] = found
            else:
                self.pickled[name] = torch.empty(0) if self._wanted else _pickle(name, value)

    def said(self) -> list[_Named]:
        tensors = [_Named(name, part) for name, (_, part) in self.tensors.items()]
        if self._wanted:
            return tensors
        return tensors + [_Named(name, entry(len(one))) for name, one in self.pickled.items()]

    def require_apart(self, other: _State) -> None:
        """Raises Unsupported if a wanted tensor shares its memory with another held tensor.

        Filling the wanted tensor would change the held one while it is sent.
        """
        own = {one.untyped_storage().data_ptr(): name for name, (one, _) in self.tensors.items()}
        for name, (tensor, part) in other.tensors.items():
            shared = own.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
            if shared is not None and not (
                shared == name and self.tensors[name][1] == part
                and self.tensors[name][0].data_ptr() == tensor.data_ptr()
            ):  # fmt: skip
                raise Unsupported(f"the wanted {name!r} shares its memory with {shared!r}: copy it")

    def make_room(self, incoming: list[Move]) -> None:
        for move in incoming:
            if move.name in self.pickled:  # one rank sends all of it
                self.pickled[move.name] = torch.empty(move.bytes, dtype=torch.uint8)

    def cut(self, move: Move) -> torch.Tensor:
        """The bytes of a move's box, row by row."""
        piece = self._view(move).detach().cpu().resolve_conj().resolve_neg()
        return piece.contiguous().reshape(-1).view(torch.uint8)

    def fill(self, move: Move, content: torch.Tensor) -> None:
        view = self._view(move).detach()
        view.copy_(content.view(view.dtype).reshape(view.shape))

    def finish(self) -> None:
        for name, content in self.pickled.items():
            value = load_entry(name, bytes(content.numpy()))
            set_element(self._whole, self._paths[name], value)  # type: ignore[arg-type]

    def _view(self, move: Move) -> torch.Tensor:
        if move.name in self.pickled:
            whole, start = self.pickled[move.name], [0]
        else:
            whole, part = self.tensors[move.name]
            start = part.box.offsets
        for axis, (offset, size) in enumerate(zip(move.box.offsets, move.box.sizes, strict=True)):
            whole = whole.narrow(axis, offset - start[axis], size)
        return whole


def _local(name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, Part] | None:
    """This rank's part of a tensor; None if the tensor's mesh does not include this rank."""
    if isinstance(tensor, DTensor):
        if tensor.device_mesh.get_coordinate() is None:
            return None
        local = tensor.to_local()
    else:
        local = tensor
    if local.layout is not torch.strided or local.is_quantized or local.is_meta:
        raise Unsupported(f"{name} is sparse, quantized or on the device 'meta'")
    if isinstance(tensor, DTensor) and any(one.is_partial() for one in tensor.placements):
        raise Unsupported(f"{name} is a DTensor of partial sums: redistribute it first")
    chunks = _create_chunk_list(tensor)
    if len(chunks) != 1 or list(chunks[0].sizes) != list(local.shape):
        raise Unsupported(f"{name} has a layout whose local part is no single box")
    box = Box(list(chunks[0].offsets), list(chunks[0].sizes))
    return local, Part(dtype_name(tensor.dtype), tensor.element_size(), list(tensor.shape), box)


def _pickle(name: str, value: Any) -> torch.Tensor:
    content = io.BytesIO()
    torch.save(value, content)
    load_entry(name, content.getvalue())
    return torch.frombuffer(bytearray(content.getvalue()), dtype=torch.uint8)


def _layout(rank: int, said: list[_Named]) -> Layout:
    layout = {one.name: one.part for one in said}
    check_layout(rank, layout)
    return layout


def _wanted(rank: int, said: _Said, held: list[Layout]) -> Layout:
    """What a rank wants. Entries that are not tensors get the length that their holder gives."""
    layout = dict(_layout(rank, said.wanted))
    for name in said.entries:
        # The rank's own entry if it holds one; else that of the first rank that does.
        holders = [other for other in (rank, *range(len(held))) if name in held[other]]
        if not holders:
            raise ForeignPart(f"rank {rank} wants {name!r}, and no rank holds it")
        layout[name] = held[holders[0]][name]
        if layout[name].dtype is not None:
            raise ForeignPart(
                f"{name!r} is a tensor on rank {holders[0]}, and rank {rank} wants one that is none"
            )
    return layout


def _gathered(said: _Said, group: dist.ProcessGroup | None) -> list[_Said]:
    """Gathers every rank's message as JSON, so that no pickle of another rank is loaded."""
    text = json.dumps(asdict(said)).encode()
    length = torch.tensor([len(text)], dtype=torch.int64)
    lengths = [torch.zeros_like(length) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, length, group=group)
    for rank, size in enumerate(lengths):
        if not 0 < int(size) <= _LARGEST_LAYOUT:
            raise ForeignPart(f"rank {rank} describes its layout in {int(size)} bytes")
    room = int(max(lengths))
    own = torch.zeros(room, dtype=torch.uint8)
    own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    rooms = [torch.empty_like(own) for _ in lengths]
    dist.all_gather(rooms, own, group=group)
    everyone = []
    for rank, (size, content) in enumerate(zip(lengths, rooms, strict=True)):
        try:
            document = read_json(bytes(content[: int(size)].numpy()))
            everyone.append(strictly(_Said, document, f"rank {rank}", "layout"))
        except (ValueError, ConfigurationError):
            raise ForeignPart(f"rank {rank} described no layout") from None
    return everyone


def _exchange(
    moves: list[Move], rank: int, source: _State, target: _State, group: dist.ProcessGroup | None
) -> int:
    """Sends and receives in rounds, one message for each pair of ranks in a round.

    Returns the bytes received. A message begins with the plan's digest. Without it, if a dishonest
    rank told them different layouts, ranks would put each other's bytes into the wrong places.
    """
    digest = torch.frombuffer(bytearray(digest_of(moves)), dtype=torch.uint8)
    outgoing = {peer: list(_messages(moves, rank, peer)) for peer in _peers(moves, rank, "target")}
    incoming = {peer: list(_messages(moves, peer, rank)) for peer in _peers(moves, rank, "source")}
    received = 0
    for number in range(
        max((len(one) for one in (*outgoing.values(), *incoming.values())), default=0)
    ):
        works, rooms = [], []
        for peer, messages in incoming.items():
            if number < len(messages):
                size = _DIGEST_BYTES + sum(move.bytes for move in messages[number])
                room = torch.empty(size, dtype=torch.uint8)
                works.append(dist.irecv(room, group=group, group_src=peer))
                rooms.append((peer, room, messages[number]))
        staged = []  # kept until they are sent
        for peer, messages in outgoing.items():
            if number < len(messages):
                pieces = [source.cut(move) for move in messages[number]]
                staged.append(torch.cat([digest, *pieces]))
                works.append(dist.isend(staged[-1], group=group, group_dst=peer))
        for work in works:
            if work is not None:
                work.wait()
        for peer, room, message in rooms:
            if not torch.equal(room[:_DIGEST_BYTES], digest):
                raise ForeignPart(
                    f"rank {peer} moves the state by another plan than this rank: a rank of the "
                    "group told them different layouts"
                )
            received += room.numel() - _DIGEST_BYTES
            start = _DIGEST_BYTES
            for move in message:
                target.fill(move, room[start : start + move.bytes].clone())
                start += move.bytes
    return received


def _peers(moves: list[Move], rank: int, side: str) -> list[int]:
    other = "source" if side == "target" else "target"
    found = {getattr(move, side) for move in moves if getattr(move, other) == rank}
    return sorted(found - {rank})


def _messages(moves: list[Move], source: int, target: int) -> Iterator[list[Move]]:
    message: list[Move] = []
    size = 0
    for move in moves:
        if (move.source, move.target) == (source, target):
            if message and size + move.bytes > _MESSAGE_BYTES:
                yield message
                message, size = [], 0
            message.append(move)
            size += move.bytes
    if message:
        yield message
