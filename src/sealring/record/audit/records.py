"""Verifies each statement of a run once, and reads the run's log.

It also holds whom the auditor trusts, and which run and job all records must belong to.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from sealring.core.identity.certificates import claims_of
from sealring.core.identity.loading import certificate_from_pem
from sealring.core.identity.verification import VerifiedPeer
from sealring.errors import (
    ForgedStatement,
    LogError,
    MalformedStatement,
    NotALog,
    SealringError,
    named,
)
from sealring.formats.log.broker_entries import log_of_broker
from sealring.formats.log.checkpoints import SignedCheckpoint, open_checkpoint
from sealring.formats.log.folder import StoredTree, read_checkpoint
from sealring.formats.log.policy import LogPolicy
from sealring.formats.strict import read_json
from sealring.limits import MAX_WORLD
from sealring.record.audit.findings import Fault, Finding
from sealring.record.statements.forms import Interval, Transformation, Worker
from sealring.record.statements.run_folder import MAX_FILES, RunHead, run_of_log
from sealring.record.statements.signing import of_another_run, statement_digest, verify_statement

# ---- whom an auditor trusts; none of it is taken from the run's folder


@dataclass(frozen=True, slots=True)
class AuditTrust:
    authorities: Sequence[x509.Certificate]
    """The certificate authorities that issue workers' certificates."""
    log: LogPolicy
    """The run's log, its witnesses, and how many of them must have cosigned."""
    owners: Sequence[Ed25519PublicKey] = ()
    """The keys that sign statements about things made outside of a job."""
    job: str | None = None
    """The job that the run must belong to. None: the one that `run.json` names, which is not
    signed. An authority may serve several jobs."""
    seen: Sequence[SignedCheckpoint] = ()
    """Checkpoints of the run's log, or of a broker's, that were seen earlier or elsewhere."""
    brokers: LogPolicy | None = None
    """The policy for the logs of the authorities' brokers, if `Question.broker_logs` names any."""
    vendors: object = None
    """Vendors' lists, collateral and references, for evidence: the result of read_cache."""

    @property
    def broker_origins(self) -> frozenset[str]:
        """The names of the logs of these authorities' brokers."""
        return frozenset(map(log_of_broker, self.authorities))


# ---- the log: signed, cosigned, whole, and a continuation of what was seen of it elsewhere


OWNER = "the log's owner"
_PARTIES: Final = {
    "log.no_quorum": (OWNER, "its witnesses"),
    "log.stale_checkpoint": (OWNER, "its witnesses"),
    "log.tampered_log": ("the disk", OWNER),
    "log.not_included": ("the disk", OWNER),
    "log.truncated_log": (OWNER, "the disk"),
}
"""Who may have caused an error, by its code. For other codes it is the log's owner alone."""


@dataclass(slots=True)
class Logged:
    """The entries of a trusted log. They stay on the disk."""

    stored: StoredTree
    root: bytes
    places: dict[str, int] = field(default_factory=dict)
    """The index of each entry by the digest of its statement."""

    def without(self, known: Container[str]) -> Iterator[tuple[str, bytes]]:
        """The entries that are not in `known`, with their digests, read and proved again."""
        for digest, index in self.places.items():
            if digest not in known:
                yield digest, self.stored.entry(index, self.root)


def check_log(
    folder: Path, trust: AuditTrust
) -> tuple[SignedCheckpoint | None, Logged | None, list[Finding]]:
    """The log's checkpoint, its entries, and what is wrong with it.

    If the log is not trusted, there are no entries. Then no finding says that a statement is
    missing in the log.
    """
    places: dict[str, int] = {}
    try:
        signed, stored = read_log(
            folder, trust.log, lambda index, entry: places.update({statement_digest(entry): index})
        )
    except LogError as problem:
        return None, None, [refused(problem)]
    logged = Logged(stored, signed.root, places)
    brokers = trust.broker_origins
    seen = [one for one in trust.seen if one.origin not in brokers]
    return signed, logged, check_seen(signed, stored, seen)


def check_seen(
    signed: SignedCheckpoint,
    stored: StoredTree,
    seen: Sequence[SignedCheckpoint],
    parties: tuple[str, ...] = (),
) -> list[Finding]:
    """Findings if the log does not continue the checkpoints that were seen elsewhere."""
    findings = []
    for earlier in seen:
        try:
            if earlier.origin != signed.origin:
                raise ForgedStatement(
                    f"the run's log is {signed.origin}, and a checkpoint that was seen "
                    f"elsewhere is of {earlier.origin}: it cannot be compared",
                    code="log.wrong",
                )
            stored.check_contains(signed.root, earlier.checkpoint, "a checkpoint seen elsewhere")
        except LogError as problem:
            findings.append(refused(problem, parties))
            if problem.code == "log.forked_log":
                findings += _forked_witnesses(signed, earlier)
    return findings


