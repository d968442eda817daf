"""`dcp.save` and `dcp.async_save` into a vault.

Each rank seals one part: the bytes of its tensors, row by row, one behind the other. It signs where
they are and what they are, and the plan of all ranks; a rank that has nothing to save signs too.
The coordinator writes the manifest, last: before that the checkpoint does not exist, and the one
before it is untouched.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from sealring.errors import (
    ConfigurationError,
    MissingPart,
    NotAVault,
    StoreFailed,
    Unsupported,
    VaultBusy,
    VaultError,
)
from sealring.recording.hooks import note_checkpoint_out
from sealring.strict import strictly
from sealring.vault import checkpoint_check as checking
from sealring.vault import freeing, objects, signing
from sealring.vault.checkpoint_form import (
    KIND,
    check_entry,
    dtype_name,
    paths_document,
    paths_of_all,
)
from sealring.vault.closing import Closable
from sealring.vault.objects import Copy, Part
from sealring.vault.staging import seal_here, seal_in_helper
from sealring.vault.storage import VaultPath, storage_of
from sealring.vault.vault import Vault

_LOG = logging.getLogger("sealring")
_DRAFT: Final = re.compile(
    r"([0-9a-f]{32}/[0-9]{10}/[0-9a-f]{8})@([0-9]{1,18})@([0-9a-f]{32})@([0-9a-f]{64})"
)


class CheckpointWriter(Closable, StorageWriter):
    """Saves checkpoints as versions of one object of a vault.

    `helper=True` lets a process of its own do the sealing. It gets the key of this rank's part,
    and no key of the checkpoint, the vault or the rank. Give `dcp.async_save` a process group of
    its own. `close()` leaves the vault open.
    """

    def __init__(
        self, vault: Vault, name: str, *, keep: int | None = None, helper: bool = False
    ) -> None:
        """`keep`: how many complete checkpoints to keep; else all."""
        super().__init__()
        vault.require_writer()
        if keep is not None and keep < 1:
            raise ConfigurationError(f"keep={keep}: at least one checkpoint must be kept")
        self._vault = vault
        self._keep = keep
        self._seal = seal_in_helper if helper else seal_here
        self.checkpoint_id = objects.check_name(name)
        self._rank, self._world = 0, 1
        self._draft: Copy | None = None
        self._paths: dict[str, list[str | int]] | None = None
        self._used = ""
        self._claim = ExitStack()

    def _release(self) -> None:
        self._claim.close()
        if self._draft is not None:
            self._draft.place.key.wipe()
        self._draft = None

    def _what(self) -> str:
        return f"the writer of {self.checkpoint_id!r}"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise Unsupported(
            "a CheckpointWriter holds keys and does not travel to another process: instead of "
            "AsyncCheckpointerType.PROCESS use THREAD and CheckpointWriter(..., helper=True)"
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # a path alone names no vault and no key

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.checkpoint_id = objects.check_name(str(checkpoint_id))
        self._draft = None

    def storage_meta(self) -> StorageMeta | None:
        return None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.require_open()
        if not kwargs.get("use_collectives", True):
            raise Unsupported(
                "a checkpoint has one manifest for all ranks: leave use_collectives on"
            )
        distributed = dist.is_available() and dist.is_initialized()
        self._rank = dist.get_rank() if distributed else 0
        self._world = dist.get_world_size() if distributed else 1
        self._claim.close()  # of a save that failed

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Makes the place that all ranks write to. It is not a checkpoint before `finish`."""
        self.require_open()
        if len(plans) != self._world:
            raise Unsupported(
                f"{len(plans)} of {self._world} ranks save {self.checkpoint_id!r}, and every rank "
                "must sign a checkpoint: save it with a process group of all ranks"
            )
        self._paths = paths_of_all(plans)
        pieces = [[_described(item, 0, 0) for item in plan.items] for plan in plans]
        plan_digest = checking.plan_digest(pieces, self._paths)
        # The vault is held in each step and not between them: a save that fails elsewhere would
        # hold it for ever. If its keys change between two steps, the next one fails.
        self._remove(self._unfinished)
        freeing.wait()  # the space of what the save before has removed is there
        with self._vault.held(alone=False):
            self._vault.refresh()
            self._draft = self._vault.new_version(self.checkpoint_id)
            version = self._draft.folder.parent
            self._claim.enter_context(storage_of(version).claim(version))
        folder = self._draft.folder.relative_to(self._vault.path / "objects").as_posix()
        where = f"{folder}@{self._draft.vault_key}@{secrets.token_hex(16)}@{plan_digest}"
        return [replace(plan, storage_data=where) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._write(plan, planner))
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.require_open()
        assert self._draft is not None
        draft, self._draft = self._draft, None
        try:
            with self._claim, self._vault.held(alone=False):
                self._vault.refresh()
                self._vault.require_key(draft.vault_key, self.checkpoint_id)
                self._commit(draft, metadata, results)
            if self._keep is not None:
                self._remove(lambda: self._older_than(draft.place.version))
        except BaseException:
            if not draft.complete:
                objects.remove(draft.folder)
            raise
        finally:
            draft.place.key.wipe()

    def _commit(self, draft: Copy, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Makes the checkpoint, if a reader would accept it."""
        whose = f"{self.checkpoint_id!r} version {draft.place.version}"
        if paths_document(metadata.planner_data) != self._paths:
            raise Unsupported("the planner changed its table of names: use DefaultSavePlanner")
        sealed = [_sealed(written, whose) for written in results]
        parts = [part for one in sealed for part in one.parts]
        signed = [signing.as_document(one.signed) for one in sealed]
        content = json.dumps({"contributions": signed, "paths": self._paths})
        credentials = signing.credentials_of(self._rank, self._world)
        valid = checking.check(
            content, draft.place, credentials.authorities, credentials.job, whose
        )
        valid.require_files(parts, whose)
        try:
            checking.require_readable(draft, parts, valid, whose)
        except MissingPart as problem:
            raise MissingPart(f"{problem}; all ranks must write to one shared directory") from None
        manifest = self._vault.commit(draft, KIND, self.checkpoint_id, parts, content)
        name = f"{self.checkpoint_id}@{draft.place.version}"
        note_checkpoint_out(name, manifest, valid.content_digest)

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        self.require_open()
        draft = self._draft_of(plan)
        buffers = [_bytes_of(item, planner) for item in plan.items]
        name = checking.part_of(self._rank)
        with self._vault.held(alone=False):
            self._vault.refresh()
            self._vault.require_key(draft.vault_key, self.checkpoint_id)
            copy = objects.open_copy(
                self._vault.path / "objects" / draft.folder,
                self._vault.ring,
                self._vault.header.vault,
            )
            part, digests = self._seal(copy, name, buffers)
            listed = copy.write_part(checking.list_of(name), digests)
        start, items = 0, []
        for item, buffer in zip(plan.items, buffers, strict=True):
            items.append(_described(item, start, buffer.numel()))
            start += buffer.numel()
        checkpoint = checking.checkpoint_at(copy.place, draft.save, draft.plan)
        statement = checking.Contribution(checkpoint, part.length, part.digest, items)
        credentials = signing.credentials_of(self._rank, self._world)
        signed = signing.sign(credentials, self._world, asdict(statement))
        sealed = asdict(_Sealed(signed, [part, listed]))
        return [WriteResult(MetadataIndex(name), part.length, sealed)]

    def _draft_of(self, plan: SavePlan) -> _Draft:
        """What the coordinator has begun."""
        where = plan.storage_data
        found = _DRAFT.fullmatch(where) if isinstance(where, str) else None
        if found is None:
            raise Unsupported("the planner dropped the plan's storage_data: use DefaultSavePlanner")
        if where == self._used:
            raise Unsupported(
                "the planner gave the plan of the checkpoint before: leave out enable_plan_caching"
            )
        self._used = where
        return _Draft(found[1], int(found[2]), found[3], found[4])

    def _remove(self, versions: Callable[[], list[VaultPath]]) -> None:
        """Removes versions while no other process uses the vault; else a later save does it.

        Then none of them is being read, and each that is being written is claimed.
        """
        try:
            with suppress(VaultBusy), self._vault.held(alone=True, wait=False):
                self._vault.refresh()
                for version in versions():
                    try:
                        self._vault.remove_version(version)
                    except (VaultError, OSError) as problem:  # the checkpoint itself is saved
                        _LOG.warning("sealring: %s is not removed: %s", version, problem)
        except StoreFailed as problem:
            _LOG.warning("sealring: older versions are not removed: %s", problem)

    def _unfinished(self) -> list[VaultPath]:
        """What saves that were killed have left; not what another process still writes."""
        return self._vault.left_behind(self.checkpoint_id)

    def _older_than(self, saved: int) -> list[VaultPath]:
        """All but those that are kept: the one that was saved, and some before it.

        What does not open is neither counted nor removed: an attacker may have put it there.
        """
        assert self._keep is not None
        return self._vault.before(self.checkpoint_id, saved)[self._keep - 1 :]


@dataclass(frozen=True, slots=True)
class _Draft:
    """What the coordinator tells each rank."""

    folder: str
    vault_key: int
    """Its number when the save began."""
    save: str
    plan: str


@dataclass(frozen=True, slots=True)
class _Sealed:
    """What a rank tells the coordinator."""

    signed: signing.Signed
    parts: list[Part]


def _sealed(results: list[WriteResult], whose: str) -> _Sealed:
    document = results[0].storage_data if results else None
    try:
        sealed: _Sealed = strictly(_Sealed, document, f"a rank's part of {whose}", "checkpoint")
    except ConfigurationError as problem:
        raise NotAVault(str(problem)) from None
    for part in sealed.parts:
        objects.check_part(part.name)
    return sealed


def _described(item: WriteItem, start: int, length: int) -> checking.Item:
    data = item.tensor_data
    if data is None:
        return checking.Item(item.index.fqn, start, length, None, None, None, None)
    return checking.Item(
        item.index.fqn,
        start,
        length,
        dtype_name(data.properties.dtype),
        list(data.size),
        list(data.chunk.offsets),
        list(data.chunk.sizes),
    )


def _bytes_of(item: WriteItem, planner: SavePlanner) -> torch.Tensor:
    """The entry's bytes, in memory, without a copy where it has them so."""
    data: Any = planner.resolve_data(item)
    if item.type == WriteItemType.BYTE_IO:
        content = data.getvalue()
        check_entry(item.index.fqn, content)
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)
    tensor: torch.Tensor = data.detach()
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise Unsupported(f"{item.index.fqn} is sparse or quantized: save its dense tensors")
    if tensor.is_meta:
        raise Unsupported(f"{item.index.fqn} is on the device 'meta' and has no content to save")
    plain = tensor.cpu().resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8)
