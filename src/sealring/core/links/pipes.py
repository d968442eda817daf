"""Which pipes a member of a group has, wants, waits for and has given up. No I/O.

exchange.py opens them. Threads that dial, accept and call share what is here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sealring.core.handshake.terms import PipeName
from sealring.errors import GroupEnded, GroupError, PeerUnreachable, SealringError, Unsupported

if TYPE_CHECKING:
    from sealring.core.links.link import Link


@dataclass(slots=True, eq=False)
class Pipe:
    """One pipe, from the moment that an end asks for it."""

    open: bool = False
    """It is made: delivered, or about to be."""
    wanted: bool = False
    """It is dialed, or will be if the connection that is being accepted fails."""
    optional: bool = False
    """The group does without it if no process answers."""
    accepting: int = 0
    """Admitted connections of the peer for it that are not settled yet."""
    postponed: bool = False
    """It is dialed if none of those becomes the pipe."""
    connected: bool = False
    """This end has connected to the peer for it just now."""
    given_up: str = ""
    """Why it is not opened any more, though it was agreed on."""


class Agreement:
    """Pipes that this end has agreed to and waits for."""

    def __init__(self, names: Iterable[PipeName], objection: str) -> None:
        self.missing = set(names)
        self.links: list[Link] = []
        self.objection = objection
        """Why this end opens none of them. Then those are missing whose peers were not told."""
        self.problem: SealringError | None = None
        """Why they will not all come."""


class Pipes:
    """Every method may be called from any thread."""

    def __init__(self, rank: int, linked: Iterable[int], *, sparse: bool) -> None:
        """`linked` are the members to which there is a pipe for collectives; `sparse` says that
        these are not all.
        """
        self._rank = rank
        self._sparse = sparse
        self._changed = threading.Condition()
        self.by_name = {PipeName(each, "collectives"): Pipe(open=True) for each in linked}
        """Of pipes that are opened on demand, or were agreed on: so there are few."""
        self._awaited: Agreement | None = None
        self._failure: GroupError | None = None
        self._closed = False

    def _at(self, name: PipeName) -> Pipe:
        return self.by_name.setdefault(name, Pipe())

    def by_agreement(self, name: PipeName) -> bool:
        return name.lane > 0 or (name.purpose == "messages" and not self._sparse)

    def fail(self, failure: GroupError) -> None:
        """The group has failed: members that want a pipe are told so."""
        self._failure = self._failure or failure
        self._close(GroupEnded(f"the group of rank {self._rank} has failed", failure=failure))

    def close(self) -> None:
        self._close(PeerUnreachable(f"rank {self._rank} has closed its group"))

    def _close(self, why: SealringError) -> None:
        with self._changed:
            self._closed = True
            self.give_up(why)

    @property
    def failed(self) -> bool:
        return self._failure is not None

    # ---- agreement -------------------------------------------------------------------------------

    def agree(self, names: Iterable[PipeName], objection: str) -> Agreement:
        call = Agreement(names, objection)
        with self._changed:
            if self._closed:
                raise Unsupported("the group is closed")
            for name in call.missing:
                self._at(name)
            self._awaited = call
        return call

    def await_all(self, call: Agreement, deadline: float) -> None:
        """Raises why they do not all come."""
        with self._changed:
            self._changed.wait_for(
                lambda: not call.missing or call.problem, max(0.0, deadline - time.monotonic())
            )
            if call.objection:
                raise Unsupported(call.objection)
            if call.problem is not None:
                raise call.problem
            if call.missing:
                name = min(call.missing)
                why = f"{_named(name)} was not opened in time"
                raise PeerUnreachable(why, peer=name.peer)

    def end_agreement(self) -> None:
        with self._changed:
            self._awaited = None

    def give_up(self, why: SealringError) -> None:
        """Whatever this end waits for does not come."""
        with self._changed:
            if self._awaited is None:
                return
            self._awaited.problem = self._awaited.problem or why
            for name in self._awaited.missing:
                self.by_name[name].given_up = str(why)
            self._changed.notify_all()

    def require_no_objection(self) -> None:
        with self._changed:
            if self._awaited is not None and self._awaited.objection:
                raise Unsupported(self._awaited.objection)

    def objection_told(self, name: PipeName) -> bool:
        """Notes that the peer has been told this end's objection; False if there is none."""
        with self._changed:
            if self._awaited is None or not self._awaited.objection:
                return False
            self._awaited.missing.discard(name)
            self._changed.notify_all()
            return True

    def take_awaited(self, name: PipeName, link: Link) -> tuple[bool, PipeName | None]:
        """Whether this end waits for it; and the next lane, if it waits for that too."""
        with self._changed:
            call = self._awaited
            if call is None or call.problem is not None or name not in call.missing:
                return False, None
            call.missing.remove(name)
            call.links.append(link)
            self._changed.notify_all()
            following = name._replace(lane=name.lane + 1)
            return True, following if following in call.missing else None

    # ---- the end that was dialed -----------------------------------------------------------------

    def admit(self, name: PipeName) -> None:
        """A verified member asks for it; raises why it does not get it."""
        with self._changed:
            agreed = self.by_agreement(name)
            pipe = self._require_wanted(name, self.by_name.get(name) if agreed else self._at(name))
            if agreed and self.objection_told(name):
                self.require_no_objection()
            if pipe.connected and name.peer < self._rank:
                raise PeerUnreachable(f"rank {name.peer} is being dialed from here")
            pipe.accepting += 1

    def reserve(self, name: PipeName) -> None:
        """Take its place for a connection that was admitted."""
        with self._changed:
            self._require_wanted(name, self.by_name[name]).open = True

    def release(self, name: PipeName) -> None:
        """The connection that had its place has failed."""
        with self._changed:
            self.by_name[name].open = False

    def settled(self, name: PipeName, error: BaseException | None) -> bool:
        """A connection that was admitted is the pipe by now, or has failed with this error.

        Returns whether the pipe is to be dialed now.
        """
        with self._changed:
            awaited = self._awaited is not None and name in self._awaited.missing
            if awaited and isinstance(error, Unsupported):
                self.give_up(error)
            pipe = self.by_name[name]
            pipe.accepting -= 1
            dial_now = pipe.postponed and not pipe.accepting and not pipe.open
            pipe.postponed = pipe.postponed and not dial_now and not pipe.open
            return dial_now

    def _require_wanted(self, name: PipeName, pipe: Pipe | None) -> Pipe:
        if self._failure is not None:
            raise GroupEnded(f"the group of rank {self._rank} has failed", failure=self._failure)
        if pipe is None:
            raise PeerUnreachable(f"rank {self._rank} has not agreed to {_named(name)} yet")
        if pipe.given_up:
            raise Unsupported(pipe.given_up)
        if pipe.open:
            raise PeerUnreachable(f"rank {name.peer} is linked already")
        return pipe

    # ---- the end that dials ----------------------------------------------------------------------

    def want(self, name: PipeName, *, optional: bool = False) -> bool:
        """Returns whether it is to be dialed now."""
        with self._changed:
            pipe = self._at(name)
            dialed_already = pipe.open or pipe.wanted or bool(pipe.given_up)
            if not optional or not dialed_already:
                pipe.optional = optional
            if dialed_already:
                return False
            pipe.wanted, pipe.postponed = True, pipe.accepting > 0
            return not pipe.postponed

    def is_settled(self, name: PipeName) -> bool:
        """Whether the dialer may forget the pipe."""
        with self._changed:
            pipe = self.by_name[name]
            # Its place may be taken by a connection that fails yet: then `settled` dials it again.
            pipe.postponed = pipe.postponed or pipe.open
            return pipe.open or bool(pipe.given_up)

    def require_wanted(self, name: PipeName) -> None:
        """Called before this end accepts a pipe that it dialed; raises why it refuses it instead.

        It may have given the pipe up while it was connecting.
        """
        with self._changed:
            self.require_no_objection()
            if self.by_name[name].given_up:
                raise Unsupported(self.by_name[name].given_up)

    def connected(self, name: PipeName) -> bool:
        """This end has connected to the peer; returns whether the pipe is still to be opened."""
        with self._changed:
            pipe = self.by_name[name]
            if self.is_settled(name):
                return False
            if pipe.accepting and name.peer < self._rank:
                raise PeerUnreachable(f"rank {name.peer} has connected itself", peer=name.peer)
            pipe.connected = True
            return True

    def not_connected(self, name: PipeName) -> None:
        with self._changed:
            self.by_name[name].connected = False

    def is_missed(self, name: PipeName, error: SealringError) -> bool:
        """Whether the group cannot do without a pipe that could not be dialed."""
        with self._changed:
            pipe = self.by_name[name]
            if pipe.open or pipe.given_up:
                return False
            if pipe.optional and isinstance(error, PeerUnreachable):
                pipe.optional = pipe.wanted = False
                return False
            return True

    def opened(self, name: PipeName, *, dialer: bool) -> bool:
        """A connection is the pipe; False if another one is already.

        An acceptor has reserved the place. A dialer's peer that keeps to the rules above has not
        opened another one.
        """
        with self._changed:
            pipe = self.by_name[name]
            second = dialer and pipe.open
            pipe.open = True
            if dialer:
                pipe.connected = False
            return not second


def _named(name: PipeName) -> str:
    return f"lane {name.lane} of {name.purpose} to rank {name.peer}"
