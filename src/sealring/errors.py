"""Every error sealring raises, in one tree.

    SealringError
    ├── ConfigurationError            yours: nothing was started, fix and run again
    │   ├── NoIdentity
    │   ├── BadSecret
    │   ├── BadCertificate
    │   ├── BadPolicy
    │   ├── BadClaims                 the file of claims that an audit is to answer
    │   ├── MissingExtra
    │   ├── Unsupported
    │   ├── PlaintextGroup            the job is sealed-only, and something asked for plaintext
    │   ├── BadKeyFile                a vault's key file cannot be read, or others can read it
    │   ├── DiskFull                  a file system or a quota is full: free some space
    │   └── ScheduleError             ours: the ranks' programs do not fit together; report it
    ├── AttestationUnavailable        this machine has no hardware, or no certificates, for it
    │   └── TpmFailed                 its TPM cannot be reached, or refuses a command
    ├── ForkedProcess                 the script's: a forked child used what is its parent's
    ├── WorkerFailed                  a process that bench or demo started ended with an error
    ├── HandshakeError                a peer was refused, or refused us; no group was made
    │   ├── WrongJob
    │   ├── WrongRank
    │   ├── WrongWorldSize
    │   ├── WrongGroup
    │   ├── DuplicateRank
    │   ├── CertificateExpired
    │   ├── CertificateNotYetValid
    │   ├── CertificateRevoked
    │   ├── UnknownAuthority
    │   ├── NotAttested
    │   ├── PeerNotAdmitted
    │   ├── ProtocolMismatch
    │   ├── SuiteMismatch
    │   ├── SettingsMismatch
    │   ├── MalformedSetup
    │   └── PeerUnreachable
    ├── StoreError                    the sealed store cannot be believed; the group goes on
    │   ├── TamperedValue             an attacker's: no worker of this job wrote it
    │   └── ReplayedValue             an attacker's: an older value was put back
    ├── AttestationError              a worker's evidence was refused; it gets no key
    │   ├── MalformedEvidence         the worker's: cut, extended, or no evidence at all
    │   ├── UnknownEvidence           a kind or version that this sealring cannot judge
    │   ├── ForgedEvidence            an attacker's: the signature is not over these bytes
    │   ├── UntrustedChain            an attacker's: the chain does not lead to a pinned root
    │   ├── ChainExpired              the worker's: a certificate is outside its dates
    │   ├── ChainRevoked              a certificate is on its issuer's revocation list
    │   ├── StaleRevocationList       yours: fetch the list again
    │   ├── BadCollateral             yours: the verifier's own copy of Intel's word is not Intel's
    │   ├── NotBound                  an attacker's: made for another nonce or another key
    │   └── PolicyRefusal             true evidence of something that the policy does not admit
    │       ├── KindNotAllowed
    │       ├── DeviceNotAllowed
    │       ├── DebugGuest
    │       ├── TcbTooOld
    │       ├── MeasurementNotAllowed
    │       ├── GuestNotAllowed
    │       ├── RankNotAllowed
    │       └── JobNotAllowed
    ├── BrokerError                   the broker refused this worker, or could not be asked
    │   ├── BrokerUnreachable         the network's, or the broker's: it does not answer
    │   ├── UntrustedBroker           an attacker's: what answers there is not this job's broker
    │   ├── MalformedAnswer           what answered does not speak the broker's protocol
    │   ├── MalformedRequest          the worker's: its request is not one
    │   ├── RequestTooLarge
    │   ├── RequestTooSlow
    │   ├── TooManyRequests
    │   ├── UnknownNonce              an attacker's: not given out here, or in another session
    │   ├── ExpiredNonce
    │   ├── ReusedNonce               an attacker's, or a broker's that was lost midway
    │   ├── UnknownToken              an attacker's: not signed by this broker
    │   ├── ExpiredToken
    │   ├── ReusedToken               an attacker's: a token is good once for each thing
    │   ├── RankTaken                 another worker holds the rank
    │   ├── WorkerRevoked             yours: `sealring broker revoke` named it
    │   ├── BrokerMisconfigured       its operator's: it cannot use one of its own files
    │   ├── ResourceNotGranted
    │   ├── NoSuchResource
    │   ├── RecordedOtherwise         two copies of a vault have gone different ways
    │   ├── TooManyRecords            of one vault: the broker keeps no more
    │   ├── StoreUnavailable          the broker's own store does not answer, or its clock jumped
    │   ├── TamperedStore             an attacker's: something else than a broker wrote there
    │   └── BrokenAuditLog            an attacker's: the log was changed
    ├── StoreFailed                   a vault's store refused, or could not be reached
    ├── VaultError                    a vault refused; nothing that failed was given out
    │   ├── NotAVault                 yours: there is no vault, or one that cannot be read
    │   ├── LaterVersion              yours: a later sealring wrote it
    │   ├── NotGranted                yours: the vault is not open to this key
    │   ├── ForeignVault              an attacker's, or yours: another vault is in its place
    │   ├── VaultBusy                 another process changes the vault: wait, and try again
    │   ├── KeysChanged               the vault's keys changed during a save: save again
    │   ├── NoSuchObject              yours: the vault holds nothing under that name
    │   ├── OutputExists              yours: something is where the output should go
    │   ├── UnsafePath                a path that leaves its directory, or a symlink
    │   ├── TamperedHeader            an attacker's: the list of grants was changed
    │   ├── UnsafeEntry               yours: loading it would run code that it brings
    │   ├── BadSource                 the source's: data to ingest are malformed, or far too large
    │   ├── SourceChanged             yours: a source was changed while it was sealed
    │   ├── StageFailed               yours: a function of a pipeline raised an error
    │   ├── WrongPosition             yours: a loader's state belongs to other data
    │   ├── AlreadyClosed             the script's: a vault or a dataset was used after close()
    │   ├── UnadmittedSigner          an attacker's: signed by no worker of this job
    │   ├── MissingPart               a file that the manifest lists is not there
    │   ├── ForeignPart               an attacker's: another file lies in a part's place
    │   ├── RolledBack                an attacker's, or an old backup's: something newer was there
    │   ├── TruncatedFile             an attacker's, or the disk's: a file was cut or extended
    │   ├── TamperedChunk             an attacker's, or the disk's: a chunk is not authentic
    │   └── WrongKey                  sealed under another key, or as another object or part
    ├── LogError                      a log, a proof or a witness cannot be believed
    │   ├── NotALog                   yours: the folder holds no log, or cannot be read
    │   ├── LogInUse                  yours: another process writes to it
    │   ├── MalformedNote             a note, checkpoint, proof or key that is not in its format
    │   ├── ForgedNote                an attacker's: not signed by the key that it names
    │   ├── WrongLog                  signed by a log that is not one of those to believe
    │   ├── TamperedLog               an attacker's, or the disk's: an entry or a hash was changed
    │   ├── TruncatedLog              an attacker's: the end of the log was cut off
    │   ├── ForkedLog                 the log's owner: two views of one log contradict each other
    │   ├── NotIncluded               the proof does not show the entry
    │   ├── NoQuorum                  too few witnesses cosigned
    │   ├── StaleCheckpoint           cosigned too long ago: an old checkpoint shown again
    │   ├── WitnessFault              one witness does not answer, or answers wrongly
    │   ├── MalformedStatement        a statement that is not in its format
    │   ├── ForgedStatement           an attacker's: not signed by the worker that it is about
    │   └── MalformedRun              a run's folder with files that are not its own
    └── GroupError                    the group is closed and its keys are wiped
        ├── TamperedRecord            an attacker's, or broken hardware's
        ├── MissingRecord             an attacker's: records were dropped or reordered
        ├── ReplayedRecord            an attacker's: a record came a second time
        ├── OutOfStep                 the script's: ranks disagree on the collective
        ├── PeerLost                  the peer's: its process or its link ended
        ├── PeerSilent                the network's or the peer's: nothing came in time
        ├── NoLongerAdmitted          yours: a member was revoked, or could not be renewed
        └── GroupClosed               ours: the group was used after it ended

Each class says in its docstring whose fault it is, and each message what to do. All of them are
RuntimeErrors, because that is what torch.distributed's own failures are and scripts catch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sealring._native import Failure


class SealringError(RuntimeError):
    """The root of the tree."""

    audited = False
    """A broker has written it into its audit log."""


class ConfigurationError(SealringError):
    """This worker was set up in a way that cannot run. Nothing was started."""


class NoIdentity(ConfigurationError):
    """No job secret and no certificate was configured, so this worker cannot prove who it is."""


class BadSecret(ConfigurationError):
    """The job secret cannot be read, is not 256 random bits, or others can read it."""


class BadCertificate(ConfigurationError):
    """This worker's own certificate or key cannot be used."""


