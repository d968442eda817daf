"""Compares two checkpoints number by number."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from cryptography import x509

from sealring.errors import ForeignPart, NotAVault
from sealring.vault.checkpoint_export import load_whole
from sealring.vault.checkpoint_reader import CheckpointReader
from sealring.vault.vault import Vault


class NamedCheckpoint(NamedTuple):
    """A checkpoint as records name it, with the authorities and job of the workers that signed."""

    name: str
    """NAME@VERSION in the vault."""
    manifest: str
    """The manifest's digest."""
    content: str | None
    authorities: Sequence[x509.Certificate]
    job: str


class Difference(NamedTuple):
    """The largest difference between two numbers in the same place of two checkpoints."""

    size: float
    """Relative to the tensor's largest number; infinite where it cannot be measured."""
    where: str
    """The tensor's or entry's name."""


def largest_difference(
    vault: Vault, recorded: NamedCheckpoint, repeated: NamedCheckpoint
) -> Difference:
    """Compares a recorded checkpoint with the one that a repetition saved into the same vault.

    Each must have the content that the records name. All that is not a floating-point number must
    be equal: whole numbers, generators' states, names, types and shapes.
    """
    return difference_of_states(_state(vault, recorded), _state(vault, repeated))


def difference_of_states(recorded: dict[str, Any], repeated: dict[str, Any]) -> Difference:
    one, other = dict(_walk("", recorded)), dict(_walk("", repeated))
    worst = Difference(0.0, "")
    for name in sorted(one.keys() | other.keys()):
        size = _between(one[name], other[name]) if name in one and name in other else math.inf
        if size > worst.size:
            worst = Difference(size, name)
    return worst


def _state(vault: Vault, named: NamedCheckpoint) -> dict[str, Any]:
    name, _, version = named.name.rpartition("@")
    if not name or not version.isdecimal():
        raise NotAVault(
            f"{named.name[:80]!r} is no checkpoint of a vault: its name is NAME@VERSION"
        )
    reader = CheckpointReader(
        vault, name, version=int(version), authorities=named.authorities, job=named.job
    )
    state = load_whole(reader)
    if (reader.loaded[1], reader.content_digest) != (named.manifest, named.content):
        raise ForeignPart(
            f"{named.name} in {vault.path} is not the checkpoint that the records name: give a "
            "copy of the run's own vault"
        )
    return state


def _walk(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    inner: Iterator[tuple[Any, Any]] | None = None
    if isinstance(value, dict):
        inner = iter(value.items())
    elif isinstance(value, list | tuple):
        inner = iter(enumerate(value))
    if inner is None:
        yield name, value
        return
    yield f"{name}/", (type(value), len(value))
    for key, each in inner:
        yield from _walk(f"{name}.{key}" if name else str(key), each)


def _between(one: Any, other: Any) -> float:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        if type(one) is float and type(other) is float:
            return _between(
                torch.tensor(one, dtype=torch.float64), torch.tensor(other, dtype=torch.float64)
            )
        return 0.0 if type(one) is type(other) and one == other else math.inf
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return math.inf
    if not (one.is_floating_point() or one.is_complex()):
        return 0.0 if torch.equal(one, other) else math.inf
    wide = torch.complex128 if one.is_complex() else torch.float64
    here, there = one.to(wide), other.to(wide)
    finite = torch.isfinite(here) & torch.isfinite(there)
    if not torch.equal(here[~finite].nan_to_num(), there[~finite].nan_to_num()) or not torch.equal(
        torch.isnan(here), torch.isnan(there)
    ):
        return math.inf
    if not bool(finite.any()):
        return 0.0
    apart = float((here[finite] - there[finite]).abs().max())
    if not apart:
        return 0.0
    scale = float(here[finite].abs().max())
    return apart / scale if scale else math.inf
