"""What the core asks of the rest of the package: typed slots, filled by providers.py.

The core imports neither attestation nor recording nor the live view, and these do not import each
other. A provider is imported when it is first asked for: a process loads only what it uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, Protocol, TypeVar

from sealring.errors import ConfigurationError
from sealring.providers import PROVIDERS

if TYPE_CHECKING:
    from cryptography import x509

    from sealring import _native
    from sealring.engine.flight import FlightRecorder
    from sealring.identity.credentials import Credentials

T = TypeVar("T")


class Slot(Generic[T]):
    """Providers of one kind, in the order of their table. They are imported at the first use."""

    def __init__(self, name: str, purpose: str) -> None:
        """`purpose` is what cannot be done without a provider."""
        self._purpose = purpose
        self._names: Sequence[str] = PROVIDERS[name]
        self._loaded: list[T] | None = None

    @contextmanager
    def only(self, *names: str) -> Iterator[None]:
        """These providers and no others, within the block."""
        before, self._names, self._loaded = self._names, names, None
        try:
            yield
        finally:
            self._names, self._loaded = before, None

    def all(self) -> list[T]:
        loaded = self._loaded
        if loaded is None:
            loaded = self._loaded = [_attribute(name) for name in self._names]
        return loaded

    def one(self) -> T:
        """The only provider, or ConfigurationError: there is no way to do without it."""
        found = self.all()
        if len(found) != 1:
            raise ConfigurationError(
                f"{self._purpose} needs one provider, and sealring/providers.py names {len(found)}"
            )
        return found[0]


def _attribute(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


# ---- where credentials come from


class Expellable(Protocol):
    """A group, as its enrolment sees it."""

    def expel(self, member: int, why: str) -> None: ...


class Enrolment(Protocol):
    """A worker's certificate that a broker gives and renews, while its groups live."""

    @property
    def lease(self) -> _native.Lease:
        """Ends with the certificate; the native threads that move records check it."""

    @property
    def certificate(self) -> x509.Certificate: ...
    def credentials(self, deadline: float) -> Credentials:
        """For a new group: the newest certificate, and who is out of the job by now."""

    def renewed_credentials(self) -> Credentials:
        """For a link of a group that lives."""

    def watch(self, group: Expellable, keys: dict[int, str]) -> None:
        """From here on the group ends when one of these keys (by rank in the group) is out."""


enrolments: Final[Slot[Callable[[int, int, Mapping[str, str], float], Enrolment]]] = Slot(
    "enrolments", "joining through SEALRING_BROKER"
)
"""Called with rank, world, environment and deadline: joins, or returns what joined before."""


def enrolment_of(
    rank: int, world: int, environ: Mapping[str, str], deadline: float
) -> Enrolment | None:
    """Where a broker vouches for this worker: what holds and renews its certificate."""
    if not environ.get("SEALRING_BROKER"):
        return None
    return enrolments.one()(rank, world, environ, deadline)


# ---- a group was made


class GroupMade(NamedTuple):
    """A group that has formed, as observers see it."""

    flight: FlightRecorder
    """What the group does, and whether it has ended; to be read at any time."""
    size: int
    """How many ranks the job has."""
    host: str
    identity: Literal["secret", "certificate", "broker"]
    certificate_ends: Callable[[], float]
    """Since 1970; a broker's certificate is renewed."""
    torch_groups: Callable[[], list[tuple[str, str, int, bool]]]
    """All groups of torch's in this process: name, backend, size, and whether it is sealed."""


Made = Callable[[GroupMade], None]

group_observers: Final[Slot[Callable[[Mapping[str, str]], Made]]] = Slot(
    "group_observers", "observing a group"
)
"""Called with the environment before ranks meet, to refuse a wrong setting in time. What it returns
is called when the group has formed; what that raises ends the group."""