class BadPolicy(ConfigurationError):
    """The policy file cannot be read; the message names line and field."""


class BadClaims(ConfigurationError):
    """The file of claims cannot be read; the message names the claim."""


class BadKeyFile(ConfigurationError):
    """A vault's key file cannot be read, is not one, or others can read it."""


class DiskFull(ConfigurationError):
    """A file system or this user's quota has no space left. The message names what is unwritten."""


class Unsupported(ConfigurationError):
    """The tensor, operation or option is one that sealring does not serve."""


class PlaintextGroup(ConfigurationError):
    """The job is sealed-only, and the line that the message names asked for an unsealed way."""


class MissingExtra(ConfigurationError):
    """An optional package is not installed; the message says which extra brings it."""


class ScheduleError(ConfigurationError):
    """A collective's programs do not fit together: a mistake in sealring, not in your script."""


class AttestationUnavailable(SealringError):
    """This machine cannot make the evidence that was asked for; the message says what it lacks."""


class TpmFailed(AttestationUnavailable):
    """This machine's TPM cannot be reached, or does not do what was asked of it."""

    def __init__(self, message: str, *, code: int = 0) -> None:
        super().__init__(message)
        self.code = code
        """The TPM's own error code; 0 where it gave none."""


class ForkedProcess(SealringError):
    """A forked child used a group, a sealed store or a key of its parent's, which goes on there.

    A child has none of its parent's keys. It may make a group of its own, after
    destroy_process_group().
    """


