"""`dcp.load` from a vault, on any number of ranks: each reads the chunks that it needs."""

from __future__ import annotations

import io
import json
import logging
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import torch
import torch.distributed as dist
from cryptography import x509
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from sealring.errors import ForeignPart, NotAVault, SealringError, UnadmittedSigner, Unsupported
from sealring.vault import objects, signing
from sealring.vault.checkpoint_form import (
    KIND,
    Location,
    check_entry,
    index_from,
    metadata_from,
    raw_bytes,
)
from sealring.vault.checkpoint_writer import digest
from sealring.vault.objects import Part
from sealring.vault.vault import Stored, Vault

_LOG = logging.getLogger("sealring")
_TOLD: Final[set[Path]] = set()


class CheckpointReader(StorageReader):
    """Loads the newest checkpoint of a name, or the one whose version is named.

    `authorities` and `job`: whose workers may have signed it; else this worker's own.
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
        self._stored: Stored | None = None
        self._failure: SealringError | None = None
        self.bytes_read = 0
        """Of sealed files, by this reader."""
        self.bytes_needed = 0
        """Of plaintext that was asked for."""

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
        # torch replaces what is raised here by an AssertionError. The error is kept, and raised by
        # the next call, which passes it on.
        self._failure = None
        try:
            self._vault.refresh()
            self._stored = self._vault.find(self.checkpoint_id, self._version)
            return self._open(self._stored)
        except SealringError as problem:
            self._failure = problem
            return Metadata({}, planner_data={})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        if self._failure is not None:
            raise self._failure
        assert self._stored is not None
        if is_coordinator and self._version is None:
            _tell_what_the_ledger_proves(self._vault, self._stored)
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        assert self._stored is not None
        by_part: dict[str, list[tuple[ReadItem, Location]]] = defaultdict(list)
        for item in plan.items:
            by_part[self._location(item).part].append((item, self._location(item)))
        with self._vault.reading():
            self._stored = self._same_again(self._stored)
            parts = {part.name: part for part in self._stored.manifest.parts}
            for name, items in by_part.items():
                self._read_part(parts[name], items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _same_again(self, stored: Stored) -> Stored:
        """The checkpoint where it is now: a rotation may have sealed it anew meanwhile."""
        manifest = stored.manifest
        found = self._vault.find(manifest.name, manifest.object_version)
        if (found.manifest.id, found.manifest.content) != (manifest.id, manifest.content):
            raise ForeignPart(f"{stored.whose} was exchanged while it was loaded: load it again")
        _check_parts(found, manifest.parts)
        return found

    def _read_part(
        self, part: Part, items: list[tuple[ReadItem, Location]], planner: LoadPlanner
    ) -> None:
        assert self._stored is not None
        with self._stored.copy.opened(part, self._stored.whose) as reader:
            boxes: list[Any] = []
            tensors, entries = [], []
            for item, location in items:
                if item.type == LoadItemType.BYTE_IO:
                    room = bytearray(location.length)
                    entries.append((item, room))
                    boxes.append((room, location.start, 1, [len(room)], [0], [len(room)]))
                    continue
                target = planner.resolve_tensor(item).detach()
                dtype, shape = self._saved(item, location)
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
            check_entry(item.storage_index.fqn, bytes(room))
            planner.load_bytes(item, io.BytesIO(bytes(room)))

    def _location(self, item: ReadItem) -> Location:
        assert self._stored is not None
        location = self._metadata.storage_data.get(item.storage_index)
        if location is None:
            raise NotAVault(f"{self._stored.whose} does not hold {item.storage_index.fqn!r}")
        assert isinstance(location, Location)
        return location

    def _saved(self, item: ReadItem, location: Location) -> tuple[torch.dtype, list[int]]:
        """The dtype and the shape of the saved piece that the item reads from."""
        assert self._stored is not None
        described = self._metadata.state_dict_metadata[item.storage_index.fqn]
        assert isinstance(described, TensorStorageMetadata)
        for chunk in described.chunks:
            if chunk.offsets == item.storage_index.offset:
                dtype = described.properties.dtype
                if chunk.sizes.numel() * dtype.itemsize != location.length:
                    raise ForeignPart(
                        f"{item.storage_index.fqn!r} in {self._stored.whose} has another length "
                        "than its shape: the ranks signed different things"
                    )
                return dtype, list(chunk.sizes)
        raise NotAVault(f"the metadata has no such piece of {item.storage_index.fqn!r}")

    def _open(self, stored: Stored) -> Metadata:
        """The metadata, if workers of the job signed it and all that it lists."""
        if stored.manifest.kind != KIND:
            raise Unsupported(f"{stored.whose} is no checkpoint: `sealring vault open` opens it")
        authorities, job = self._trusted()
        try:
            return _opened(stored, authorities, job)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise NotAVault(f"the manifest of {stored.whose} cannot be read") from None

    def _trusted(self) -> tuple[Sequence[x509.Certificate], str]:
        if self._authorities is not None and self._job is not None:
            return self._authorities, self._job
        distributed = dist.is_available() and dist.is_initialized()
        rank = dist.get_rank() if distributed else 0
        own = signing.credentials_of(rank, dist.get_world_size() if distributed else 1)
        return self._authorities or own.authorities, self._job or own.job


def _opened(stored: Stored, authorities: Sequence[x509.Certificate], job: str) -> Metadata:
    """What the manifest's statements say, which an admitted worker may have made up."""
    content = json.loads(stored.manifest.content)
    whole = signing.check(
        signing.from_document(content["whole"], stored.whose), authorities, job, stored.whose
    )
    signed = [signing.from_document(one, stored.whose) for one in content["contributions"]]
    if [digest(one) for one in signed] != whole.document["contributions"]:
        raise UnadmittedSigner(f"{stored.whose} lists other parts than its coordinator signed")
    place = stored.copy.place
    identity = {"vault": place.vault.hex(), "object": place.object.hex(), "version": place.version}
    parts: list[Part] = []
    storage: dict[MetadataIndex, Location] = {}
    signers = [signing.check(one, authorities, job, stored.whose) for one in signed]
    for signer in (whole, *signers):
        if signer.document["checkpoint"] != identity:
            raise ForeignPart(
                f"what rank {signer.rank} signed is of another checkpoint than {stored.whose}"
            )
    for signer in signers:
        own = {part.name: part for part in (Part(**one) for one in signer.document["parts"])}
        parts += own.values()
        for name, offset, part, start, length in signer.document["items"]:
            index = index_from(name, offset)
            inside = part in own and 0 <= start <= start + length <= own[part].length
            if not inside or index in storage:
                raise ForeignPart(
                    f"rank {signer.rank} signed in {stored.whose} that {name!r} is where another "
                    "rank's tensors are, or no tensor is"
                )
            storage[index] = Location(part, start, length)
    _check_parts(stored, parts)
    metadata = metadata_from(whole.document["metadata"], stored.whose)
    metadata.storage_data = storage
    metadata.storage_meta = StorageMeta()
    return metadata


def _check_parts(stored: Stored, signed: list[Part]) -> None:
    """The manifest's parts are those that were signed; after a rotation, by name and length."""

    def known(parts: list[Part]) -> set[tuple[str, int, str]]:
        resealed = stored.manifest.resealed > 0
        return {(one.name, one.length, "" if resealed else one.commitment) for one in parts}

    if known(stored.manifest.parts) != known(signed):
        raise ForeignPart(f"the parts of {stored.whose} are not those that its ranks signed")


def _tell_what_the_ledger_proves(vault: Vault, stored: Stored) -> None:
    """Once in a process for each vault."""
    local = vault.ledger.path.is_relative_to(vault.path)
    if local and vault.path not in _TOLD:
        _TOLD.add(vault.path)
        _LOG.warning(
            "sealring: %s is the newest that %s has recorded. A ledger on the disk that it guards "
            "detects accidents, not an attacker: set SEALRING_VAULT_LEDGER to a folder elsewhere",
            stored.whose, vault.ledger.path,
        )  # fmt: skip


def _fillable(target: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor itself where bytes can be put into it as they are, else one for a copy."""
    if target.device.type == "cpu" and target.is_contiguous() and target.dtype == dtype:
        return target
    return torch.empty(target.shape, dtype=dtype)
