"""`dcp.load` from a vault, on any number of ranks: each reads the chunks that it needs."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, NoReturn

import torch
from cryptography import x509
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from sealring import _native
from sealring.core.hooks import run_notes
from sealring.errors import ForeignPart, NotAVault, RolledBack, SealringError, Unsupported
from sealring.vault import checkpoint_check as checking
from sealring.vault import objects, signing
from sealring.vault.checkpoint_check import Location
from sealring.vault.checkpoint_form import (
    KIND,
    has_own_memory,
    pickled_anew,
    rank_and_world,
    raw_bytes,
)
from sealring.vault.closing import Closable
from sealring.vault.storage import VaultPath
from sealring.vault.vault import Stored, Vault

_LOG = logging.getLogger("sealring")
_TOLD: Final[set[VaultPath]] = set()


class _Refused(Metadata):
    """Stands in for refused metadata: every use of it raises the error.

    torch replaces an error of read_metadata by an AssertionError, but passes on later errors.
    """

    def __init__(self, reason: SealringError) -> None:
        object.__setattr__(self, "_reason", reason)

    def __getattribute__(self, name: str) -> Any:
        if name in Metadata.__dataclass_fields__:
            raise object.__getattribute__(self, "_reason")
        return object.__getattribute__(self, name)


class CheckpointReader(Closable, StorageReader):
    """Loads the newest checkpoint of a name, or the given version.

    `authorities` and `job` say whose workers may have signed it; the default is this worker's own.
    `close()` leaves the vault open; `loaded` stays readable. One reader does one load at a time.
    """

    def __init__(
        self,
        vault: Vault,
        name: str,
        *,
        version: int | None = None,
        authorities: Sequence[x509.Certificate] | None = None,
        job: str | None = None,
    ) -> None:
        super().__init__()
        self._vault = vault
        self._version = version
        self._authorities = authorities
        self._job = job
        self.checkpoint_id = objects.check_name(name)
        self._what = f"the reader of {name!r}"
        self._stored: Stored | None = None
        self._failure: SealringError | None = None
        self.bytes_read = 0
        """Bytes of sealed files that this reader has read."""
        self.bytes_needed = 0
        """Bytes of plaintext that were asked for."""

    def _release(self) -> None:
        if self._stored is not None:
            self._stored.copy.place.key.wipe()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise Unsupported("a CheckpointReader holds keys and stays in its process")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.checkpoint_id = objects.check_name(str(checkpoint_id))
        self._stored = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._failure = None
        try:
            self.require_open()
            self._vault.refresh()
            self._stored = self._vault.find(self.checkpoint_id, self._version)
            self._valid = self._open(self._stored)
            return self._valid.metadata
        except SealringError as problem:
            self._failure = problem
            return _Refused(problem)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        if self._failure is not None:
            raise self._failure
        assert self._stored is not None
        if is_coordinator and self._version is None:
            _tell_what_the_ledger_proves(self._vault, self._stored)

    @property
    def loaded(self) -> tuple[str, str]:
        """NAME@VERSION and the manifest's digest of what was loaded."""
        assert self._stored is not None
        manifest = self._stored.manifest
        return f"{manifest.name}@{manifest.object_version}", manifest.digest

    @property
    def content_digest(self) -> str:
        """The digest of the loaded plaintext and layout, by which records name a checkpoint."""
        return self._valid.content_digest

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Adds which checkpoint this rank found: each rank opens the vault by itself."""
        assert self._stored is not None
        return replace(plan, storage_data=_found(self._stored))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Raises RolledBack if the ranks have found different checkpoints."""
        for rank, plan in enumerate(plans):
            if not isinstance(plan.storage_data, list):
                raise Unsupported(
                    "the planner dropped the plan's storage_data: use DefaultLoadPlanner"
                )
            if plan.storage_data != plans[0].storage_data:
                raise RolledBack(
                    f"rank {rank} found version {plan.storage_data[0]} of {self.checkpoint_id!r}, "
                    f"and rank 0 version {plans[0].storage_data[0]}, or another one under this "
                    "number: the ranks see different copies of the vault. Nothing was loaded"
                )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        self.require_open()
        stored, valid = self._stored, self._valid
        assert stored is not None
        if plan.storage_data != _found(stored):  # this load would read another checkpoint's bytes
            raise Unsupported(
                f"this reader of {self.checkpoint_id!r} began another load before this one had "
                "ended: give each load a CheckpointReader of its own"
            )
        by_part: dict[str, list[tuple[ReadItem, Location]]] = defaultdict(list)
        for item in plan.items:
            location = _location(stored, valid.metadata, item)
            by_part[location.part].append((item, location))
        with self._vault.reading():
            stored = self._same_again(stored, valid)
            parts = {part.name: part for part in stored.manifest.parts}
            for name, items in by_part.items():
                root, whose = valid.roots[name], stored.whose
                with stored.copy.opened(parts[name], whose) as reader:
                    self.bytes_read += checking.expect_signed(
                        reader, stored.copy, parts, name, root, whose
                    )
                    self._read_part(reader, valid.metadata, items, planner)
        self._stored, self._valid = stored, valid
        for notes in run_notes.all():
            notes.note_checkpoint_in(*self.loaded, valid.content_digest)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _same_again(self, stored: Stored, valid: checking.Valid) -> Stored:
        """Finds the checkpoint again: a rotation may have sealed it anew meanwhile."""
        manifest = stored.manifest
        found = self._vault.find(manifest.name, manifest.object_version)
        if found.manifest.digest != manifest.digest:
            raise ForeignPart(f"{stored.whose} was exchanged while it was loaded: load it again")
        valid.require_files(found.manifest.parts, found.whose)
        return found

    def _read_part(
        self,
        reader: _native.SealedFileReader,
        metadata: Metadata,
        items: list[tuple[ReadItem, Location]],
        planner: LoadPlanner,
    ) -> None:
        boxes: list[Any] = []
        tensors, entries = [], []
        for item, location in items:
            if item.type == LoadItemType.BYTE_IO:
                room = bytearray(location.length)
                entries.append((item, room))
                boxes.append((room, location.start, 1, [len(room)], [0], [len(room)]))
                continue
            target = planner.resolve_tensor(item).detach()
            if target.shape != item.lengths:
                raise Unsupported(
                    f"{item.dest_index.fqn} is planned as {list(item.lengths)}, and the planner "
                    f"gave {list(target.shape)}: change the plan and the tensor together"
                )
            dtype, shape = _saved(metadata, item)
            filled = _fillable(target, dtype)
            tensors.append((item, target, filled))
            view = raw_bytes(filled)
            box = (location.start, filled.element_size(), shape)
            boxes.append((view, *box, list(item.storage_offsets), list(item.lengths)))
        reader.read_boxes(boxes)
        self.bytes_needed += sum(len(box[0]) for box in boxes)
        self.bytes_read += reader.bytes_read
        for item, target, filled in tensors:
            if filled is not target:
                target.copy_(filled)
            planner.commit_tensor(item, target)
        for item, room in entries:
            planner.load_bytes(item, pickled_anew(item.storage_index.fqn, bytes(room)))

    def _open(self, stored: Stored) -> checking.Valid:
        """Checks that workers of the job signed the checkpoint and all parts that it lists."""
        manifest = stored.manifest
        if manifest.kind != KIND:
            raise Unsupported(f"{stored.whose} is no checkpoint: `sealring vault open` opens it")
        authorities, job = self._trusted()
        valid = checking.check(manifest.content, stored.copy.place, authorities, job, stored.whose)
        valid.require_files(manifest.parts, stored.whose)
        return valid

    def _trusted(self) -> tuple[Sequence[x509.Certificate], str]:
        if self._authorities is not None and self._job is not None:
            return self._authorities, self._job
        for notes in run_notes.all():
            if (recorded := notes.trusted_in_replay()) is not None:
                return recorded
        own = signing.credentials_of(*rank_and_world())
        return self._authorities or own.authorities, self._job or own.job


