"""The statements of a run: from its log and its folder, each verified once."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from cryptography import x509

from sealring.core.identity.certificates import claims_of
from sealring.core.identity.loading import certificate_from_pem
from sealring.core.identity.verification import VerifiedPeer
from sealring.errors import (
    CertificateExpired,
    CertificateNotYetValid,
    MalformedStatement,
    SealringError,
)
from sealring.formats.strict import read_json
from sealring.limits import MAX_WORLD
from sealring.record.audit.findings import Fault, Finding
from sealring.record.audit.log_check import Logged
from sealring.record.audit.trust import AuditTrust
from sealring.record.provenance.intervals import Interval, Worker
from sealring.record.provenance.runs import RunHead
from sealring.record.provenance.statements import of_another_run, statement_digest, verify_statement
from sealring.record.provenance.transformations import Transformation

_STATEMENT_STARTS = b'{"payload"'
NOT_COUNTED = (
    "an owner's record counts; where no owner is named, one that all ranks sign whose certificates "
    "name the world's size"
)
"""Why a worker's own record of a stage or an export does not."""


@dataclass(frozen=True, slots=True)
class Turn:
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
        """It begins at the step of a checkpoint that it read, as a run does that recovers."""
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
    """Who signed, in words."""
    content: Transformation
    rank: int | None = None
    """The worker that signed; None: an owner, or all ranks."""


@dataclass(slots=True)
class Records:
    turns: list[Turn] = field(default_factory=list)
    made: list[Made] = field(default_factory=list)
    """Those that count: an owner signed, or all ranks where the auditor names no owner."""
    uncounted: list[Made] = field(default_factory=list)
    """Of single workers: any of them could pass any file off as an output of the run."""
    payloads: dict[str, str] = field(default_factory=dict)
    certificates: dict[str, x509.Certificate] = field(default_factory=dict)
    """SHA-256 of a certificate that signed a statement here, and the certificate."""
    keys: dict[str, str] = field(default_factory=dict)
    """By the same digest: SHA-256 of the certificate's public key, as a broker names its holder."""
    worlds: dict[str, int | None] = field(default_factory=dict)
    """By the same digest: the size of the world that the certificate was issued for."""
    findings: list[Finding] = field(default_factory=list)

    chains: dict[int, list[Turn]] = field(default_factory=dict)
    """By rank, in the order of sequence numbers."""

    @property
    def world(self) -> int:
        """The number of ranks, as most certificates say; as most statements say if none does."""
        votes = Counter(chain[0].interval.world for chain in self.chains.values())
        return self.certified_world or max(votes, key=votes.__getitem__, default=0)

    @property
    def certified_world(self) -> int:
        """The number of ranks, as most certificates say; 0 if none does.

        A worker whose certificate does not say it could name any, also a world of its own.
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
    """`logged` is None if the log is not believed.

    Statements are read one at a time: of those that are not believed, only a finding is kept.
    """
    records = Records()
    seen: set[str] = set()
    for name, envelope in statements:
        digest = statement_digest(envelope)
        if digest in seen:
            continue
        seen.add(digest)
        if logged is not None and digest not in logged.places:
            records.findings.append(_not_logged(name, digest, envelope))
        _read(records, head, digest, name, envelope, trust)
    # A file that was removed hides nothing: the log has the whole statement.
    for digest, entry in logged.without(seen) if logged is not None else ():
        if entry.startswith(_STATEMENT_STARTS):
            _read(records, head, digest, f"the log's entry {digest[:12]}", entry, trust)
    for turn in sorted(records.turns, key=lambda turn: (turn.rank, turn.interval.sequence)):
        records.chains.setdefault(turn.rank, []).append(turn)
    records.made, records.uncounted = _counted(records, named_owners=bool(trust.owners))
    return records


def _counted(records: Records, *, named_owners: bool) -> tuple[list[Made], list[Made]]:
    """What is said by an owner, or by all ranks alike; and what single workers say."""
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
    """All but the times, which differ between ranks that did the same."""
    lists = tuple(map(tuple, (one.inputs, one.outputs, one.code)))
    return one.kind, one.name, lists, one.parameters


def _not_logged(name: str, digest: str, envelope: bytes) -> Finding:
    return Finding(
        Fault.NOT_LOGGED,
        (_signer_said(envelope), "the log's owner"),
        f"{name} is not in the run's log: it was made or changed later, or the log's end was cut "
        "off",
        (digest,),
    )


def _read(
    records: Records, head: RunHead, digest: str, name: str, envelope: bytes, trust: AuditTrust
) -> None:
    try:
        found = verify_statement(envelope, trust.authorities, owners=trust.owners)
    except SealringError as problem:
        records.findings.append(
            Finding(
                _fault_of(problem),
                (_signer_said(envelope),),
                f"{name} is not believed. {type(problem).__name__}: {problem}",
                (digest,),
            )
        )
        return
    if isinstance(found.content, Interval) and found.content.world > MAX_WORLD:
        text = f"{name} names a world of {found.content.world}; the most is {MAX_WORLD}"
        who = (_signer_said(envelope),)
        records.findings.append(Finding(Fault.UNREADABLE, who, text, (digest,)))
        return
    strange = of_another_run(found, head.run, head.job)
    if strange:
        worker = found.worker
        party = f"rank {worker.rank} of {worker.job}" if worker else "the run's owner"
        text = f"{name} is {strange}, and this is run {head.run} of job {head.job}"
        # It may be true where it belongs, and its signer need not be the one who put it here.
        records.findings.append(Finding(Fault.OTHER_JOB, (party, "the disk"), text, (digest,)))
        return
    records.payloads[digest] = found.payload.decode()
    if found.worker is not None and found.certificate is not None:
        records.certificates[found.worker.certificate] = found.certificate
        assert isinstance(found.signer, VerifiedPeer)  # a worker's signature has no other signer
        records.keys[found.worker.certificate] = found.signer.key
        records.worlds[found.worker.certificate] = found.signer.world
    if isinstance(found.content, Interval):
        assert found.worker is not None  # verify_statement demands a worker's signature
        records.turns.append(Turn(digest, found.worker, found.content))
    else:
        worker = found.worker
        rank = worker.rank if worker else None
        signer = f"the owner {str(found.signer)[:12]}" if rank is None else f"rank {rank}"
        records.made.append(Made(digest, signer, found.content, rank))


def _fault_of(problem: SealringError) -> Fault:
    if isinstance(problem, MalformedStatement):
        return Fault.UNREADABLE
    if isinstance(problem, CertificateExpired | CertificateNotYetValid):
        return Fault.OUTSIDE_DATES
    return Fault.FORGED


def _signer_said(envelope: bytes) -> str:
    """Whom a statement that is not believed names as its signer. Nothing of it is proved."""
    try:
        (signature,) = read_json(envelope)["signatures"]
        pem = base64.b64decode(signature["certificate"], validate=True)
        name = claims_of(certificate_from_pem(pem, ValueError())).name
    except (ValueError, KeyError, TypeError):
        return "the author of the file"
    return f"the author of the file, which names rank {name.rank} of {name.job}"
