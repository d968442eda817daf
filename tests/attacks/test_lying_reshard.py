"""One admitted worker lies while running workers move a job's state to another layout."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sealring.errors import ForeignPart, OutOfStep, PeerLost, SealringError, named
from sealring.vault import resharding
from tests.workers import Workers

Document = dict[str, Any]


def part(name: str, dtype: str | None, item: int, size: list[int]) -> Document:
    box = {"offsets": [0] * len(size), "sizes": size}
    return {"name": name, "part": {"dtype": dtype, "item": item, "size": size, "box": box}}


def says(**told: Any) -> bytes:
    return json.dumps({"problem": None, "held": [], "wanted": [], "entries": []} | told).encode()


def say(text: bytes, length: int | None = None) -> None:
    """Sends this text, of this claimed length, as `reshard` does before anything moves."""
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([len(text) if length is None else length]))
    if length is not None:
        return
    room = torch.zeros(int(max(lengths)), dtype=torch.uint8)
    room[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    dist.all_gather([torch.empty_like(room) for _ in lengths], room)


LIES: dict[str, tuple[bytes, int | None]] = {
    "a layout of 1 TiB": (b"", 1 << 40),
    "no length": (b"", 0),
    "a length below 0": (b"", -5),
    "no JSON": (b"\xff" * 40, None),
    "elements out of the tensor": (
        says(held=[part("w", "float32", 4, [4])]).replace(b'[0]', b'[9]'), None
    ),
    "another size of an element": (
        says(held=[part("w", "float32", 1 << 40, [4]), part("step", None, 1, [9])]), None
    ),
    "an entry of 1 TiB": (says(held=[part("step", None, 1, [1 << 40])]), None),
    "an entry with large elements": (says(held=[part("step", None, 1 << 40, [1])]), None),
    "a tensor in an entry's place": (says(held=[part("step", "float32", 4, [4])]), None),
}  # fmt: skip


def lied_to(rank: int, world: int) -> list[str]:
    """Rank 1 tells one lie after the other; the group stays usable in between."""
    found = []
    for text, length in (*LIES.values(), (says(problem="\x1b[2Jgone" + "x" * 10_000), None)):
        if rank == 1:
            say(text, length)
            continue
        try:
            resharding.reshard({}, {"w": torch.zeros(4), "step": 0})
        except SealringError as problem:
            found.append(f"{named(problem)}: {problem}")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == world
    return found


@pytest.mark.threat("P4")
def test_a_rank_that_describes_what_it_cannot_hold(workers: Workers) -> None:
    first, _, third = workers.run(lied_to, world=3)
    assert first == third
    assert len(first) == len(LIES) + 1
    for lie, said in zip(LIES, first, strict=False):
        assert said.startswith("vault.foreign_part: "), lie
        assert "rank 1" in said, lie
    assert first[-1].startswith("worker_failed: rank 1 cannot take part")
    assert first[-1].isprintable()
    assert len(first[-1]) < 500


def plan_and_send(rank: int, world: int, lie: str) -> str:
    """Rank 1 holds what rank 0 wants, but sends something else."""
    held = {"w": torch.arange(8.0)} if rank == 1 else {}
    wanted = {"w": torch.zeros(8)} if rank == 0 else {}
    if rank == 1:
        real = dist.isend

        def send(message: torch.Tensor, **where: Any) -> Any:
            if lie == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            changed = {
                "more": torch.cat([message, message]),
                "fewer": message[:-1],
                "another plan": torch.cat([torch.zeros(32, dtype=torch.uint8), message[32:]]),
            }[lie]
            return real(changed, **where)

        dist.isend = send  # type: ignore[assignment]
    try:
        resharding.reshard(held, wanted)
    finally:
        if rank == 1:
            dist.isend = real
    return "moved"


@pytest.mark.parametrize(
    ("lie", "refused"),
    [("more", OutOfStep), ("fewer", OutOfStep), ("dies", PeerLost), ("another plan", ForeignPart)],
)
@pytest.mark.threat("P4")
def test_a_rank_that_sends_something_else_or_ends(
    workers: Workers, lie: str, refused: type[SealringError]
) -> None:
    honest, _ = workers.run(plan_and_send, lie, world=2, errors=True)
    assert type(honest) is refused, honest
    assert "rank 1" in str(honest)


def told_differently(rank: int, world: int) -> list[float] | str:
    """Rank 1 gives the others different layouts: rank 0 sends `a`, and rank 2 expects `b`."""
    if rank == 1:
        say(says(held=[part("b", "float32", 4, [4])]).ljust(1000))
        dist.send(torch.zeros(32 + 16, dtype=torch.uint8), dst=2)
        return "lied"
    if rank == 0:
        held = {"a": torch.full((4,), 1.0), "b": torch.full((4,), 2.0), "c": torch.zeros(900)}
        resharding.reshard(held, {})
        return "sent"
    real = dist.all_gather

    def gathered(rooms: list[torch.Tensor], own: torch.Tensor, **where: Any) -> None:
        real(rooms, own, **where)
        told = says(held=[part("a", "float32", 4, [4])], wanted=[part("c", "float32", 4, [900])])
        if own.dtype == torch.uint8:
            text = bytearray(told.ljust(rooms[1].numel()))
            rooms[1].copy_(torch.frombuffer(text, dtype=torch.uint8))

    dist.all_gather = gathered  # type: ignore[assignment]
    wanted = {"a": torch.zeros(4), "b": torch.zeros(4)}
    try:
        resharding.reshard({}, wanted)
    finally:
        dist.all_gather = real
    return wanted["b"].tolist()


@pytest.mark.threat("P4")
def test_ranks_that_were_told_different_layouts_do_not_mix_their_tensors(workers: Workers) -> None:
    results = workers.run(told_differently, world=3, errors=True)
    assert results[:2] == ["sent", "lied"]
    assert type(results[2]) is ForeignPart
    assert "rank 0 moves the state by another plan" in str(results[2])
