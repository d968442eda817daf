"""What the core asks of the rest of the package: typed slots, and who fills them.

The core imports neither attestation nor recording nor the live view, and these do not import each
other. `PROVIDERS` names modules, or `module:attribute`, for each slot. They are imported when they
are first asked for: a process loads only what it uses.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, Protocol, TypeVar

from sealring.core.settings import BROKER
from sealring.errors import ConfigurationError

if TYPE_CHECKING:
    from datetime import datetime

    from cryptography import x509

    from sealring import _native
    from sealring.core.engine.flight import FlightRecorder
    from sealring.core.identity.credentials import Credentials

PROVIDERS: Final = {
    "enrolments": ("sealring.attest.broker:enrolled",),
    "group_observers": (
        "sealring.observe.process:observe_groups",
        "sealring.observe.server:observe_groups",
        "sealring.record.recording.run:observe_groups",
    ),
    "flight_records": ("sealring.observe.process:recorders",),
    "data_keys": ("sealring.attest.broker:data_key",),
    "vault_records": ("sealring.attest.broker.enrolment:RecordsOfVault",),
    "evidence_judge": ("sealring.attest.evidence.admission",),
    "run_notes": ("sealring.record.recording.run",),
}
ONLY_WITH: Final = {
    "sealring.record.recording.run:observe_groups": ("_SEALRING_RECORD", "_SEALRING_REPLAY"),
}
"""Variables without one of which a provider is not asked."""

T = TypeVar("T")
_PATIENCE_SECONDS: Final = 60


class Slot(Generic[T]):
    """Providers of one kind, in the order of their table. They are imported at the first use."""

    def __init__(self, name: str, purpose: str) -> None:
        """`purpose` is what cannot be done without a provider."""
        self._purpose = purpose
        self._names: Sequence[str] = PROVIDERS[name]

    @contextmanager
    def only(self, *names: str) -> Iterator[None]:
        """These providers and no others, within the block."""
        before, self._names = self._names, names
        try:
            yield
        finally:
            self._names = before

    def all(self) -> list[T]:
        return [_attribute(name) for name in self._names]

    def wanted(self, environ: Mapping[str, str]) -> list[T]:
        """Without those that only a variable asks for which is not set."""
        return [
            _attribute(name)
            for name in self._names
            if name not in ONLY_WITH or any(map(environ.get, ONLY_WITH[name]))
        ]

    def one(self) -> T:
        """The only provider, or ConfigurationError: there is no way to do without it."""
        found = self.all()
        if len(found) != 1:
            raise ConfigurationError(
                f"{self._purpose} needs one provider, and core/hooks.py names {len(found)}"
            )
        return found[0]


def _attribute(name: str) -> Any:
    module, _, attribute = name.partition(":")
    found = import_module(module)
    return getattr(found, attribute) if attribute else found


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
    if not BROKER.read(environ):
        return None
    return enrolments.one()(rank, world, environ, deadline)


def credentials_of(rank: int, world: int) -> Credentials:
    """This worker's identity, from wherever its process groups have theirs."""
    from sealring.core.identity.credentials import load_credentials

    deadline = time.monotonic() + _PATIENCE_SECONDS
    enrolment = enrolment_of(rank, world, os.environ, deadline)
    return load_credentials(rank, world) if enrolment is None else enrolment.credentials(deadline)


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

late_observers: Final[list[Made]] = []
"""Called after those, with every group that forms: of modules that a script loads by itself, such
as `sealring.record`. `flight_records` has the groups before."""

flight_records: Final[Slot[Callable[[], list[FlightRecorder]]]] = Slot(
    "flight_records", "the groups so far"
)
"""Of the groups that exist, and of the last few that ended; the oldest first."""


# ---- what a broker keeps for vaults


data_keys: Final[Slot[Callable[[str], bytes]]] = Slot("data_keys", "a data key of a broker's")
"""Called with REPOSITORY/TYPE/TAG."""


@dataclass(frozen=True, slots=True)
class VaultEntry:
    """The newest version of an object of a vault."""

    object: str
    version: int
    manifest: str
    """Its digest."""


class VaultAnswer(Protocol):
    """What the broker knows of a vault: the number of its key, its header's generation, entries."""

    @property
    def key(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def entries(self) -> Sequence[VaultEntry]: ...


class VaultRecords(Protocol):
    """What the job's workers have recorded of one vault, so that a rollback is seen."""

    def read(self) -> VaultAnswer:
        """All of it."""

    def record(self, key: int, generation: int, entry: VaultEntry | None) -> VaultAnswer:
        """Records a header and a version of an object. Returns what the broker then has of both."""


vault_records: Final[Slot[Callable[[str], VaultRecords]]] = Slot(
    "vault_records", "a ledger at the broker"
)
"""Called with the vault's name."""


# ---- how an auditor judges evidence


class ClaimedAttestation(Protocol):
    """What a certificate says of its holder's attestation."""

    @property
    def label(self) -> str: ...
    @property
    def evidence_digest(self) -> str: ...
    @property
    def policy_digest(self) -> str: ...
    @property
    def verified_at(self) -> datetime: ...


class MachinePolicy(Protocol):
    """Which machines may be workers."""

    @property
    def peer_evidence(self) -> bool:
        """Workers show each other the evidence itself."""


class EvidenceJudge(Protocol):
    def claims_in(self, certificate: x509.Certificate) -> ClaimedAttestation | None:
        """None if it claims nothing. ValueError: not readable."""

    def parse_policy(self, text: str) -> MachinePolicy:
        """Raises BadPolicy."""

    def judge_recorded(
        self,
        policy: MachinePolicy,
        certificate: x509.Certificate,
        evidence: bytes | None,
        vendors: object,
    ) -> None:
        """Raises an AttestationError unless the policy admits the machine, as of its date.

        `vendors` is what read_cache gives: vendors' lists, collateral and references, or None.
        """


evidence_judge: Final[Slot[EvidenceJudge]] = Slot("evidence_judge", "judging evidence")


# ---- what a recorded run has read and written


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's part of a range of samples that all ranks read together.

    The range is cut into periods (global batches), the last one may be shorter. The rank read, of
    each period, the positions from `offset` up to and without `offset + length`.
    """

    period: int
    offset: int
    length: int

    def __post_init__(self) -> None:
        if self.period == 0 or self.offset + self.length > self.period:
            raise ConfigurationError("a share of samples does not fit into its period")


class RunNotes(Protocol):
    """Takes note of what datasets and checkpoints report, where this process is recorded."""

    def note_opened(self, name: str, digest: str) -> None: ...
    def note_data(
        self,
        name: str,
        digest: str,
        epoch: int,
        first: int,
        end: int,
        *,
        seed: int | None = None,
        share: Share | None = None,
    ) -> None: ...
    def note_checkpoint_in(self, name: str, manifest: str, content: str | None) -> None: ...
    def note_checkpoint_out(self, name: str, manifest: str, content: str | None) -> None: ...
    def trusted_in_replay(self) -> tuple[tuple[x509.Certificate, ...], str] | None:
        """Authorities and job whose checkpoints a repetition loads; None in training itself."""


run_notes: Final[Slot[RunNotes]] = Slot("run_notes", "recording what was read")