class WorkerFailed(SealringError):
    """A worker process of a benchmark or the demo failed; the message is its traceback."""


class HandshakeError(SealringError):
    """A peer could not be admitted, or refused to admit us."""

    def __init__(
        self,
        message: str,
        *,
        peer: int | None = None,
        proven: bool = False,
        misdirected: bool = False,
        reported_by: int | None = None,
    ) -> None:
        super().__init__(message)
        self.peer = peer
        """The rank that the error is about; only a claim unless `proven`."""
        self.proven = proven
        """The peer was admitted: its certificate is this job's, valid today and not revoked, and
        passes the policy. If not, a stranger or a worker that was evicted may have caused this."""
        self.misdirected = misdirected
        """The two are workers of the job with different ranks, groups or attempts than the dialer
        meant: an address was false, which is no fault of either."""
        self.reported_by = reported_by
        """The neighbour that told this worker, which makes `peer` its claim: what is passed on is
        not signed. None where this worker saw it itself."""
        self.passed_on = ""
        """What other members are told of it, where a peer has told it to this worker."""

    @property
    def met(self) -> int | None:
        """The rank on whose connection this worker met the error."""
        return self.peer if self.reported_by is None else self.reported_by

    @property
    def of_a_member(self) -> bool:
        """Whether an admitted worker caused it or told it; else a stranger may have."""
        return self.proven or self.reported_by is not None


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


class CertificateRevoked(HandshakeError):
    """The broker has taken the peer's key out of the job."""


class NotAttested(HandshakeError):
    """The peer cannot show the attestation that this worker's policy demands of it."""


class PeerNotAdmitted(HandshakeError):
    """What the peer's attestation shows is not what this worker's own policy admits."""


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


class GroupEnded(HandshakeError):
    """The peer makes no link any more, because its group has failed."""

    def __init__(
        self,
        message: str,
        *,
        failure: GroupError | None = None,
        peer: int | None = None,
        proven: bool = False,
    ) -> None:
        super().__init__(message, peer=peer, proven=proven)
        self.failure = failure
        """How it failed, as the peer says."""


class StoreError(SealringError):
    """What the store answered cannot be believed, and nothing of it was used."""


class TamperedValue(StoreError):
    """A value is not sealed, is cut, or was sealed for another key, job, run or epoch."""


class ReplayedValue(StoreError):
    """An authentic value that its writer had replaced since, as this process has seen."""


class AttestationError(SealringError):
    """A worker's evidence was refused. It gets no key."""


class MalformedEvidence(AttestationError):
    """The bytes are not the evidence they say they are: cut, extended or scrambled."""


class UnknownEvidence(AttestationError):
    """A kind, version or algorithm that this sealring does not know, and so does not believe."""


class ForgedEvidence(AttestationError):
    """The signature is not over these bytes, or the certificate is for other hardware."""


