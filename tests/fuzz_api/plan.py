"""The calls of a case, which all ranks compute from the seed and the case's number."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final, Literal

import torch

FLOATS: Final = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS: Final = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
OTHERS: Final = (torch.bool, torch.complex64, torch.complex128)
DTYPES: Final = FLOATS + INTEGERS + OTHERS

REDUCING: Final = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "coalesced")
MOVING: Final = (
    "broadcast", "all_gather", "all_gather_into_tensor", "gather", "scatter", "all_to_all",
    "all_to_all_single", "unequal_all_to_all", "send_recv", "batched_messages", "functional",
)  # fmt: skip
OBJECTS: Final = ("all_gather_object", "broadcast_object", "gather_object", "scatter_object")
OPERATIONS: Final = (*REDUCING, *MOVING, *OBJECTS, "barrier")

REDUCTIONS: Final = ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG")
VIEWS: Final = (
    "plain",
    "offset",
    "strided",
    "transposed",
    "expanded",
    "parameter",
    "channels_last",
)

Ending = Literal["shutdown", "abort", "drop", "drop in a cycle", "drop with works", "timeout"]
ENDINGS: Final[tuple[Ending, ...]] = (
    "shutdown", "abort", "drop", "drop in a cycle", "drop with works", "timeout"
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Step:
    operation: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    view: str
    reduction: str
    root: int
    """The root's rank in the group."""
    exact: bool
    """Whether the values are such that no order of additions rounds."""
    seed: int

    def __str__(self) -> str:
        what = f"{self.operation} {self.dtype} {list(self.shape)} {self.view}"
        if self.operation in REDUCING:
            what += f" {self.reduction}"
        return f"{what} root={self.root}{'' if self.exact else ' rounded'}"


@dataclass(frozen=True, slots=True)
class Case:
    number: int
    members: tuple[int, ...]
    batches: tuple[tuple[Step, ...], ...]
    """A batch's calls start at once; their works are waited for in the order of `waits`."""
    waits: tuple[tuple[int, ...], ...]
    threads: bool
    """Whether another thread uses a second group at the same time."""
    ending: Ending


def plan(seed: int, number: int, world: int) -> Case:
    rng = random.Random(f"{seed}/{number}")
    members = list(range(world))
    if rng.random() < 0.4:
        members = rng.sample(members, rng.randint(1, world))
    size = len(members)
    batches = tuple(
        tuple(_step(rng, size) for _ in range(rng.choice((1, 1, 1, 2, 3))))
        for _ in range(rng.randint(2, 8))
    )
    waits = tuple(tuple(rng.sample(range(len(batch)), len(batch))) for batch in batches)
    endings = ENDINGS if rng.random() < 0.1 else ENDINGS[:-1]
    return Case(
        number, tuple(sorted(members)), batches, waits, rng.random() < 0.2, rng.choice(endings)
    )


def _step(rng: random.Random, size: int) -> Step:
    operation = rng.choice(OPERATIONS)
    dtype = rng.choice(DTYPES)
    reduction = rng.choice(REDUCTIONS)
    shape = tuple(rng.choice((1, 2, 3, 5, 16)) for _ in range(rng.randint(0, 4)))
    if rng.random() < 0.05:
        shape = (*shape, 0)
    elif rng.random() < 0.15:
        shape = (rng.choice((1000, 4096, 70001, 300000)),)
    return Step(
        operation,
        dtype,
        shape,
        rng.choice(VIEWS),
        reduction,
        rng.randrange(size),
        dtype not in FLOATS or rng.random() < 0.7,
        rng.getrandbits(32),
    )
