"""The mailbox of a group, which sends and receives messages from rank to rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from sealring import _native, limits
from sealring.core.engine.endpoint import Endpoint
from sealring.core.engine.engine import largest_segment
from sealring.core.engine.failures import Names
from sealring.core.engine.link_ends import LinkEnds
from sealring.core.links.exchange import Exchange
from sealring.errors import GroupError

ANYONE = _native.ANYONE


class Mailbox(Endpoint[_native.Mailbox]):
    """Sends and receives messages, in any order.

    The mailbox has its own links, so a message reaches a rank whatever collective that rank runs.
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
        hosts: Mapping[int, str] | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        """`first_failure` and `lease` are shared with the group's engine, if it has one.

        `exchange` opens the pipes to the other members when they are needed. `hosts` has the hosts
        of all members.
        """
        names = Names(rank, tuple(range(world) if members is None else members))
        first_failure = first_failure or _native.FirstFailure()
        native = _native.Mailbox(
            rank,
            world,
            context,
            min(record_bytes, largest_segment(world)),
            rekey_bytes,
            min(gpu_record_bytes, largest_segment(world)),
            first_failure,
            names.for_native(),
        )
        self._wanted: set[int] = set()
        if exchange is not None:
            native.expect_late_links()
        super().__init__(
            native,
            names,
            first_failure,
            links,
            lease,
            purpose="messages",
            hosts=hosts,
            exchange=exchange,
        )

    def use_gpu(self, ordinal: int, *, streams_wait: bool = False) -> None:
        """Prepares what messages of this GPU need; raises Unsupported if that fails.

        With `streams_wait` in the first call, streams can wait for messages if the GPU allows it.
        """
        from sealring.core.engine.cuda.attachment import Attachment  # needs torch

        with self._preparing:
            self._require_gpu(ordinal, "messages")
            if self._gpu is None:
                self._gpu = Attachment(
                    self._native,
                    ordinal,
                    command_kernel="run_all_batches" if streams_wait else None,
                )

    def submit(
        self, message: _native.Message, caller: _native.CallerStream | None = None
    ) -> _native.Completion:
        """Sends or receives a message. The memory must not change until the message is done.

        With `caller` the memory is on a GPU, and the call may block until the GPU makes progress.
        """
        self.want(message.peer)
        submitted = self._native.submit(message, caller)
        if isinstance(submitted, _native.Failure):
            raise self._ended(submitted)
        return submitted

    def want(self, peer: int) -> None:
        """Asks for the pipe to `peer`, or for all pipes if `peer` is ANYONE.

        For a receive from anyone, the sender itself opens the pipe that the message needs. The
        pipes to the other ranks are opened because a rank without pipes would never learn that the
        group has failed.
        """
        if self.late is None or peer in self._wanted:
            return
        self._wanted.add(peer)
        if peer == ANYONE:
            self.late.ask_all()
        else:
            self.late.want([peer])

    def wait(self, message: _native.Completion) -> int:
        """Moves messages until this one is done; returns the rank at its other end."""
        if (failure := message.wait_on_host()) is not None:
            raise self._ended(failure)
        return message.peer

    def finished(self) -> list[_native.Completion]:
        """Returns messages that are done and that no thread waited for; [] after `close`."""
        done = self._native.finished()
        if isinstance(done, _native.Failure):
            raise self._ended(done)
        return done

    def _ended(self, failure: _native.Failure) -> GroupError:
        self._refuse_links(self.error_of(failure))
        return self.error_of(failure)

    def release_streams(self) -> None:
        """Releases waiting streams. Call it when the mailbox has ended and the error is stored."""
        self._native.release_streams()

    def account(self) -> _native.MailAccount:
        return self._native.account()