class UntrustedChain(AttestationError):
    """The certificates do not lead, link by link, to a pinned root."""


class ChainExpired(AttestationError):
    """A certificate of the chain is outside its dates at the time of the check."""


class ChainRevoked(AttestationError):
    """A certificate of the chain is on its issuer's revocation list."""


class StaleRevocationList(AttestationError):
    """A cached revocation list is past its date, or one that the policy needs is missing."""


class BadCollateral(AttestationError):
    """The verifier's own Intel collateral is damaged or not Intel's; nothing was judged by it."""


class NotBound(AttestationError):
    """True evidence, made for another nonce or another worker's key: a replay or a relay."""


class PolicyRefusal(AttestationError):
    """The evidence is true; what it shows is not what the policy admits."""


class KindNotAllowed(PolicyRefusal):
    """The policy does not admit this kind of evidence; SIMULATED evidence among them."""


class DeviceNotAllowed(PolicyRefusal):
    """A GPU or switch is missing, or is of a model or firmware that the policy does not admit."""


class DebugGuest(PolicyRefusal):
    """The host can read a debug guest's memory, so its evidence protects nothing."""


class TcbTooOld(PolicyRefusal):
    """The firmware is older than the policy's minimum."""


class MeasurementNotAllowed(PolicyRefusal):
    """What runs there is not among what the policy lists."""


class GuestNotAllowed(PolicyRefusal):
    """The guest was launched with rights, or on a product, that the policy does not admit."""


class RankNotAllowed(PolicyRefusal):
    """The policy does not let this evidence be this rank."""


class JobNotAllowed(PolicyRefusal):
    """The policy is for another job."""


class BrokerError(SealringError):
    """The broker refused, or could not be asked."""


class BrokerUnreachable(BrokerError):
    """No broker answered in time."""


class UntrustedBroker(BrokerError):
    """What answers there has no certificate of the job's authority for that name."""


class MalformedAnswer(BrokerError):
    """What answered does not speak the broker's protocol."""


class MalformedRequest(BrokerError):
    """A request that is not one of the protocol's, or whose proof of its key is wrong."""


class RequestTooLarge(BrokerError):
    """A request larger than any worker's."""


class RequestTooSlow(BrokerError):
    """A request that did not come whole in the time that any worker needs."""


class TooManyRequests(BrokerError):
    """More requests from one address than the broker serves; come again later."""


class UnknownNonce(BrokerError):
    """A nonce that this broker did not give out, or gave out in another session."""


class ExpiredNonce(BrokerError):
    """A nonce older than the policy's `nonce_seconds`."""


class ReusedNonce(BrokerError):
    """A nonce that evidence was already brought for."""


class UnknownToken(BrokerError):
    """A token that this broker did not sign, or none at all."""


class ExpiredToken(BrokerError):
    """A token past its end."""


class ReusedToken(BrokerError):
    """A token that has fetched this very thing before."""


class RankTaken(BrokerError):
    """Another worker holds the rank, and the policy does not let it be joined again."""


class WorkerRevoked(BrokerError):
    """The worker's key, machine or rank is barred from the job."""


class BrokerMisconfigured(BrokerError):
    """The broker cannot use one of its own files: its operator must mend that, not the worker."""


class ResourceNotGranted(BrokerError):
    """The policy does not grant this resource to this worker."""


class NoSuchResource(BrokerError):
    """The broker has nothing under that name."""


class RecordedOtherwise(BrokerError):
    """The broker has recorded another content under this version of a vault's object."""


class TooManyRecords(BrokerError):
    """The broker keeps no records of more objects of this vault."""


class StoreUnavailable(BrokerError):
    """The broker cannot use its store: no answer, or its clock jumped. It decides nothing."""


class TamperedStore(BrokerError):
    """The broker's store was changed by something else than a broker, or is an older copy."""


class BrokenAuditLog(BrokerError):
    """An entry of the audit log is missing, changed, or not signed by this broker."""


class StoreFailed(SealringError):
    """A store (s3:// and others) refused, could not be reached, or gave something else.

    It is no VaultError: nothing was learned of what the store holds, so that what did not open for
    this reason must not be left out in favour of something older.
    """


class VaultError(SealringError):
    """A vault could not be opened or written. Nothing that failed a check was given out."""


class NotAVault(VaultError):
    """There is no vault in that directory, or its files cannot be read as a vault's."""


