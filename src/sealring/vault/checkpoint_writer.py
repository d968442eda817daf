"""`dcp.save` and `dcp.async_save` into a vault.

Each rank seals one part: the bytes of its tensors, row by row, one tensor after the other. The rank
signs what each tensor is, where its bytes are, and the plan of all ranks. A rank that has nothing
to save signs too. The coordinator writes the manifest last. Until then the checkpoint does not
exist, and the previous one stays untouched.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, NoReturn, get_args

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from sealring.core.hooks import run_notes
from sealring.core.identity.secret import OF_THE_RUN
from sealring.errors import (
    ConfigurationError,
    DiskFull,
    MissingPart,
    NotAVault,
    StoreFailed,
    Unsupported,
    VaultBusy,
    VaultError,
)
from sealring.formats.strict import read_json, strictly
from sealring.vault import checkpoint_check as checking
from sealring.vault import files, objects, signing
from sealring.vault.checkpoint_form import (
    KIND,
    bytes_of,
    dtype_name,
    paths_document,
    paths_of_all,
    rank_and_world,
    raw_bytes,
)
from sealring.vault.closing import Closable
from sealring.vault.digests import Hash, faster
from sealring.vault.objects import COPY_NAME, OBJECT_NAME, Copy, Part
from sealring.vault.staging import seal_here, seal_in_helper
from sealring.vault.storage import VaultPath
from sealring.vault.vault import LAST_VERSION, Vault

_LOG = logging.getLogger("sealring")


class CheckpointWriter(Closable, StorageWriter):
    """Saves checkpoints as versions of one object of a vault.

    With `helper=True` a separate process seals. It gets the key of this rank's part, and not the
    keys of the checkpoint, the vault or the rank. Give each `dcp.async_save` a process group of
    its own; saves by one writer may then overlap. `close()` leaves the vault open.
    """

    def __init__(
        self,
        vault: Vault,
        name: str,
        *,
        keep: int | None = None,
        helper: bool = False,
        hash: Hash | None = None,
    ) -> None:
        """`keep`: how many complete checkpoints to keep; by default all.

        `hash`: the hash function of the digests that this rank signs; by default `faster()` picks.
        """
        super().__init__()
        vault.require_writer()
        if keep is not None and keep < 1:
            raise ConfigurationError(f"keep={keep}: at least one checkpoint must be kept")
        if hash not in (None, *get_args(Hash)):
            raise ConfigurationError(f"hash={hash!r}: a part's digests are 'sha256' or 'blake3'")
        self._vault = vault
        self._keep = keep
        self._hash = hash
        self.seal = seal_in_helper if helper else seal_here
        self.checkpoint_id = objects.check_name(name)
        self._what = f"the writer of {name!r}"
        self.rank, self.world = 0, 1
        self._used = ""
        self._told = False
        # torch does all steps of one save in one thread, and two saves at once in two threads.
        self._saves: dict[threading.Thread, _Save] = {}

    def _release(self) -> None:
        while self._saves:
            self._saves.popitem()[1].end()

    @property
    def _save(self) -> _Save:
        """The save that this thread does; begins one if there is none."""
        thread = threading.current_thread()
        if thread not in self._saves:
            self._begin(self.checkpoint_id)
        return self._saves[thread]

    def _begin(self, name: str) -> None:
        this = threading.current_thread()
        for thread in list(self._saves):
            if thread is this or not thread.is_alive():  # its save failed
                self._saves.pop(thread).end()
        self._saves[this] = _Save(name)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise Unsupported(
            "a CheckpointWriter holds keys and does not travel to another process: instead of "
            "AsyncCheckpointerType.PROCESS use THREAD and CheckpointWriter(..., helper=True)"
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # a path alone names no vault and no key

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        name = self.checkpoint_id if checkpoint_id is None else str(checkpoint_id)
        self.checkpoint_id = objects.check_name(name)
        self._begin(name)

    def storage_meta(self) -> StorageMeta | None:
        return None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.require_open()
        if not kwargs.get("use_collectives", True):
            raise Unsupported(
                "a checkpoint has one manifest for all ranks: leave use_collectives on"
            )
        self.rank, self.world = rank_and_world()
        self._begin(self._save.name)
        if is_coordinator and os.environ.get(OF_THE_RUN) and not self._told:
            self._told = True
            _LOG.warning(
                "sealring: checkpoints of %r are signed under a secret that `sealring run` made "
                "for this run alone: no later run can load them. Make a secret that you keep "
                "(umask 077; openssl rand -hex 32 > job.secret) and pass --secret-file job.secret",
                self._save.name,
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Makes the folder that all ranks write to. It becomes a checkpoint in `finish`."""
        self.require_open()
        save = self._save
        if len(plans) != self.world:
            raise Unsupported(
                f"{len(plans)} of {self.world} ranks save {save.name!r}, and every rank "
                "must sign a checkpoint: save it with a process group of all ranks"
            )
        save.paths = paths_of_all(plans)
        pieces = [[_described(item, 0, 0) for item in plan.items] for plan in plans]
        plan_digest = checking.plan_digest(pieces, save.paths)
        # Each step holds the vault, but it is free between the steps: a save that failed on
        # another rank would else hold it for ever. If the vault's keys change between two steps,
        # the next step fails.
        self._remove(lambda: self._vault.incomplete(save.name, abandoned=True))
        files.wait_until_freed()  # the space of what the previous save removed is free now
        with self._vault.held(alone=False):
            self._vault.refresh()
            draft = save.draft = self._vault.new_version(save.name)
            version = draft.folder.parent
            save.claim.enter_context(version.claim())
        place = draft.place
        attempt = _Draft(
            place.object.hex(), place.version, draft.folder.name, draft.vault_key,
            secrets.token_hex(16), plan_digest,
        )  # fmt: skip
        told = json.dumps(asdict(attempt))
        return [replace(plan, storage_data=told) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._write(plan, planner))
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.require_open()
        save = self._save
        draft = save.draft
        assert draft is not None
        try:
            with save.claim, self._vault.held(alone=False):
                self._vault.refresh()
                self._vault.require_key(draft.vault_key, save.name)
                self._commit(save, draft, metadata, results)
            if (keep := self._keep) is not None:
                # A version that does not open is neither counted nor removed: an attacker may have
                # put it there.
                before = draft.place.version
                self._remove(lambda: self._vault.surplus(save.name, before, keep - 1))
        except BaseException:
            if not draft.complete:
                objects.remove(draft.folder)
            raise
        finally:
            save.end()

    def _commit(
        self, save: _Save, draft: Copy, metadata: Metadata, results: list[list[WriteResult]]
    ) -> None:
        """Writes the manifest if a reader would accept the checkpoint; else raises."""
        whose = f"{save.name!r} version {draft.place.version}"
        if paths_document(metadata.planner_data) != save.paths:
            raise Unsupported("the planner changed its table of names: use DefaultSavePlanner")
        sealed = [_sealed(written, whose) for written in results]
        parts = [part for one in sealed for part in one.parts]
        signed = [asdict(one.signed) for one in sealed]
        content = json.dumps({"contributions": signed, "paths": save.paths})
        credentials = signing.credentials_of(self.rank, self.world)
        valid = checking.check(
            content, draft.place, credentials.authorities, credentials.job, whose
        )
        valid.require_files(parts, whose)
        try:
            checking.require_readable(draft, parts, valid, whose)
        except MissingPart as problem:
            raise MissingPart(f"{problem}; all ranks must write to one shared directory") from None
        manifest = self._vault.commit(draft, KIND, save.name, parts, content)
        name = f"{save.name}@{draft.place.version}"
        for notes in run_notes.all():
            notes.note_checkpoint_out(name, manifest, valid.content_digest)

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        self.require_open()
        draft = self._draft_of(plan)
        buffers = [bytes_of(item, planner) for item in plan.items]
        name = checking.part_of(self.rank)
        with self._vault.held(alone=False):
            self._vault.refresh()
            self._vault.require_key(draft.vault_key, self._save.name)
            copy = objects.open_copy(
                draft.folder_in(self._vault),
                self._vault.ring,
                self._vault.header.vault,
            )
            views = [raw_bytes(one) for one in buffers]
            part, digests = self.seal(copy, name, views, self._hash or faster())
            listed = copy.write_part(checking.list_of(name), digests)
        start, items = 0, []
        for item, buffer in zip(plan.items, buffers, strict=True):
            items.append(_described(item, start, buffer.numel()))
            start += buffer.numel()
        checkpoint = checking.checkpoint_at(copy.place, draft.save, draft.plan)
        statement = checking.Contribution(checkpoint, part.length, part.hash, part.digest, items)
        credentials = signing.credentials_of(self.rank, self.world)
        signed = signing.sign(credentials, self.world, asdict(statement))
        sealed = asdict(_Sealed(signed, [part, listed]))
        return [WriteResult(MetadataIndex(name), part.length, sealed)]

    def _draft_of(self, plan: SavePlan) -> _Draft:
        """The draft that the coordinator sent with the plan."""
        told = plan.storage_data
        draft = _draft(told) if isinstance(told, str) else None
        if draft is None:
            raise Unsupported("the planner dropped the plan's storage_data: use DefaultSavePlanner")
        if told == self._used:
            raise Unsupported(
                "the planner gave the plan of the checkpoint before: leave out enable_plan_caching"
            )
        self._used = told
        return draft

    def _remove(self, versions: Callable[[], list[VaultPath]]) -> None:
        """Removes versions if no other process uses the vault; else leaves them to a later save.

        While this process alone holds the vault, no other process reads these versions, and each
        version that is being written is claimed.
        """
        try:
            with suppress(VaultBusy), self._vault.held(alone=True, wait=False):
                self._vault.refresh()
                for version in versions():
                    try:
                        self._vault.remove_version(version)
                    except (VaultError, DiskFull, OSError) as problem:
                        # Only a warning: the checkpoint itself is saved.
                        _LOG.warning("sealring: %s is not removed: %s", version, problem)
        except StoreFailed as problem:
            _LOG.warning("sealring: older versions are not removed: %s", problem)


