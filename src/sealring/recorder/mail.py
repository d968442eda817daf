"""The last messages of one group: those that ended and those that are under way.

Messages overtake each other and end on whichever thread moves them, so each is held by the one who
posted it until it ends.
"""

from __future__ import annotations

import threading
from collections import deque
from time import monotonic_ns
from typing import TYPE_CHECKING, Final, Literal, Protocol

from sealring.recorder.account import MessageAccount

if TYPE_CHECKING:
    from sealring._native import MailAccount
    from sealring.engine.datatypes import DType
    from sealring.engine.endpoint import LinkTraffic

KEPT: Final = 1000
"""Messages per group that have ended."""

Way = Literal["send", "recv"]


class MailAccountable(Protocol):
    """What is asked of a mailbox."""

    def account(self) -> MailAccount: ...
    def commitments(self) -> list[LinkTraffic]: ...


class MessageEntry:
    """One message, without its memory."""

    __slots__ = ("bytes", "dtype", "ended_ns", "error", "peer", "posted_ns", "tag", "way")

    def __init__(self, way: Way, peer: int, tag: int, nbytes: int, dtype: DType) -> None:
        self.way = way
        self.peer = peer
        self.tag = tag
        self.bytes = nbytes
        self.dtype = dtype
        self.posted_ns = monotonic_ns()
        self.ended_ns = 0
        self.error: str | None = None

    def account(self, since_1970_ns: int) -> MessageAccount:
        ended = "failed" if self.error is not None else "done"
        return MessageAccount(
            operation=self.way,
            peer=self.peer if self.peer >= 0 else None,
            tag=self.tag,
            bytes=self.bytes,
            dtype=self.dtype.name.lower(),
            state=ended if self.ended_ns else "waiting",  # type: ignore[arg-type]
            posted_ns=since_1970_ns + self.posted_ns,
            ended_ns=since_1970_ns + self.ended_ns if self.ended_ns else None,
            error=self.error,
        )


class MailRecorder:
    def __init__(self, mailbox: MailAccountable) -> None:
        self.finished: dict[Way, int] = {}
        """Messages that went well, by what this rank did."""
        self._mailbox: MailAccountable | None = mailbox
        self._last_account = mailbox.account()
        self._last_commitments: list[LinkTraffic] = []
        self._lock = threading.Lock()
        self._ended: deque[MessageEntry] = deque(maxlen=KEPT)
        self._under_way: dict[MessageEntry, None] = {}

    def posted(self, entry: MessageEntry) -> None:
        with self._lock:
            self._under_way[entry] = None

    def ended(self, entry: MessageEntry, peer: int | None, error: BaseException | None) -> None:
        """`peer` is the rank at the other end, which a receive from anyone learns only now."""
        with self._lock:
            if peer is not None:
                entry.peer = peer
            if error is not None:
                entry.error = f"{type(error).__name__}: {error}"
            else:
                self.finished[entry.way] = self.finished.get(entry.way, 0) + 1
            entry.ended_ns = monotonic_ns()
            self._under_way.pop(entry, None)
            self._ended.append(entry)

    def close(self) -> None:
        """The group has ended: keeps its last account and lets go of the mailbox."""
        self._last_account = self.account()
        self._last_commitments = self.commitments()
        self._mailbox = None

    def account(self) -> MailAccount:
        mailbox = self._mailbox
        return self._last_account if mailbox is None else mailbox.account()

    def commitments(self) -> list[LinkTraffic]:
        mailbox = self._mailbox
        return self._last_commitments if mailbox is None else mailbox.commitments()

    def messages(self, since_1970_ns: int) -> list[MessageAccount]:
        """In the order they were posted."""
        with self._lock:
            known = [*self._ended, *self._under_way]
        return [each.account(since_1970_ns) for each in sorted(known, key=lambda e: e.posted_ns)]
