"""`dcp.save` and `dcp.async_save` into a vault.

Each rank seals one part: the bytes of its tensors, row by row, one behind the other. It signs where
they are. The coordinator signs the whole and writes the manifest, last: before that the checkpoint
does not exist, and the one before it is untouched.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Final, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from sealring.errors import ConfigurationError, Unsupported, VaultError
from sealring.vault import objects, signing
from sealring.vault.checkpoint_form import KIND, check_entry, index_document, metadata_document
from sealring.vault.objects import Copy, Part
from sealring.vault.staging import seal_here, seal_in_helper
from sealring.vault.vault import Vault

_DRAFT: Final = re.compile(r"[0-9a-f]{32}/[0-9]{10}/[0-9a-f]{8}")


class CheckpointWriter(StorageWriter):
    """Saves checkpoints as versions of one object of a vault.

    `helper=True` lets a process of its own do the sealing; it gets the checkpoint's key, and no key
    of the vault or the rank. Give `dcp.async_save` a process group of its own.
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
        self._used = ""
        self._held = ExitStack()

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
        if not kwargs.get("use_collectives", True):
            raise Unsupported(
                "a checkpoint has one manifest for all ranks: leave use_collectives on"
            )
        distributed = dist.is_available() and dist.is_initialized()
        self._rank = dist.get_rank() if distributed else 0
        self._world = dist.get_world_size() if distributed else 1
        self._held.close()  # by a save that failed on another rank

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Makes the place that all ranks write to. It is not a checkpoint before `finish`."""
        # Until `finish`: a rotation would take the place for one that a killed save has left.
        self._held.enter_context(self._vault.held(alone=False))
        self._vault.refresh()  # a rotation may have changed the vault's key
        self._remove_unfinished()
        self._draft = self._vault.new_version(self.checkpoint_id)
        where = self._draft.folder.relative_to(self._vault.path / "objects").as_posix()
        return [replace(plan, storage_data=where) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._write(plan, planner))
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        assert self._draft is not None
        credentials = signing.credentials_of(self._rank, self._world)
        contributions, parts = [], []
        for written in results:
            if not written:
                continue
            signed = signing.from_document(written[0].storage_data, "a rank's part")
            signer = signing.check(
                signed, credentials.authorities, credentials.job, "a rank's part"
            )
            parts += [Part(**part) for part in signer.document["parts"]]
            contributions.append(signed)
        statement = {
            "checkpoint": self._place(self._draft),
            "contributions": [digest(one) for one in contributions],
            "metadata": metadata_document(metadata),
        }
        whole = signing.sign(credentials, self._world, statement)
        content = {
            "whole": signing.as_document(whole),
            "contributions": [signing.as_document(one) for one in contributions],
        }
        for part in parts:
            if not (self._draft.folder / part.name).exists():
                raise VaultError(
                    f"part {part.name} was written and is not in {self._draft.folder}: all ranks "
                    "must write to one shared directory"
                )
        self._vault.commit(self._draft, KIND, self.checkpoint_id, parts, content)
        self._draft = None
        self._remove_old()
        self._held.close()

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        self._vault.refresh()  # to the key that the coordinator used, which it holds until the end
        copy = self._draft_of(plan)
        if not plan.items:
            return []
        buffers = [_bytes_of(item, planner) for item in plan.items]
        with self._vault.held(alone=False):
            part = self._seal(copy, f"rank-{self._rank:05}", buffers)
        start, items = 0, []
        for item, buffer in zip(plan.items, buffers, strict=True):
            items.append([*index_document(item.index), part.name, start, buffer.numel()])
            start += buffer.numel()
        signed = signing.sign(
            signing.credentials_of(self._rank, self._world),
            self._world,
            {
                "checkpoint": self._place(copy),
                "parts": [
                    {"name": part.name, "length": part.length, "commitment": part.commitment}
                ],
                "items": items,
            },
        )
        return [
            WriteResult(
                item.index,
                buffer.numel(),
                signing.as_document(signed) if number == 0 else None,
            )
            for number, (item, buffer) in enumerate(zip(plan.items, buffers, strict=True))
        ]

    def _draft_of(self, plan: SavePlan) -> Copy:
        where = plan.storage_data
        if not isinstance(where, str) or _DRAFT.fullmatch(where) is None:
            raise Unsupported("the planner dropped the plan's storage_data: use DefaultSavePlanner")
        if where == self._used:
            raise Unsupported(
                "the planner gave the plan of the checkpoint before: leave out enable_plan_caching"
            )
        self._used = where
        folder = self._vault.path / "objects" / where
        return objects.open_copy(folder, self._vault.ring, self._vault.header.vault)

    def _place(self, copy: Copy) -> dict[str, str | int]:
        return {
            "vault": copy.place.vault.hex(),
            "object": copy.place.object.hex(),
            "version": copy.place.version,
        }

    def _remove_unfinished(self) -> None:
        """What a save that was killed has left. One job at a time writes under a name."""
        for version in self._vault.incomplete(self.checkpoint_id):
            shutil.rmtree(version, ignore_errors=True)

    def _remove_old(self) -> None:
        if self._keep is not None:
            for version in self._vault.complete(self.checkpoint_id)[: -self._keep]:
                for copy in version.iterdir():
                    objects.remove(copy)
                shutil.rmtree(version, ignore_errors=True)


def digest(signed: signing.Signed) -> str:
    return hashlib.sha256(signed.statement.encode()).hexdigest()


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
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
