"""Hooks: typed slots through which the core uses the other packages without importing them.

The core imports neither attestation nor recording nor the live view, and these do not import each
other. For each slot, `PROVIDERS` names modules or `module:attribute`. A provider is imported when
it is first used, so a process loads only what it needs.
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
"""Environment variables of a provider: it is used only if one of them is set."""

T = TypeVar("T")
_PATIENCE_SECONDS: Final = 60


class Slot(Generic[T]):
    """The providers of one kind, in the order of `PROVIDERS`. Imported when they are first used."""

    def __init__(self, name: str, purpose: str) -> None:
        """`purpose` names, for errors, what cannot be done without a provider."""
        self._purpose = purpose
        self._names: Sequence[str] = PROVIDERS[name]

    @contextmanager
    def only(self, *names: str) -> Iterator[None]:
        """Replaces the slot's providers by these, within the block."""
        before, self._names = self._names, names
        try:
            yield
        finally:
            self._names = before

    def all(self) -> list[T]:
        return [_attribute(name) for name in self._names]

    def wanted(self, environ: Mapping[str, str]) -> list[T]:
        """The providers, without those in `ONLY_WITH` whose variables are not set."""
        return [
            _attribute(name)
            for name in self._names
            if name not in ONLY_WITH or any(map(environ.get, ONLY_WITH[name]))
        ]

    def one(self) -> T:
        """Returns the only provider; raises ConfigurationError if there is not exactly one."""
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
    """The part of a group that its enrolment uses."""

    def expel(self, member: int, why: str) -> None: ...


class Enrolment(Protocol):
    """Holds the certificate that a broker issued to this worker, and renews it."""

    @property
    def lease(self) -> _native.Lease:
        """Ends when the certificate expires. The native threads that move records check it."""

    @property
    def certificate(self) -> x509.Certificate: ...
    def credentials(self, deadline: float) -> Credentials:
        """For a new group: the newest certificate, and the workers that are no longer admitted."""

    def renewed_credentials(self) -> Credentials:
        """For a new link of an existing group."""

    def watch(self, group: Expellable, keys: dict[int, str]) -> None:
        """From now on, ends the group when a worker with one of these keys is no longer admitted.

        `keys` has the keys by rank in the group.
        """


enrolments: Final[Slot[Callable[[int, int, Mapping[str, str], float], Enrolment]]] = Slot(
    "enrolments", "joining through SEALRING_BROKER"
)
"""Called with rank, world, environment and deadline. Joins the job once; then returns the same."""


def enrolment_of(
    rank: int, world: int, environ: Mapping[str, str], deadline: float
) -> Enrolment | None:
    """This worker's enrolment if SEALRING_BROKER is set, else None."""
    if not BROKER.read(environ):
        return None
    return enrolments.one()(rank, world, environ, deadline)


def credentials_of(rank: int, world: int) -> Credentials:
    """This worker's identity, from the same source as for its process groups."""
    from sealring.core.identity.credentials import load_credentials

    deadline = time.monotonic() + _PATIENCE_SECONDS
    enrolment = enrolment_of(rank, world, os.environ, deadline)
    return load_credentials(rank, world) if enrolment is None else enrolment.credentials(deadline)


# ---- a group was made


class GroupMade(NamedTuple):
    """What observers get when a group has formed."""

    flight: FlightRecorder
    """What the group does, and whether it has ended; may be read at any time."""
    size: int
    """The number of ranks of the job."""
    host: str
    identity: Literal["secret", "certificate", "broker"]
    certificate_ends: Callable[[], float]
    """When this worker's certificate expires, in seconds since 1970. A broker renews it."""
    torch_groups: Callable[[], list[tuple[str, str, int, bool]]]
    """All of torch's groups in this process: name, backend, size, and whether it is sealed."""


Made = Callable[[GroupMade], None]

group_observers: Final[Slot[Callable[[Mapping[str, str]], Made]]] = Slot(
    "group_observers", "observing a group"
)
"""Called with the environment before ranks meet, so that a wrong setting is refused early. The
function that it returns is called when the group has formed. If that raises, the group ends."""

late_observers: Final[list[Made]] = []
"""Called with every group that forms, after `group_observers`. Modules that a script imports
itself, such as `sealring.record`, add to it. For groups made earlier, see `flight_records`."""

flight_records: Final[Slot[Callable[[], list[FlightRecorder]]]] = Slot(
    "flight_records", "the groups so far"
)
"""Returns the recorders of the existing groups and of the last few ended ones, oldest first."""


# ---- what a broker stores for vaults


data_keys: Final[Slot[Callable[[str], bytes]]] = Slot("data_keys", "a data key of a broker's")
"""Called with REPOSITORY/TYPE/TAG; returns the key that the broker stores under that name."""


@dataclass(frozen=True, slots=True)
class VaultEntry:
    """The newest version of an object of a vault."""

    object: str
    version: int
    manifest: str
    """The digest of its manifest."""


class VaultAnswer(Protocol):
    """The broker's records of a vault: its key's number, its header's generation, its entries."""

    @property
    def key(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def entries(self) -> Sequence[VaultEntry]: ...


class VaultRecords(Protocol):
    """The broker's records of one vault, by which workers detect a rollback."""

    def read(self) -> VaultAnswer:
        """Returns all records of the vault."""

    def record(self, key: int, generation: int, entry: VaultEntry | None) -> VaultAnswer:
        """Records a header and a version of an object. Returns the broker's records of both."""


vault_records: Final[Slot[Callable[[str], VaultRecords]]] = Slot(
    "vault_records", "a ledger at the broker"
)
"""Called with a vault's name; returns the broker's records of it."""


# ---- how an auditor judges evidence


class ClaimedAttestation(Protocol):
    """What a certificate says about its holder's attestation."""

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
        """The attestation that a certificate claims, or None. ValueError if it cannot be read."""

    def parse_policy(self, text: str) -> MachinePolicy:
        """Parses a policy; raises BadPolicy."""

    def judge_recorded(
        self,
        policy: MachinePolicy,
        certificate: x509.Certificate,
        evidence: bytes | None,
        vendors: object,
    ) -> None:
        """Raises an AttestationError unless the policy admits the machine, judged at its date.

        `vendors` is what read_cache returns (vendors' lists, collateral and references), or None.
        """


evidence_judge: Final[Slot[EvidenceJudge]] = Slot("evidence_judge", "judging evidence")


# ---- what a recorded run has read and written


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's part of a range of samples that all ranks read together.

    The range is cut into periods (global batches); the last may be shorter. In each period the rank
    reads the positions from `offset` up to, but not including, `offset + length`.
    """

    period: int
    offset: int
    length: int

    def __post_init__(self) -> None:
        if self.period == 0 or self.offset + self.length > self.period:
            raise ConfigurationError("a share of samples does not fit into its period")


class RunNotes(Protocol):
    """Notes what datasets and checkpoints report, if this process is recorded."""

    def recorded(self) -> bool:
        """Whether it is, by a run or by a run's repetition."""

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
        """In a replay, the authorities and the job whose checkpoints it may load; else None."""


run_notes: Final[Slot[RunNotes]] = Slot("run_notes", "recording what was read")