@dataclass(slots=True)
class _Save:
    """One call of `dcp.save`. On ranks other than the coordinator only `name` is set."""

    name: str
    draft: Copy | None = None
    paths: dict[str, list[str | int]] | None = None
    claim: ExitStack = field(default_factory=ExitStack)

    def end(self) -> None:
        self.claim.close()
        if self.draft is not None:
            self.draft.place.key.wipe()
            self.draft = None


@dataclass(frozen=True, slots=True)
class _Draft:
    """What the coordinator sends to each rank: the copy to write to, and the attempt's id."""

    object: str
    version: int
    copy: str
    vault_key: int
    """The number of the vault's key when the save began."""
    save: str
    """Random, one for each attempt to save."""
    plan: str
    """The digest of the plan of all ranks."""

    def folder_in(self, vault: Vault) -> VaultPath:
        return vault.path / "objects" / self.object / f"{self.version:010}" / self.copy


_FORMS: Final = {
    "object": OBJECT_NAME,
    "copy": COPY_NAME,
    "save": re.compile(r"[0-9a-f]{32}"),
    "plan": re.compile(r"[0-9a-f]{64}"),
}


def _draft(told: str) -> _Draft | None:
    """Parses the coordinator's message; None if it does not have the expected form."""
    try:
        draft: _Draft = strictly(_Draft, read_json(told.encode()), "the plan", "draft")
    except (ValueError, ConfigurationError):
        return None
    named = asdict(draft)
    numbers = 0 < draft.version <= LAST_VERSION and 0 < draft.vault_key < 1 << 63
    whole = numbers and all(form.fullmatch(named[name]) for name, form in _FORMS.items())
    return draft if whole else None


@dataclass(frozen=True, slots=True)
class _Sealed:
    """What a rank sends to the coordinator after it has sealed its part."""

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
    try:
        item.index.fqn.encode()
    except UnicodeEncodeError:
        raise Unsupported(
            f"the name {item.index.fqn!r} of an entry is not Unicode: save it by another"
        ) from None
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
