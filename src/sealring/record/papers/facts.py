"""What a run's statements say, summed up. All of them were verified; none is more than a word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from sealring.core.identity.verification import is_issued_by
from sealring.errors import MalformedRun
from sealring.record.statements.forms import (
    Attestation,
    CheckpointRef,
    Code,
    Interval,
    Named,
    Privacy,
    Transformation,
)
from sealring.record.statements.run_folder import RunFolder, check_folder
from sealring.record.statements.signing import of_another_run, verify_statement


def rfc3339(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


@dataclass(frozen=True, slots=True)
class RunFacts:
    run: str
    job: str
    authority: str
    """SHA-256 of the certificate that the workers' were issued by."""
    world: int
    steps: int
    started: int
    finished: int
    complete: bool
    """Every rank's chain goes on to a final statement."""
    statements: int
    code: Code
    packages: bytes
    configuration: str
    datasets: tuple[Named, ...]
    checkpoints: tuple[CheckpointRef, ...]
    attestations: tuple[Attestation, ...]
    privacy: Privacy | None
    transformations: tuple[Transformation, ...]
    envelopes: tuple[bytes, ...]
    """Of the transformations, as they were signed."""

    def export_of(self, digest: str) -> tuple[Transformation, bytes]:
        """The export that wrote a file with this digest, and its envelope.

        An owner's record names no run. So it is of this one only by what went into it.
        """
        written = {one.sha256 for one in self.checkpoints}
        strange = ""
        for one, envelope in zip(self.transformations, self.envelopes, strict=True):
            if one.kind != "export" or all(digest != made.sha256 for made in one.outputs):
                continue
            others = [source.name for source in one.inputs if source.sha256 not in written]
            if one.inputs and not others:
                return one, envelope
            strange = others[0] if others else "nothing"
        if strange:
            raise MalformedRun(
                f"the file with the SHA-256 {digest} was exported from {strange[:200]!r}, which no "
                f"rank of run {self.run} wrote: it is another run's"
            )
        raise MalformedRun(
            f"no export of run {self.run} wrote a file with the SHA-256 {digest}: export with "
            "`sealring vault open --record RUN`, and give the file as it was written"
        )


def facts_of(
    run: RunFolder,
    authorities: Sequence[x509.Certificate],
    owners: Sequence[Ed25519PublicKey],
    job: str | None = None,
) -> RunFacts:
    """MalformedRun where the folder or a chain is not as ranks leave it, or is of another job."""
    check_folder(run.path)
    if job is not None and run.head.job != job:
        raise MalformedRun(
            f"{run.path} is of job {run.head.job}, and not of {job}: its workers were not admitted "
            "to that job, whatever they say of its model"
        )
    intervals: list[tuple[int, Interval]] = []
    chains: dict[int, list[tuple[Interval, str]]] = {}
    transformations: list[tuple[Transformation, bytes]] = []
    attestations: dict[Attestation, None] = {}
    issuers: dict[x509.Certificate, None] = {}
    statements = 0
    for name, envelope in run.statements():
        found = verify_statement(envelope, authorities, owners=owners)
        if strange := of_another_run(found, run.head.run, run.head.job):
            raise MalformedRun(
                f"{name} is {strange}, and {run.path} is of run {run.head.run} of job "
                f"{run.head.job}: remove it, or ask `sealring audit check` who put it there"
            )
        statements += 1
        if isinstance(found.content, Transformation):
            if found.worker is None:  # a worker could pass any file off as an export
                transformations.append((found.content, envelope))
        elif found.worker is not None:
            intervals.append((found.worker.rank, found.content))
            chains.setdefault(found.worker.rank, []).append((found.content, found.digest))
            if found.worker.attestation is not None:
                attestations[found.worker.attestation] = None
            if found.certificate is not None:
                issuers[_issuer(found.certificate, authorities)] = None
    if not intervals:
        raise MalformedRun(f"{run.path} has no statement of a worker")
    for rank, chain in chains.items():
        _require_unbroken(rank, chain)
    (authority, *others) = issuers
    if others:
        raise MalformedRun(
            f"the workers of {run.path} have certificates of {len(issuers)} authorities, and "
            "papers name the one that built the model: give the authority of this run alone"
        )
    contents = [interval for _, interval in intervals]
    last = max(contents, key=lambda one: (one.end_step, one.finished))
    packages = run.evidence(last.code.packages)
    if packages is None:
        raise MalformedRun(
            f"{run.path} has no list of the packages that ran ({last.code.packages}): restore it "
            "in evidence/, a bill of materials without it would name none"
        )
    return RunFacts(
        run=run.head.run,
        job=run.head.job,
        authority=authority.fingerprint(hashes.SHA256()).hex(),
        world=last.world,
        steps=last.end_step,
        started=min(one.started for one in contents),
        finished=max(one.finished for one in contents),
        complete=all(_has_end(chains.get(rank, [])) for rank in range(last.world)),
        statements=statements,
        code=last.code,
        packages=packages,
        configuration=last.configuration,
        datasets=tuple(
            dict.fromkeys(Named(part.name, part.sha256) for one in contents for part in one.data)
        ),
        checkpoints=tuple(part for one in contents for part in one.checkpoints_out),
        attestations=tuple(attestations),
        privacy=max((one.privacy for one in contents if one.privacy), key=_spent, default=None),
        transformations=tuple(one for one, _ in transformations),
        envelopes=tuple(envelope for _, envelope in transformations),
    )


def _issuer(
    certificate: x509.Certificate, authorities: Sequence[x509.Certificate]
) -> x509.Certificate:
    """Of these authorities, the one that signed a certificate which one of them signed."""
    return next(one for one in authorities if is_issued_by(certificate, (one,)))


def _require_unbroken(rank: int, chain: Sequence[tuple[Interval, str]]) -> None:
    """What is missing in the middle could name other data; only an end can be open."""
    before, ended = None, False
    for place, (stated, digest) in enumerate(sorted(chain, key=_number)):
        if ended:
            raise MalformedRun(f"rank {rank} goes on after its final statement, {place - 1}")
        if (stated.sequence, stated.previous) != (place, before):
            raise MalformedRun(
                f"statement {place} of rank {rank} is missing, exchanged or there twice: ask "
                "`sealring audit check` what was done to the records"
            )
        before, ended = digest, stated.final


def _has_end(chain: Sequence[tuple[Interval, str]]) -> bool:
    return bool(chain) and max(chain, key=_number)[0].final


def _number(stated: tuple[Interval, str]) -> int:
    return stated[0].sequence


def _spent(said: Privacy) -> tuple[bool, Decimal]:
    """More of it is larger; what is no number is the most."""
    try:
        epsilon = Decimal(said.epsilon)
    except InvalidOperation:
        epsilon = Decimal("NaN")
    return (False, epsilon) if epsilon.is_finite() else (True, Decimal(0))