def read_log(
    folder: Path, policy: LogPolicy, show: Callable[[int, bytes], None]
) -> tuple[SignedCheckpoint, StoredTree]:
    """Reads and checks a whole log. Use what `show` was given only after this has returned."""
    signed = open_checkpoint(read_checkpoint(folder), policy)
    if signed.size > MAX_FILES:
        raise NotALog(f"the log has {signed.size} entries, and an audit reads {MAX_FILES}")
    stored = StoredTree(folder, signed.size)
    stored.check_all(signed.root, show)
    return signed, stored


def refused(problem: LogError, parties: tuple[str, ...] = ()) -> Finding:
    parties = parties or _PARTIES.get(problem.code, (OWNER,))
    return Finding(Fault.LOG_REFUSED, parties, f"{named(problem)}: {problem}")


def _forked_witnesses(one: SignedCheckpoint, other: SignedCheckpoint) -> list[Finding]:
    """Witnesses that cosigned both views. Each of them broke its promise by that."""
    return [
        Finding(
            Fault.WITNESS_FORKED,
            (f"the witness {key.name}",),
            f"it cosigned two views of the log {one.origin}, of {one.size} and of "
            f"{other.size} entries, that contradict each other: both signatures verify",
        )
        for key in sorted(set(one.cosigned) & set(other.cosigned), key=lambda key: key.name)
    ]


# ---- the run and the job


def wanted_run(
    head: RunHead, log: SignedCheckpoint | None, trust: AuditTrust
) -> tuple[RunHead, list[Finding]]:
    """The run and job that every statement must name, and a finding if `run.json` differs."""
    logged = None if log is None else run_of_log(log.origin)
    wanted = replace(head, run=logged or head.run, job=trust.job or head.job)
    if wanted == head:
        return head, []
    text = (
        f"run.json names run {head.run} of job {head.job}, and the audit is of run {wanted.run} of "
        f"job {wanted.job}: it was changed, or this is the folder of another run"
    )
    return wanted, [Finding(Fault.OTHER_JOB, ("the disk",), text)]


# ---- statements


_STATEMENT_STARTS = b'{"payload"'
NOT_COUNTED = (
    "an owner's record counts; where no owner is named, one that all ranks sign whose certificates "
    "name the world's size"
)
"""Why a single worker's record of a stage or an export does not count."""


@dataclass(frozen=True, slots=True)
class RankInterval:
    """One rank's statement about one interval."""

    digest: str
    worker: Worker
    interval: Interval

    @property
    def rank(self) -> int:
        return self.worker.rank

    @property
    def party(self) -> str:
        return f"rank {self.worker.rank}"

    @property
    def went_back(self) -> bool:
        """Whether the interval begins at the step of a checkpoint it read, as after a recovery."""
        first = self.interval.first_step
        return any(one.step == first for one in self.interval.checkpoints_in)

    @property
    def where(self) -> str:
        first, end = self.interval.first_step, self.interval.end_step
        return f"rank {self.rank}, interval {self.interval.sequence} (steps {first} to {end})"


@dataclass(frozen=True, slots=True)
class Made:
    """A statement about an ingest, a stage, an export or an evaluation."""

    digest: str
    signer: str
    """The signer, in words."""
    content: Transformation
    rank: int | None = None
    """The worker that signed. None if an owner or all ranks signed."""

    @property
    def party(self) -> str:
        return self.signer

    @property
    def where(self) -> str:
        return self.content.name


@dataclass(slots=True)
class Records:
    turns: list[RankInterval] = field(default_factory=list)
    made: list[Made] = field(default_factory=list)
    """Records that count: an owner signed, or all ranks did and the auditor names no owner."""
    uncounted: list[Made] = field(default_factory=list)
    """Records of single workers, which could pass off any file as an output of the run."""
    payloads: dict[str, str] = field(default_factory=dict)
    certificates: dict[str, x509.Certificate] = field(default_factory=dict)
    """Certificates that signed a statement here, by their SHA-256."""
    keys: dict[str, str] = field(default_factory=dict)
    """SHA-256 of each certificate's public key, by which a broker names its holder."""
    worlds: dict[str, int | None] = field(default_factory=dict)
    """The size of the world that each certificate was issued for."""
    findings: list[Finding] = field(default_factory=list)

    chains: dict[int, list[RankInterval]] = field(default_factory=dict)
    """Each rank's statements in the order of sequence numbers."""

    @property
    def world(self) -> int:
        """The number of ranks that most certificates name, or most statements if none does."""
        votes = Counter(chain[0].interval.world for chain in self.chains.values())
        return self.certified_world or max(votes, key=votes.__getitem__, default=0)

    @property
    def certified_world(self) -> int:
        """The number of ranks that most certificates name. 0 if none does.

        A worker whose certificate names no number could state any, even a world of its own.
        """
        said = (self.worlds[chain[0].worker.certificate] for chain in self.chains.values())
        votes = Counter(one for one in said if one is not None)
        return max(votes, key=votes.__getitem__, default=0)


