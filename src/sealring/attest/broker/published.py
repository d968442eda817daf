"""The audit log as a transparency log: a folder of tiles that witnesses see grow.

The store's rows are written with each decision. From there the entries go into the folder, and the
witnesses of a policy cosign its checkpoint. Both have the same key, origin and roots. A store whose
log was cut or rewritten since contradicts the folder, and is reported, not published.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from sealring.attest.broker import audit
from sealring.attest.broker.store import Store, View
from sealring.errors import ForkedLog, TamperedLog, TruncatedLog
from sealring.formats.files import read_limited, replace_private
from sealring.formats.log import witnesses
from sealring.formats.log.checkpoints import SignedCheckpoint, open_checkpoint
from sealring.formats.log.folder import CHECKPOINT, LogWriter, create_log
from sealring.formats.log.notes import MAX_NOTE_BYTES, Signer
from sealring.formats.log.policy import Log, LogPolicy

_LOG = logging.getLogger("sealring.attest.broker")
_COSIGN_SECONDS: Final = 1800.0
"""An unchanged log is cosigned again after this, so that readers see that it is the newest."""
_LOCK_SECONDS: Final = 30.0


@dataclass(slots=True)
class PublishedLog:
    folder: Path
    signer: Signer
    remembered: Path
    """Holds the last checkpoint that was published, whatever becomes of the folder."""
    policy: LogPolicy | None = None
    """With witnesses, if their cosignatures are to be asked for."""
    clock: Callable[[], float] = time.monotonic
    _cosigned: tuple[int, float] = field(default=(-1, 0.0), init=False)
    """The size that was cosigned last, and when."""

    def update(self, store: Store) -> SignedCheckpoint:
        """Publishes what is new in the store, and has it cosigned."""
        try:
            return self._update(store)
        except TruncatedLog:
            # Another broker of this store may have published more, between our read and our ask.
            return self._update(store)

    def _update(self, store: Store) -> SignedCheckpoint:
        if not (self.folder / CHECKPOINT).exists():
            create_log(self.folder, self.signer)
        with LogWriter(self.folder, self.signer, wait=_LOCK_SECONDS) as writer:
            entries, newest = store.submit(lambda view: self._new(view, writer.checkpoint)).result()
            if newest is not None and entries:
                writer.append(entries, expected=newest.root)
            replace_private(self.remembered, writer.checkpoint.note.encode())
            if self.policy is None or not self._is_due(writer.checkpoint.size):
                return writer.checkpoint
            return self._cosign(writer, self.policy)

    def _new(
        self, view: View, published: SignedCheckpoint
    ) -> tuple[list[bytes], SignedCheckpoint | None]:
        """The entries that are not published yet, and the checkpoint that they lead to."""
        key = self.signer.verifier
        self._require(view, published, self.folder)
        # The folder may be a new one. What was published in the last one must be in the store.
        if (content := read_limited(self.remembered, MAX_NOTE_BYTES)) is not None:
            last = open_checkpoint(content, LogPolicy((Log(key),)))
            self._require(view, last, self.remembered)
        entries = audit.entries_from(view, published.size)
        newest = audit.checkpoint_at(view, published.size + len(entries), key)
        if entries and newest is None:
            raise TamperedLog("entries of the broker's audit log are missing in its store")
        return entries, newest

    def _require(self, view: View, seen: SignedCheckpoint, where: Path) -> None:
        """TruncatedLog or ForkedLog unless the store continues what was published."""
        there = audit.checkpoint_at(view, seen.size, self.signer.verifier)
        if seen.size and there is None:
            raise TruncatedLog(
                f"the broker's store ends before entry {seen.size - 1} of its audit log, which was "
                f"published ({where}): an older copy was put in its place"
            )
        if there is not None and there.root != seen.root:
            raise ForkedLog(
                f"the broker's store has another audit log than was published ({where}), among "
                f"the first {seen.size} entries: it was rewritten"
            )

    def _is_due(self, size: int) -> bool:
        cosigned, when = self._cosigned
        return size != cosigned or self.clock() - when > _COSIGN_SECONDS

    def _cosign(self, writer: LogWriter, policy: LogPolicy) -> SignedCheckpoint:
        current, stored = writer.checkpoint, writer.stored
        answers = witnesses.cosign(
            current, lambda old: stored.consistency_proof(old, current.root), policy
        )
        signed = writer.add_cosignatures(answers.cosignatures.values())
        for fault in answers.faults.values():
            _LOG.warning("%s", fault)
        counted = open_checkpoint(signed.note.encode(), policy)  # NoQuorum
        self._cosigned = (counted.size, self.clock())
        return counted
