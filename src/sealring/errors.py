"""Every error sealring raises, in one tree.

    SealringError
    ├── ConfigurationError            yours: nothing was started, fix and run again
    │   ├── NoIdentity
    │   ├── BadSecret
    │   ├── BadCertificate
    │   ├── Unsupported
    │   └── ScheduleError             ours: the ranks' programs do not fit together; report it
    ├── WorkerFailed                  a process that bench or demo started ended with an error
    ├── HandshakeError                a peer was refused, or refused us; no group was made
    │   ├── WrongJob
    │   ├── WrongRank
    │   ├── WrongWorldSize
    │   ├── WrongGroup
    │   ├── DuplicateRank
    │   ├── CertificateExpired
    │   ├── CertificateNotYetValid
    │   ├── UnknownAuthority
    │   ├── ProtocolMismatch
    │   ├── SuiteMismatch
    │   ├── SettingsMismatch
    │   ├── MalformedSetup
    │   └── PeerUnreachable
    ├── StoreError                    the sealed store cannot be believed; the group goes on
    │   ├── TamperedValue             an attacker's: nobody of this job put that value there
    │   └── ReplayedValue             an attacker's: an older value was put back
    └── GroupError                    the group is closed and its keys are wiped
        ├── TamperedRecord            an attacker's, or broken hardware's
        ├── MissingRecord             an attacker's: records were dropped or reordered
        ├── ReplayedRecord            an attacker's: a record came a second time
        ├── OutOfStep                 the script's: ranks disagree on the collective
        ├── PeerLost                  the peer's: its process or its link ended
        ├── PeerSilent                the network's or the peer's: nothing came in time
        └── GroupClosed               ours: the group was used after it ended

Each class says in its docstring whose fault it is, and each message what to do. All of them are
RuntimeErrors, because that is what torch.distributed's own failures are and scripts catch.
"""

from __future__ import annotations


class SealringError(RuntimeError):
    """The root of the tree."""


class ConfigurationError(SealringError):
    """This worker was set up in a way that cannot run. Nothing was started."""


class NoIdentity(ConfigurationError):
    """No job secret and no certificate was configured, so nobody can know who this worker is."""


class BadSecret(ConfigurationError):
    """The job secret cannot be read, is too short, or others can read it."""


class BadCertificate(ConfigurationError):
    """This worker's own certificate or key cannot be used."""


class Unsupported(ConfigurationError):
    """The tensor, operation or option is one that sealring does not serve."""


class ScheduleError(ConfigurationError):
    """A collective's programs do not fit together: a mistake in sealring, not in your script."""


class WorkerFailed(SealringError):
    """A worker process of a benchmark or the demo failed; the message is its traceback."""


class HandshakeError(SealringError):
    """A peer could not be admitted, or refused to admit us."""

    def __init__(self, message: str, *, peer: int | None = None, proven: bool = False) -> None:
        super().__init__(message)
        self.peer = peer
        """The rank that the error is about; only a claim unless `proven`."""
        self.proven = proven
        """The peer had proved to be of this job. If not, anybody on the network can cause this."""


class WrongJob(HandshakeError):
    """The peer's certificate is for another job."""


class WrongRank(HandshakeError):
    """The peer proved another rank's name than the one it was met as."""


class WrongWorldSize(HandshakeError):
    """The peer counts another number of workers."""


class WrongGroup(HandshakeError):
    """The peer is in another process group, or in another epoch of this one."""


class DuplicateRank(HandshakeError):
    """Two processes hold valid certificates for one rank."""


class CertificateExpired(HandshakeError):
    """A certificate is past its last day (or this machine's clock is wrong)."""


class CertificateNotYetValid(HandshakeError):
    """A certificate's first day has not come (or this machine's clock is wrong)."""


class UnknownAuthority(HandshakeError):
    """A certificate was not signed by this job's authority."""


class ProtocolMismatch(HandshakeError):
    """The peer speaks another version of sealring's protocol."""


class SuiteMismatch(HandshakeError):
    """The peer offers no cipher suite, or key exchange, that we accept."""


class SettingsMismatch(HandshakeError):
    """The peer runs with a setting that all ranks of a group must share."""


class MalformedSetup(HandshakeError):
    """What came over the set-up channel is not sealring's protocol."""


class PeerUnreachable(HandshakeError):
    """The peer did not appear, or could not be connected to, in time."""


class StoreError(SealringError):
    """What the store answered cannot be believed, and nothing of it was used."""


class TamperedValue(StoreError):
    """A value is not sealed, is cut, or was sealed for another key, job, run or epoch."""


class ReplayedValue(StoreError):
    """An authentic value that its writer had replaced since, as this process has seen."""


class GroupError(SealringError):
    """The group is dead: its links are closed and its keys wiped. A new group can be made."""

    def __init__(
        self,
        message: str,
        *,
        peer: int | None = None,
        host: str | None = None,
        operation: str | None = None,
        collective: int | None = None,
        reported_by: int | None = None,
    ) -> None:
        super().__init__(message)
        self.peer = peer
        """The rank that the error is about, by its number in the job."""
        self.host = host
        """That rank's own name for its machine."""
        self.operation = operation
        """What was called there (`all_reduce`), where this rank is in the same collective."""
        self.collective = collective
        """The number of the collective in which it happened."""
        self.reported_by = reported_by
        """The rank that saw it, where that was not this one."""
        self.native: tuple[int, int, int, int, str] | None = None
        """As the native core told it (engine/failures.py)."""


class TamperedRecord(GroupError):
    """A record's tag did not match: changed on the way, or sealed under other keys."""


class MissingRecord(GroupError):
    """An authentic record came too early: one before it was dropped or held back."""


class ReplayedRecord(GroupError):
    """An authentic record came a second time."""


class OutOfStep(GroupError):
    """Ranks called different collectives, shapes or dtypes."""


class PeerLost(GroupError):
    """The peer's process ended, or the link to it was cut."""


class PeerSilent(GroupError):
    """Nothing came from the peer within the group's timeout."""


class GroupClosed(GroupError):
    """The group was used after it was destroyed or had failed."""
