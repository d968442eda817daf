"""Messages from rank to rank: the native mailbox behind Python's words."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from sealring import _native, limits
from sealring.engine.engine import largest_segment
from sealring.engine.failures import Names, error_from
from sealring.engine.link_ends import LinkEnds, hand_over
from sealring.errors import GroupError, Unsupported

if TYPE_CHECKING:
    from sealring.engine.cuda.attachment import Attachment

ANYONE = _native.ANYONE


class Mailbox:
    """Sends and receives in any order. Ranks are numbered within the group.

    It has links of its own, so a message reaches a rank whichever collective that rank is in.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        *,
        context: bytes,
        links: Iterable[tuple[int, LinkEnds]],
        members: Sequence[int] | None = None,
        record_bytes: int = limits.RECORD_BYTES,
        rekey_bytes: int = limits.REKEY_BYTES,
        gpu_record_bytes: int = limits.GPU_PAYLOAD_BYTES,
        first_failure: _native.FirstFailure | None = None,
        lease: _native.Lease | None = None,
    ) -> None:
        """`first_failure` and `lease` are shared with the group's engine, if it has one."""
        self._names = Names(rank, tuple(range(world) if members is None else members))
        self._gpu: Attachment | None = None
        self._preparing = threading.Lock()
        """Several threads may come with a first tensor."""
        self._first_failure = first_failure or _native.FirstFailure()
        self._native = _native.Mailbox(
            rank,
            world,
            context,
            min(record_bytes, largest_segment(world)),
            rekey_bytes,
            min(gpu_record_bytes, largest_segment(world)),
            self._first_failure,
            self._names.for_native(),
        )
        if lease is not None:
            self._native.use_lease(lease)
        for peer, link in links:
            self._names.hosts[peer] = link.host
            link.peer_group_key.wipe()  # messages are for one rank each
            hand_over(self._native, peer, link)

    def use_gpu(self, ordinal: int, *, streams_wait: bool = False) -> None:
        """Makes ready what this GPU's messages need; raises Unsupported if it cannot be.

        With `streams_wait` in the first call, streams can wait for messages, where the GPU allows
        it.
        """
        from sealring.engine.cuda.attachment import Attachment  # needs torch

        with self._preparing:
            if self._gpu is None:
                self._gpu = Attachment(
                    self._native,
                    ordinal,
                    command_kernel="run_all_batches" if streams_wait else None,
                )
            if self._gpu.ordinal != ordinal:
                raise Unsupported(
                    f"this group's messages have been on cuda:{self._gpu.ordinal}, this one is on "
                    f"cuda:{ordinal}: a rank uses one GPU per group"
                )

    @property
    def has_gpu(self) -> bool:
        return self._gpu is not None

    def send(
        self,
        peer: int,
        tag: int,
        memory: tuple[int, int],
        timeout_s: float,
        ready: int | None = None,
        stream: int = 0,
        streams_wait: bool = False,
    ) -> int:
        """Returns a ticket. The memory must not change until the message is done.

        With `ready` the memory is a GPU's, and may be used after this CUDA event of the caller's
        stream. With `streams_wait` streams can wait for the message, if that is possible now: it
        then has a number. This may block until the GPU has made progress.
        """
        where = (*memory, timeout_s, ready, stream, streams_wait)
        ticket: int = self._good(self._native.send(peer, tag, *where))
        return ticket

    def receive(
        self,
        peer: int,
        tag: int,
        memory: tuple[int, int],
        timeout_s: float,
        ready: int | None = None,
        stream: int = 0,
        streams_wait: bool = False,
    ) -> int:
        where = (*memory, timeout_s, ready, stream, streams_wait)
        ticket: int = self._good(self._native.receive(peer, tag, *where))
        return ticket

    def number_of(self, ticket: int) -> int:
        """What streams can wait for; 0 where they cannot, or the message is done."""
        return self._native.number_of(ticket)

    def make_stream_wait(self, stream: int, number: int) -> None:
        """Later work of the stream waits until the message is done."""
        self._native.make_stream_wait(stream, number)

    def is_done(self, number: int) -> bool:
        return self._native.is_done(number)

    def wait(self, ticket: int) -> int | None:
        """The rank at the other end, once the message is done; None if finished() has told it."""
        peer: int | None = self._good(self._native.wait(ticket))
        return peer

    def finished(self) -> list[tuple[int, int]]:
        """(ticket, rank at the other end) of what is done; nothing once the mailbox is closed."""
        done: list[tuple[int, int]] = self._good(self._native.finished())
        return done

    def close(self) -> None:
        self._native.close()

    def release_streams(self) -> None:
        """Called when the mailbox has ended and the script can find out why."""
        self._native.release_streams()

    def release_gpu(self, patience_s: float) -> bool:
        """Gives back what a closed group has of the GPU, without the GIL.

        False where that cannot be yet: what streams wait for is overwritten with ones, which are
        NaN, but not before the caller's stream has come to the call.
        """
        return self._native.release_gpu(patience_s)

    def fail(self, failure: _native.Failure) -> None:
        """End with a failure that the group saw elsewhere."""
        self._native.fail(failure)

    def account(self) -> _native.MailAccount:
        return self._native.account()

    def _good(self, outcome: tuple[_native.Failure | None, Any]) -> Any:
        failure, value = outcome
        if failure is not None:
            raise self._error(failure)
        return value

    def _error(self, failure: _native.Failure) -> GroupError:
        return error_from(failure, self._names)
