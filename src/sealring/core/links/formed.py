"""What all late links of a group have in common once it has formed."""

from __future__ import annotations

from collections.abc import Callable

from sealring import _native
from sealring.core.handshake.sessions import SessionTable
from sealring.core.identity.credentials import Credentials
from sealring.core.links.agreement import Transport
from sealring.core.links.forming import Agreed
from sealring.errors import GroupEnded, GroupError


class FormedGroup:
    """Every method may be called from any thread."""

    def __init__(
        self,
        credentials: Callable[[], Credentials],
        agreed: Agreed,
        transport: Transport,
        sessions: SessionTable,
        timeout: float,
    ) -> None:
        self.credentials = credentials
        """Asked for each link: by then the certificate may have been renewed."""
        self.agreed = agreed
        self.transport: Transport = transport
        self.sessions = sessions
        self.timeout = timeout
        """The group's, for those that wait for links outside of any call."""
        self.failure: GroupError | None = None
        """How the group has failed, if it has."""
        self.on_failure: Callable[[], None] | None = None
        """Called when it has."""
        self._process = _native.ProcessMark()

    @property
    def here(self) -> bool:
        """False in a forked child, where none of the threads exists."""
        return self._process.here

    def refuse_from_now(self, failure: GroupError) -> None:
        """Make no further link after the group has failed; members that want one are told so."""
        self.failure = self.failure or failure
        if self.on_failure is not None:
            self.on_failure()

    def require_alive(self, rank: int) -> None:
        if self.failure is not None:
            raise GroupEnded(f"the group of rank {rank} has failed", failure=self.failure)
