"""All errors that sealring raises, in one tree. tools/errors_page.py writes docs/errors.md from it.

Scripts catch errors by their classes. An error's `code` says exactly what happened, and its
spelling does not change: sealring prints it, writes it into logs and sends it to other processes.
If a class has several causes, `causes` lists them. `fault` says who caused the error, and each
message says what to do. All errors are RuntimeErrors, because torch.distributed's own errors are,
and scripts catch those.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from sealring._native import Failure


class SealringError(RuntimeError):
    """The root of the tree."""

    code: str = "sealring"
    """What happened, in a stable spelling. One of the class's `codes` if the raiser gave it."""
    fault: str = ""
    """Who caused the error; empty if the message says it. "yours" is who set up the worker."""
    causes = ""
    """Further codes of this class, and the meaning of each. In parentheses the fault, if it differs
    from the class's."""
    codes: ClassVar[Mapping[str, str]] = {}
    """The codes in `causes`, and the meaning of each."""
    faults: ClassVar[Mapping[str, str]] = {}
    """The faults in `causes`."""
    audited = False
    """Whether a broker has written the error into its audit log."""

    def __init_subclass__(cls, code: str = "", fault: str = "", **more: object) -> None:
        super().__init_subclass__(**more)
        cls.code, cls.fault = code or cls.code, fault or cls.fault
        codes, faults = {}, {}
        for cause in " ".join(vars(cls).get("causes", "").split()).split("- ")[1:]:
            head, _, meaning = cause.partition(": ")
            name, told, whose = head.partition(" (")
            codes[name] = meaning.rstrip()
            if told:
                faults[name] = whose.rstrip(")")
        cls.codes, cls.faults = codes, faults

    def __init__(self, message: str = "", *, code: str | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code
            self.fault = self.faults.get(code, self.fault)


class ConfigurationError(SealringError, code="configuration", fault="yours"):
    """This worker was set up in a way that cannot run. Nothing was started."""

    causes = """
    - configuration.missing_extra: An optional package is not installed; the message says which
      extra brings it.
    - configuration.no_identity: No job secret and no certificate was configured, so this worker
      cannot prove who it is.
    - configuration.schedule_error (ours): A collective's programs do not fit together: a defect
      of sealring, not of your script.
    """


class BadCredential(ConfigurationError, code="configuration.bad_certificate"):
    """This worker's own certificate or key cannot be used. Issue this rank's certificate again."""

    causes = """
    - configuration.bad_secret: The job secret cannot be read, is not 256 random bits, or others
      can read it. Make a random one, mode 0600.
    - configuration.bad_key_file: A vault's key file cannot be read, is not one, or others can
      read it.
    """


class BadPolicy(ConfigurationError, code="configuration.bad_policy"):
    """The policy file cannot be read; the message names line and field.

    Fix the line that the message names.
    """

    causes = """
    - configuration.bad_claims: The file of claims cannot be read; the message names the claim.
    """


class DiskFull(ConfigurationError, code="configuration.disk_full"):
    """A file system or this user's quota has no space left. The message names what is unwritten.

    Free some space, and run the command again.
    """


class Unsupported(ConfigurationError, code="configuration.unsupported"):
    """The tensor, operation or option is one that sealring does not serve."""

    told_by: int | None = None
    """The rank that reported this about itself; None if this worker found it."""


class PlaintextGroup(ConfigurationError, code="configuration.plaintext_group"):
    """The job is sealed-only, and the line that the message names asked for an unsealed way."""


class AttestationUnavailable(SealringError, code="attestation"):
    """This machine cannot make the evidence; the message says what it lacks."""


class TpmFailed(AttestationUnavailable, code="attestation.tpm_failed"):
    """This machine's TPM cannot be reached, or failed."""

    def __init__(self, message: str, *, response: int = 0, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.response = response
        """The TPM's response code; 0 if it gave none."""


class ForkedProcess(SealringError, code="forked_process", fault="the script's"):
    """A forked child used its parent's group, sealed store or key; the parent goes on.

    The child may make a group of its own, after destroy_process_group().
    """


class WorkerFailed(SealringError, code="worker_failed"):
    """A worker process of a benchmark or the demo failed; the message is its traceback."""


class HandshakeError(SealringError, code="handshake"):
    """A peer could not be admitted, or refused to admit us."""

    def __init__(
        self,
        message: str,
        *,
        peer: int | None = None,
        proven: bool = False,
        misdirected: bool = False,
        reported_by: int | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message, code=code)
        self.peer = peer
        """The rank that the error is about. It is only a claim unless `proven`."""
        self.proven = proven
        """Whether the peer was admitted: its certificate is of this job, valid and not revoked, and
        the policy admits it. If not, a stranger or an evicted worker may have caused the error."""
        self.misdirected = misdirected
        """Whether an address was wrong: both are workers of the job, but the peer has another rank,
        group or attempt than the dialer meant. Neither worker is at fault."""
        self.reported_by = reported_by
        """The neighbour that reported the error; None if this worker saw it itself. Reports are not
        signed, so `peer` is then that neighbour's claim."""
        self.passed_on = ""
        """The text that other members get, if a peer reported the error to this worker."""

    @property
    def met(self) -> int | None:
        """The rank on whose connection this worker got the error."""
        return self.peer if self.reported_by is None else self.reported_by

    @property
    def of_a_member(self) -> bool:
        """Whether an admitted worker caused or reported it. Otherwise a stranger may have."""
        return self.proven or self.reported_by is not None


class WrongPeer(HandshakeError, code="handshake.wrong_peer"):
    """The peer is a worker of another job, group or epoch, or has another rank."""

    causes = """
    - handshake.wrong_job: The peer's certificate is for another job.
    - handshake.wrong_rank: The peer proved another rank's name than the one it was met as.
    - handshake.wrong_group: The peer is in another process group, or in another epoch of this
      one.
    """


class DuplicateRank(HandshakeError, code="handshake.duplicate_rank"):
    """Two processes hold valid certificates for one rank."""


class PeerNotAdmitted(HandshakeError, code="handshake.peer_not_admitted"):
    """What the peer's attestation shows is not what this worker's own policy admits."""

    causes = """
    - handshake.not_attested: The peer cannot show the attestation that this worker's policy
      demands.
    - handshake.certificate_expired: A certificate is past its last day (or this machine's clock
      is wrong). Issue a new one, or set the clocks.
    - handshake.certificate_not_yet_valid: A certificate's first day has not come (or this
      machine's clock is wrong). Issue a new one, or set the clocks.
    - handshake.certificate_revoked: The broker has taken the peer's key out of the job.
    - handshake.unknown_authority: A certificate was not signed by this job's authority. Give
      all ranks one secret or one SEALRING_AUTHORITY.
    """


class PeerIncompatible(HandshakeError, code="handshake.incompatible"):
    """The peer runs another version of sealring, or with other settings."""

    causes = """
    - handshake.wrong_world_size: The peer counts another number of workers.
    - handshake.protocol_mismatch: The peer speaks another version of sealring's protocol.
      Install one version of sealring everywhere.
    - handshake.suite_mismatch: The peer offers no cipher suite, or key exchange, that we
      accept. Install one version of sealring everywhere.
    - handshake.settings_mismatch: The peer runs with a setting that all ranks of a group must
      share. Set the same settings everywhere.
    """


class MalformedSetup(HandshakeError, code="handshake.malformed_setup"):
    """What came over the set-up channel is not sealring's protocol."""


class PeerUnreachable(HandshakeError, code="handshake.peer_unreachable"):
    """The peer did not appear, or could not be connected to, in time.

    Look at that rank's log, the addresses, the firewall.
    """


class GroupEnded(HandshakeError, code="handshake.group_ended"):
    """The peer makes no link any more, because its group has failed."""

    def __init__(
        self,
        message: str,
        *,
        failure: GroupError | None = None,
        peer: int | None = None,
        proven: bool = False,
        code: str | None = None,
    ) -> None:
        super().__init__(message, peer=peer, proven=proven, code=code)
        self.failure = failure
        """The group's error, as the peer reports it."""


class StoreError(SealringError, code="store"):
    """What the store answered cannot be believed, and nothing of it was used."""

    causes = """
    - store.tampered_value (an attacker's): A value is not sealed, is cut, or was sealed for
      another key, job, run or epoch. An attacker wrote into the store: check who can reach it.
    - store.replayed_value (an attacker's): An authentic value that its writer had replaced
      since, as this process has seen. An attacker put an older value back: check who can reach
      it.
    """


class AttestationError(SealringError, code="evidence"):
    """A worker's evidence was refused. It gets no key."""

    causes = """
    - evidence.not_bound (an attacker's): True evidence, made for another nonce or another
      worker's key: a replay or a relay.
    - evidence.bad_collateral (yours): The verifier's own Intel collateral is damaged or not
      Intel's; nothing was judged by it. The verifier's own file is not Intel's: fetch it again.
    - evidence.stale_revocation_list (yours): A cached revocation list is past its date, or one
      that the policy needs is missing.
    """


class MalformedEvidence(AttestationError, code="evidence.malformed_evidence", fault="the worker's"):
    """The bytes are not the evidence they say they are: cut, extended or scrambled."""

    causes = """
    - evidence.unknown_evidence (): A kind, version or algorithm that this sealring does not
      know, and so does not believe: update it.
    """


class ForgedEvidence(AttestationError, code="evidence.forged_evidence", fault="an attacker's"):
    """The signature is not over these bytes, or the certificate is for other hardware."""


class UntrustedChain(AttestationError, code="evidence.untrusted_chain", fault="an attacker's"):
    """The certificates do not lead, link by link, to a pinned root."""

    causes = """
    - evidence.chain_expired (the worker's): A certificate of the chain is outside its dates at
      the time of the check.
    - evidence.chain_revoked (): A certificate of the chain is on its issuer's revocation list.
    """


class PolicyRefusal(AttestationError, code="policy"):
    """The evidence is true; what it shows is not what the policy admits."""

    causes = """
    - policy.kind_not_allowed: The policy does not admit this kind of evidence; SIMULATED
      evidence among them.
    - policy.device_not_allowed: A GPU or switch is missing, or is of a model or firmware that
      the policy does not admit.
    - policy.debug_guest: The host can read a debug guest's memory, so its evidence protects
      nothing.
    - policy.tcb_too_old: The firmware is older than the policy's minimum.
    - policy.measurement_not_allowed: What runs there is not among what the policy lists.
    - policy.guest_not_allowed: The guest was launched with rights, or on a product, that the
      policy does not admit.
    - policy.rank_not_allowed: The policy does not let this evidence be this rank.
    - policy.job_not_allowed: The policy is for another job.
    """


class BrokerError(SealringError, code="broker"):
    """The broker refused, or could not be asked."""

    causes = """
    - broker.malformed_answer: What answered does not speak the broker's protocol.
    - broker.misconfigured (its operator's): The broker cannot use one of its own files: its
      operator must mend that.
    - broker.untrusted_broker (an attacker's): What answers has no certificate of the job's
      authority for that name. Check the address and SEALRING_AUTHORITY.
    """


class BrokerUnavailable(BrokerError, code="broker.unavailable"):
    """The broker could not serve the request now. Nothing is decided: ask again later."""

    causes = """
    - broker.unreachable (the network's, or the broker's): No broker answered in time. Check its
      address, and that it runs.
    - broker.store_unavailable: The broker cannot use its store: no answer, or its clock jumped.
      It decides nothing.
    - broker.too_many_requests: More requests from one address than the broker serves; come
      again later.
    - broker.request_too_slow: The request did not come whole in the time that any worker needs.
    """


class MalformedRequest(BrokerError, code="broker.malformed_request", fault="the worker's"):
    """The request is not in the protocol's form, or does not prove its key."""

    causes = """
    - broker.request_too_large: A request larger than any worker's.
    """


class BrokerRefusal(BrokerError, code="broker.refused"):
    """The broker does not give this worker what it asks for. Asking again changes nothing.

    If a nonce or token is not the broker's, has expired or was used: join again.
    """

    causes = """
    - broker.unknown_nonce (an attacker's): A nonce that this broker did not give out, or gave
      out in another session.
    - broker.expired_nonce: A nonce older than the policy's `nonce_seconds`.
    - broker.reused_nonce: A nonce that was used before.
    - broker.unknown_token (an attacker's): A token that this broker did not sign, or none at
      all.
    - broker.expired_token: A token that has expired.
    - broker.reused_token (an attacker's): A token that has fetched the same thing before.
    - broker.rank_taken: Another worker holds the rank, and the policy does not let it be joined
      again.
    - broker.worker_revoked (yours): The worker's key, machine or rank is barred from the job.
    - broker.resource_not_granted: The policy does not grant this resource to this worker.
    - broker.no_such_resource: The broker has nothing under that name.
    - broker.recorded_otherwise: The broker has recorded other content under this version of a
      vault's object: two copies of the vault differ. Find out which is yours.
    - broker.too_many_records: The vault has more objects than the broker keeps records of.
    """


class TamperedStore(BrokerError, code="broker.tampered_store", fault="an attacker's"):
    """The broker's store was changed by something else than a broker, or is an older copy."""

    causes = """
    - broker.broken_audit_log: An entry of the audit log is missing, changed, or not signed by
      this broker. Keep the log, and find out who could change it.
    """


class StoreFailed(SealringError, code="store_failed"):
    """A store (s3:// and others) refused, could not be reached, or gave something else.

    Nothing was learned of what the store holds: nothing older is taken instead.
    """


class VaultError(SealringError, code="vault"):
    """A vault could not be opened or written. Nothing that failed a check was given out."""

    causes = """
    - vault.not_granted (yours): The vault is not open to the key that was given. Ask a holder
      of the vault's key for `sealring vault grant`.
    - vault.unadmitted_signer (an attacker's): A checkpoint's manifest is not signed by all
      workers of this job that wrote it. Check SEALRING_JOB and the secret.
    - vault.foreign: Another vault is at this path than was expected: restore the right one.
    - vault.output_exists: Something lies where the output should go; nothing is overwritten.
    - vault.tampered_header: The vault's header was changed by somebody without the vault's key:
      restore it.
    - vault.unsafe_entry (yours): An entry of a checkpoint is a pickle that could run code when
      it is loaded. Save it as tensors, numbers, strings, lists and dicts.
    - vault.wrong_position: A loader's state belongs to other data. Open the datasets, lengths
      and weights with which it was saved.
    """


class NotAVault(VaultError, code="vault.not_a_vault", fault="yours"):
    """There is no vault in that directory, or its files cannot be read as a vault's."""

    causes = """
    - vault.later_version: A later version of sealring wrote this; it must be opened with that
      version.
    - vault.earlier_version: An earlier version of sealring wrote this; it must be exported with
      that version, and sealed again.
    """


class VaultBusy(VaultError, code="vault.busy"):
    """Another process held the vault for too long: wait until it has finished, and try again."""

    causes = """
    - vault.keys_changed: The vault got a new key while a checkpoint was saved under the older
      one: save again.
    """


class NoSuchObject(VaultError, code="vault.no_such_object", fault="yours"):
    """The vault holds nothing under that name, or not that version of it."""


class UnsafePath(VaultError, code="vault.unsafe_path"):
    """A path leads out of its directory, or is a symlink or no regular file.

    Choose another output; remove symlinks from the input.
    """


class BadSource(VaultError, code="vault.bad_source", fault="the source's"):
    """Data to ingest are not what their format says, or exceed a limit. Nothing was committed."""

    causes = """
    - vault.source_changed: A file was changed while it was sealed: seal it again when it no
      longer changes.
    - vault.stage_failed: The function of a pipeline's stage raised an error, or its result does
      not fit the stage's fields.
    """


class AlreadyClosed(VaultError, code="vault.already_closed", fault="the script's"):
    """A vault, dataset or loader was used after close(), or an iteration that a later one ended."""


class MissingPart(VaultError, code="vault.missing_part"):
    """A file that an object's manifest lists is not there: restore it from a copy."""


class ForeignPart(VaultError, code="vault.foreign_part", fault="an attacker's"):
    """A file of another part, version or vault lies in a part's place.

    Restore the right one from a copy.
    """


class RolledBack(VaultError, code="vault.rolled_back", fault="an attacker's, or an old backup's"):
    """The vault holds something older than the ledger has recorded.

    Restore the newer one, or name a version.
    """


class TruncatedFile(VaultError, code="vault.truncated_file", fault="an attacker's, or the disk's"):
    """A sealed file was cut or extended: restore it from a copy."""


class TamperedChunk(VaultError, code="vault.tampered_chunk", fault="an attacker's, or the disk's"):
    """A chunk of a sealed file was changed: restore the file from a copy."""


class WrongKey(VaultError, code="vault.wrong_key"):
    """A file was sealed under another key or as another part, or its first bytes were changed."""


class LogError(SealringError, code="log"):
    """A log, a proof or a witness cannot be believed, and nothing of it was used."""

    causes = """
    - log.in_use (yours): Another process holds the lock of the log or of the witness's state:
      wait for it.
    - log.witness_fault: One witness cannot be reached, refuses, or gives a wrong answer.
    - log.no_quorum: Fewer witnesses cosigned the checkpoint than the policy demands. Ask the
      witnesses that it names.
    - log.stale_checkpoint: A quorum cosigned the checkpoint, but not since the time that the
      reader asks for. Ask the log for a newer one.
    """


class NotALog(LogError, code="log.not_a", fault="yours"):
    """The folder holds no log, or its files cannot be read."""


class TamperedLog(LogError, code="log.tampered_log", fault="an attacker's, or the disk's"):
    """An entry or a hash of the log was changed later: restore the log from a copy."""

    causes = """
    - log.not_included: The proof does not lead from the entry to the root of the checkpoint.
    """


class ForkedLog(LogError, code="log.forked_log"):
    """Two checkpoints of one log contradict each other. Keep both as proof."""

    causes = """
    - log.truncated_log (an attacker's): The log ends before a checkpoint that was seen earlier:
      its end was cut off. Keep both as proof.
    """


class MalformedStatement(LogError, code="log.malformed_statement"):
    """An envelope or a statement is not in its format, or is of an unknown version."""

    causes = """
    - log.malformed_note: A signed note, checkpoint, proof or key is not in C2SP's format: fetch
      it again.
    """


class ForgedStatement(LogError, code="log.forged_statement", fault="an attacker's"):
    """The worker that the statement names did not sign it."""

    causes = """
    - log.forged_note: A note is not signed by a key that you believe: check the vkey, the
      policy.
    - log.wrong (): The checkpoint is of a log that the policy does not list.
    """


class MalformedRun(LogError, code="log.malformed_run"):
    """A folder is not that of a run, lacks files, or has files that this run did not write."""


class GroupError(SealringError, code="group"):
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
        code: str | None = None,
    ) -> None:
        super().__init__(message, code=code)
        self.peer = peer
        """The number in the job of the rank that the error is about."""
        self.host = host
        """The name that this rank gave of its host."""
        self.operation = operation
        """The operation (such as `all_reduce`), if this rank is in the same collective."""
        self.collective = collective
        """The number of the collective; None if it happened outside of one (in a message)."""
        self.reported_by = reported_by
        """The rank that saw it, if not this one. If a third rank passed the report on, this is that
        rank's claim, and the message names it."""
        self.native: Failure | None = None
        """The failure of the native core (core/engine/failures.py)."""


class TamperedRecord(
    GroupError, code="group.tampered_record", fault="an attacker's, or broken hardware's"
):
    """A record's tag did not match: changed on the way, or sealed under other keys.

    An attacker changes traffic, or hardware fails: check the path.
    """


class MissingRecord(GroupError, code="group.missing_record", fault="an attacker's"):
    """An authentic record came too early: one before it was dropped or held back.

    An attacker drops or reorders records: check the path.
    """


class ReplayedRecord(GroupError, code="group.replayed_record", fault="an attacker's"):
    """An authentic record came a second time. An attacker replays records: check the path."""


class OutOfStep(GroupError, code="group.out_of_step", fault="the script's"):
    """Ranks called different collectives, shapes or dtypes."""


class PeerLost(GroupError, code="group.peer_lost", fault="the peer's"):
    """The peer's process ended, or the link to it was cut.

    Look at that rank's log for why it ended.
    """


class PeerSilent(GroupError, code="group.peer_silent", fault="the network's or the peer's"):
    """Nothing came from the peer within the group's timeout.

    It hangs or is cut off; if only slow, raise the timeout.
    """


class NoLongerAdmitted(GroupError, code="group.no_longer_admitted", fault="yours"):
    """A member was revoked, or this worker's certificate ended and was not renewed.

    A member was revoked, or could not be renewed in time.
    """


class GroupClosed(GroupError, code="group.closed", fault="ours"):
    """The group was used after it was destroyed or had failed."""


def every_class(kind: type[SealringError] = SealringError) -> Iterator[type[SealringError]]:
    """Yields `kind` and its subclasses in this module, parents first."""
    yield kind
    for each in kind.__subclasses__():
        if each.__module__ == __name__:
            yield from every_class(each)


@cache
def classes_by_code() -> Mapping[str, type[SealringError]]:
    return {code: kind for kind in every_class() for code in (kind.code, *kind.codes)}


def error_with(code: str, message: str) -> SealringError | None:
    """Makes the error that another process reported by its code; None for an unknown code."""
    kind = classes_by_code().get(code)
    return None if kind is None else kind(message, code=code)


def named(error: object) -> str:
    """The name of an error in messages and logs: its code, or the class of any other error."""
    return error.code if isinstance(error, SealringError) else type(error).__name__
