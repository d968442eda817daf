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
from sealring.formats.files import not_written
from sealring.vault import safetensors
from sealring.vault.checkpoint_form import raw_bytes
from sealring.vault.checkpoint_reader import CheckpointReader
from sealring.vault.checkpoint_writer import CheckpointWriter
from sealring.vault.files import check_output, move_into_place, new_output, unfinished


def load_whole(reader: CheckpointReader) -> dict[str, Any]:
    """The whole state of a checkpoint, in this process alone."""
    state: dict[str, Any] = {}
    reader.reset()
    _load(reader, state, _EmptyStateDictLoadPlanner())  # type: ignore[no-untyped-call]
    return state


def load_only(reader: CheckpointReader, only: str) -> tuple[dict[str, Any], list[str]]:
    """The state below one entry of a checkpoint, and the names of what was left out.

    Nothing else is read.
    """
    state: dict[str, Any] = {}
    reader.reset()
    planner = _Below(only)
    _load(reader, state, planner)
    return _below(state, only, only), list(planner.left_out)


def _load(
    reader: CheckpointReader, state: dict[str, Any], planner: _EmptyStateDictLoadPlanner
) -> None:
    try:
        _load_state_dict(state, reader, planner=planner, no_dist=True)
    except BaseException as problem:
        # torch wraps what a rank raises, in an exception of its own kind.
        for error, _ in getattr(problem, "failures", {}).values():
            raise error from None
        raise


def export_torch(
    reader: CheckpointReader, out: str | os.PathLike[str], *, only: str | None = None
) -> list[str]:
    """Writes it as `torch.save` does, in plaintext; `weights_only=True` loads it.

    `only`: the one entry to write, such as "model". Returns the names of what was left out.
    """
    target = Path(out)
    check_output(target)
    state, left_out = (load_whole(reader), []) if only is None else load_only(reader, only)
    with _plaintext_file(target) as file:
        torch.save(state, file)
    return left_out


def export_safetensors(
    reader: CheckpointReader, out: str | os.PathLike[str], *, only: str | None = None
) -> list[str]:
    """Writes its tensors as safetensors, in plaintext, under the names that they are saved with.

    What is no tensor has no place there: such a checkpoint is refused. `only`: the one entry to
    write, such as "model", with names below it. Returns the names of what was left out.
    """
    target = Path(out)
    check_output(target)
    state, left_out = (load_whole(reader), []) if only is None else load_only(reader, only)
    flat: dict[str, torch.Tensor] = {}
    _flatten("", state, flat)
    entries = [safetensors.Entry(name, one.dtype, tuple(one.shape)) for name, one in flat.items()]
    head = safetensors.header(entries, {"format": "pt"})
    with _plaintext_file(target) as file:
        file.write(head)
        for tensor in flat.values():
            file.write(raw_bytes(tensor.contiguous()))
    return left_out


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
            "name the entry to export (`--only model`), or export with torch.save's form"
        )


class _Below(_EmptyStateDictLoadPlanner):
    """Loads what is below one entry, and nothing else."""

    def __init__(self, only: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._only = only
        self.left_out: dict[str, None] = {}

    def set_up_planner(self, state_dict: Any, metadata: Any = None, *others: Any) -> None:
        super().set_up_planner(state_dict, metadata, *others)
        if not state_dict:
            raise ConfigurationError(
                f"the checkpoint has no entry {self._only!r}: it has {', '.join(self.left_out)}"
            )

    def _should_include_key(self, key: str, metadata: Any) -> bool:
        steps = (metadata.planner_data or {}).get(key, (key,))
        above = [".".join(map(str, steps[:depth])) for depth in range(1, len(steps) + 1)]
        name = above[-1]
        if name == self._only or name.startswith(f"{self._only}."):
            # torch numbers the elements of lists, and writes other keys as strings.
            lists = [one for one, step in zip(above, steps[1:], strict=False) if type(step) is int]
            if any(self._only.startswith(f"{one}.") for one in lists):
                raise ConfigurationError(f"{self._only!r} is in the list {lists[0]!r}: export that")
            return True
        # The outermost entry that holds nothing of what is loaded.
        outer = (one for one in above if not f"{self._only}.".startswith(f"{one}."))
        self.left_out[next(outer, name)] = None
        return False


def _below(state: dict[str, Any], only: str, name: str) -> dict[str, Any]:
    """What `only` names in a state; `name`: the whole name, for a single value.

    A name with dots is one key, or keys inside each other; a state may have both.
    """
    found: dict[str, Any] = {}
    for key, inner in state.items():
        if key == only:
            found |= inner if isinstance(inner, dict) else {name: inner}
        elif key.startswith(f"{only}."):
            found[key.removeprefix(f"{only}.")] = inner
        elif only.startswith(f"{key}."):
            found |= _below(inner, only.removeprefix(f"{key}."), name)
    return found


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