class LaterVersion(VaultError):
    """A later version of sealring wrote this; it must be opened with that version."""


class NotGranted(VaultError):
    """The vault is not open to the key that was given."""


class ForeignVault(VaultError):
    """The vault at this path has another id than the one that is expected there."""


class VaultBusy(VaultError):
    """Another process held the vault for too long: wait until it has finished, and try again."""


class KeysChanged(VaultError):
    """The vault got a new key while a checkpoint was saved under the older one: save again."""


class NoSuchObject(VaultError):
    """The vault holds nothing under that name, or not that version of it."""


class OutputExists(VaultError):
    """Something lies where the output should go; nothing is overwritten."""


class UnsafePath(VaultError):
    """A path leads out of its directory, or is a symlink or no regular file."""


class TamperedHeader(VaultError):
    """The vault's header was changed by something that does not hold the vault's key."""


class UnsafeEntry(VaultError):
    """An entry of a checkpoint is a pickle that could run code when it is loaded."""


class BadSource(VaultError):
    """Data to ingest are not what their format says, or exceed a limit. Nothing was committed."""


class SourceChanged(VaultError):
    """A file was changed while it was sealed: seal it again when it no longer changes."""


class StageFailed(VaultError):
    """The function of a pipeline's stage raised an error, or returned what its fields are not."""


class WrongPosition(VaultError):
    """The state of a loader belongs to other data, another order or another mixture."""


class AlreadyClosed(VaultError):
    """A vault, dataset or loader was used after close(), or an iteration that a later one ended."""


class UnadmittedSigner(VaultError):
    """A checkpoint's manifest is not signed by workers of this job, or not by all that wrote it."""


class MissingPart(VaultError):
    """A file that an object's manifest lists is not there."""


class ForeignPart(VaultError):
    """Another file lies in a part's place: of another part, an older version or another vault."""


class RolledBack(VaultError):
    """The ledger has recorded something newer than what the vault holds now."""


class TruncatedFile(VaultError):
    """A sealed file was cut or extended: an attack, or a copy that was not finished."""


class TamperedChunk(VaultError):
    """A chunk of a sealed file is not authentic: changed, exchanged, or damaged by the disk."""


class WrongKey(VaultError):
    """A file was sealed under another key or as another part, or its first bytes were changed."""


class LogError(SealringError):
    """A log, a proof or a witness cannot be believed, and nothing of it was used."""


class NotALog(LogError):
    """The folder holds no log, or its files cannot be read."""


class LogInUse(LogError):
    """Another process holds the lock of the log or of the witness's state."""


class MalformedNote(LogError):
    """A signed note, checkpoint, proof or key is not in the format that C2SP specifies."""


class ForgedNote(LogError):
    """A signature is not over this text, or no known key signed it."""


class WrongLog(LogError):
    """The checkpoint is of a log that the policy does not list."""


class TamperedLog(LogError):
    """An entry or a tile is not what the log's checkpoint commits to: it was changed later."""


class TruncatedLog(LogError):
    """The log ends before a checkpoint that was seen earlier: its end was cut off."""


class ForkedLog(LogError):
    """Two checkpoints of one log contradict each other: rewritten, or a view for each reader."""


class NotIncluded(LogError):
    """The proof does not lead from the entry to the root of the checkpoint."""


class NoQuorum(LogError):
    """Fewer witnesses cosigned the checkpoint than the policy demands."""


class StaleCheckpoint(LogError):
    """A quorum cosigned the checkpoint, but not since the time that the reader asks for."""


class WitnessFault(LogError):
    """One witness cannot be reached, refuses, or answers with something else than it must."""


class MalformedStatement(LogError):
    """An envelope or a statement is not in its format, or is of an unknown version."""


class ForgedStatement(LogError):
    """A statement is not signed by the key of its certificate, or is about another worker."""


class MalformedRun(LogError):
    """A folder is not that of a run, lacks some of it, or has what this run did not write."""


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
        """The number of the collective in which it happened; None outside of any (a message)."""
        self.reported_by = reported_by
        """The rank that saw it, where that was not this one. Where another rank passed it on, that
        is the other's word, and the message names it."""
        self.native: Failure | None = None
        """As the native core told it (core/engine/failures.py)."""


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


class NoLongerAdmitted(GroupError):
    """A member was revoked, or this worker's certificate ended and was not renewed."""


class GroupClosed(GroupError):
    """The group was used after it was destroyed or had failed."""