def _found(stored: Stored) -> list[int | str]:
    return [stored.manifest.object_version, stored.manifest.digest]


def _location(stored: Stored, metadata: Metadata, item: ReadItem) -> Location:
    location = metadata.storage_data.get(item.storage_index)
    if location is None:
        raise NotAVault(f"{stored.whose} does not hold {item.storage_index.fqn!r}")
    assert isinstance(location, Location)
    return location


def _saved(metadata: Metadata, item: ReadItem) -> tuple[torch.dtype, list[int]]:
    """The dtype and the shape of the saved piece that the item reads from."""
    described = metadata.state_dict_metadata[item.storage_index.fqn]
    assert isinstance(described, TensorStorageMetadata)
    for chunk in described.chunks:
        if chunk.offsets == item.storage_index.offset:
            return described.properties.dtype, list(chunk.sizes)
    raise NotAVault(f"the metadata has no such piece of {item.storage_index.fqn!r}")


def _tell_what_the_ledger_proves(vault: Vault, stored: Stored) -> None:
    """Warns once in a process for each vault whose ledger lies on the vault's own disk."""
    local = vault.ledger.beside_the_vault
    if local and vault.path not in _TOLD:
        _TOLD.add(vault.path)
        _LOG.warning(
            "sealring: %s is the newest that %s has recorded. A ledger on the disk that it guards "
            "detects accidents, not an attacker: set SEALRING_VAULT_LEDGER to a folder elsewhere, "
            "or to broker",
            stored.whose, vault.ledger.where,
        )  # fmt: skip


def _fillable(target: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor itself if saved bytes can be read straight into it; else a new tensor."""
    plain = not target.is_conj() and not target.is_neg()
    on_cpu = target.device.type == "cpu"
    plain = plain and on_cpu and has_own_memory(target)
    if plain and target.is_contiguous() and target.dtype == dtype:
        return target
    return torch.empty(target.shape, dtype=dtype)