def read_records(
    head: RunHead,
    statements: Iterable[tuple[str, bytes]],
    logged: Logged | None,
    trust: AuditTrust,
) -> Records:
    """Reads and verifies statements. `logged` is None if the log is not trusted.

    They are read one at a time. If one is not believed, only a finding is kept of it.
    """
    records = Records()
    seen: set[str] = set()
    for name, envelope in statements:
        digest = statement_digest(envelope)
        if digest in seen:
            continue
        seen.add(digest)
        if logged is not None and digest not in logged.places:
            text = (
                f"{name} is not in the run's log: it was made or changed later, or the log's end "
            )
            who = (_signer_said(envelope), OWNER)
            finding = Finding(Fault.NOT_LOGGED, who, f"{text}was cut off", (digest,))
            records.findings.append(finding)
        _read(records, head, digest, name, envelope, trust)
    # Removing a file hides nothing, because the log has the whole statement.
    for digest, entry in logged.without(seen) if logged is not None else ():
        if entry.startswith(_STATEMENT_STARTS):
            _read(records, head, digest, f"the log's entry {digest[:12]}", entry, trust)
    for turn in sorted(records.turns, key=lambda turn: (turn.rank, turn.interval.sequence)):
        records.chains.setdefault(turn.rank, []).append(turn)
    records.made, records.uncounted = _counted(records, named_owners=bool(trust.owners))
    return records


def _counted(records: Records, *, named_owners: bool) -> tuple[list[Made], list[Made]]:
    """The records of an owner or of all ranks alike, and those of single workers."""
    counted = [one for one in records.made if one.rank is None]
    by_content: dict[object, dict[int, Made]] = {}
    for one in records.made:
        if one.rank is not None:
            by_content.setdefault(_essence(one.content), {}).setdefault(one.rank, one)
    everyone = frozenset() if named_owners else frozenset(range(records.certified_world))
    alike = [said for said in by_content.values() if everyone and said.keys() == everyone]
    counted += [Made(said[0].digest, f"all {len(said)} ranks", said[0].content) for said in alike]
    known = {one.digest for said in alike for one in said.values()}
    single = [one for one in records.made if one.rank is not None and one.digest not in known]
    return counted, single


def _essence(one: Transformation) -> object:
    """All fields but the times, which differ between ranks that did the same work."""
    lists = tuple(map(tuple, (one.inputs, one.outputs, one.code)))
    return one.kind, one.name, lists, one.parameters


def _read(
    records: Records, head: RunHead, digest: str, name: str, envelope: bytes, trust: AuditTrust
) -> None:
    def refuse(fault: Fault, text: str, *parties: str) -> None:
        who = parties or (_signer_said(envelope),)
        records.findings.append(Finding(fault, who, text, (digest,)))

    try:
        found = verify_statement(envelope, trust.authorities, owners=trust.owners)
    except SealringError as problem:
        refuse(_fault_of(problem), f"{name} is not believed. {named(problem)}: {problem}")
        return
    content, worker = found.content, found.worker
    if isinstance(content, Interval) and content.world > MAX_WORLD:
        text = f"{name} names a world of {content.world}; the most is {MAX_WORLD}"
        refuse(Fault.UNREADABLE, text)
        return
    strange = of_another_run(found, head.run, head.job)
    if strange:
        party = f"rank {worker.rank} of {worker.job}" if worker else "the run's owner"
        text = f"{name} is {strange}, and this is run {head.run} of job {head.job}"
        # The statement may be true of its own run, and others than its signer may have put it here.
        refuse(Fault.OTHER_JOB, text, party, "the disk")
        return
    records.payloads[digest] = found.payload.decode()
    if worker is not None and found.certificate is not None:
        records.certificates[worker.certificate] = found.certificate
        assert isinstance(found.signer, VerifiedPeer)  # a worker's signature has no other signer
        records.keys[worker.certificate] = found.signer.key
        records.worlds[worker.certificate] = found.signer.world
    if isinstance(content, Interval):
        assert worker is not None  # verify_statement demands a worker's signature
        records.turns.append(RankInterval(digest, worker, content))
    else:
        rank = worker.rank if worker else None
        signer = f"the owner {str(found.signer)[:12]}" if rank is None else f"rank {rank}"
        records.made.append(Made(digest, signer, content, rank))


def _fault_of(problem: SealringError) -> Fault:
    if isinstance(problem, MalformedStatement):
        return Fault.UNREADABLE
    if problem.code in ("handshake.certificate_expired", "handshake.certificate_not_yet_valid"):
        return Fault.OUTSIDE_DATES
    return Fault.FORGED


def _signer_said(envelope: bytes) -> str:
    """The signer that an unbelieved statement names. Nothing of it is proved."""
    try:
        (signature,) = read_json(envelope)["signatures"]
        pem = base64.b64decode(signature["certificate"], validate=True)
        name = claims_of(certificate_from_pem(pem, ValueError())).name
    except (ValueError, KeyError, TypeError):
        return "the author of the file"
    return f"the author of the file, which names rank {name.rank} of {name.job}"
