"""Checkpoints out of a vault and into it: torch.save's form, and safetensors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

from sealring.errors import ConfigurationError, Unsupported
from sealring.identity.private_files import not_written
from sealring.vault import safetensors
from sealring.vault.checkpoint_form import raw_bytes
from sealring.vault.checkpoint_reader import CheckpointReader
from sealring.vault.checkpoint_writer import CheckpointWriter
from sealring.vault.files import check_output, move_into_place
from sealring.vault.outputs import new_output, unfinished


def load_whole(reader: CheckpointReader) -> dict[str, Any]:
    """The whole state of a checkpoint, in this process alone."""
    state: dict[str, Any] = {}
    reader.reset()
    planner = _EmptyStateDictLoadPlanner()  # type: ignore[no-untyped-call]
    _load_state_dict(state, reader, planner=planner, no_dist=True)
    return state


def export_torch(reader: CheckpointReader, out: str | os.PathLike[str]) -> None:
    """Writes it as `torch.save` does, in plaintext; `weights_only=True` loads it."""
    target = Path(out)
    check_output(target)
    state = load_whole(reader)
    with _plaintext_file(target) as file:
        torch.save(state, file)


def export_safetensors(reader: CheckpointReader, out: str | os.PathLike[str]) -> None:
    """Writes its tensors as safetensors, in plaintext, under the names that they are saved with.

    What is no tensor has no place there: such a checkpoint is refused.
    """
    target = Path(out)
    check_output(target)
    flat: dict[str, torch.Tensor] = {}
    _flatten("", load_whole(reader), flat)
    entries = [safetensors.Entry(name, one.dtype, tuple(one.shape)) for name, one in flat.items()]
    head = safetensors.header(entries, {"format": "pt"})
    with _plaintext_file(target) as file:
        file.write(head)
        for tensor in flat.values():
            file.write(raw_bytes(tensor.contiguous()))


def import_safetensors(writer: CheckpointWriter, source: str | os.PathLike[str]) -> None:
    """Seals the tensors of a safetensors file as a checkpoint."""
    path = Path(source)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            state = dict(safetensors.read(file, size, str(path)))
    except OSError as problem:
        raise ConfigurationError(f"{path} cannot be read: {problem.strerror}") from problem
    writer.reset()
    _save_state_dict(state, writer, no_dist=True)


def _flatten(prefix: str, value: Any, into: dict[str, torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        into[prefix] = value
    elif isinstance(value, dict):
        for name, inner in value.items():
            _flatten(f"{prefix}.{name}" if prefix else str(name), inner, into)
    else:
        raise Unsupported(
            f"{prefix!r} is {type(value).__name__} and no tensor, so safetensors cannot hold it: "
            "export with torch.save's form, or save the model's state alone"
        )


@contextmanager
def _plaintext_file(target: Path) -> Iterator[Any]:
    """A file of mode 0600 that gets its name when it is complete."""
    try:
        with unfinished(target) as temporary:
            with new_output(temporary, target) as file:
                yield file
            move_into_place(temporary, target)
    except OSError as problem:
        raise not_written(target, problem) from problem
